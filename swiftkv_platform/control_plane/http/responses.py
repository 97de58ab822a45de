"""Base classes of JSON responses, lists, and query parameters of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Annotated, Generic, Literal, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.limits import PAGE_BYTES

T = TypeVar("T")


Item = TypeVar("Item", bound=BaseModel)


class ResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, from_attributes=True)


class ListResponse(ResponseModel, Generic[Item]):
    """Page of a list; `after={last_id}` gives the next."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None
    left_out: list[str] = []
    """Ids of unreadable rows of this page, stored by another version of the program."""


def make_list_response(
    page: Page[T],
    make_item: Callable[[T], Item],
    cursor: Callable[[Item], str] = attrgetter("id"),
    order: Literal["asc", "desc"] = "asc",
) -> ListResponse[Item]:
    """Return the response of a list. It ends before its objects exceed `PAGE_BYTES`, but has at least one.
    `first_id` and `last_id`, in `order`, may be ids of unreadable rows."""
    # 1. objects that fit  2. unreadable rows between them  3. the page's first and last id
    data = limit_page_bytes(map(make_item, page.items))
    is_cut = len(data) < len(page.items)
    ids, left_out = [cursor(item) for item in data], list(page.unreadable_ids)
    if left_out:
        if is_cut:  # those after the page's end belong to a later page
            left_out = [each for each in left_out if (each < ids[-1] if order == "asc" else each > ids[-1])]
        ids = sorted([*ids, *left_out], reverse=order == "desc")
    return ListResponse(
        data=data,
        has_more=page.has_more or is_cut,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        left_out=left_out,
    )


def limit_page_bytes(items: Iterable[Item]) -> list[Item]:
    """Return the first objects that fit `PAGE_BYTES` as JSON, at least one. Later objects are not created."""
    found: list[Item] = []
    size = 0
    for item in items:
        size += len(to_json(item))
        if found and size > PAGE_BYTES.default:
            break
        found.append(item)
    return found


Order = Literal["asc", "desc"]


def make_page_query(default_limit: int, default_order: Order, *, max_limit: int = 1000) -> Callable[..., PageQuery]:
    """Return a dependency that parses a page's query parameters."""

    def read_page(
        after: str | None = Query(None, description="`last_id` of the previous page"),
        limit: int = Query(default_limit, ge=1, le=max_limit),
        order: Order = default_order,
    ) -> PageQuery:
        return PageQuery(after, limit, order)

    return read_page


NewestFirst = Annotated[PageQuery, Depends(make_page_query(20, "desc"))]


OldestFirst = Annotated[PageQuery, Depends(make_page_query(100, "asc"))]
