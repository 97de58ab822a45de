"""JSON models of answers that every room's routes share."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from swiftkv_platform.control_plane.base import Slice

T = TypeVar("T")


Item = TypeVar("Item", bound=BaseModel)


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, from_attributes=True)


class ListAnswer(Answer, Generic[Item]):
    """Page of a list; `after={last_id}` gives the next."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None
    left_out: list[str] = []
    """Ids of rows of this page that cannot be read, as another version of the program stored them."""


def list_answer(
    found: Slice[T],
    make: Callable[[T], Item],
    cursor: Callable[[Item], str] = attrgetter("id"),
    order: Literal["asc", "desc"] = "asc",
) -> ListAnswer[Item]:
    """Return the answer of a list. Its first and last id, in `order`, may be those of rows that are left out."""
    data = [make(item) for item in found.items]
    ids = [cursor(item) for item in data]
    if found.left_out:
        ids = sorted([*ids, *found.left_out], reverse=order == "desc")
    return ListAnswer(
        data=data,
        has_more=found.has_more,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        left_out=list(found.left_out),
    )
