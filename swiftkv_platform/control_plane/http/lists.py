"""Query parameters of list routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Depends, Query

from swiftkv_platform.control_plane.base import Page

Order = Literal["asc", "desc"]


def paged(default: int, first: Order, *, most: int = 1000) -> Callable[..., Page]:
    """Return the dependency that reads a page from the query; by default it has `default` items, in order `first`."""

    def page(
        after: str | None = Query(None, description="`last_id` of the previous page"),
        limit: int = Query(default, ge=1, le=most),
        order: Order = first,
    ) -> Page:
        return Page(after, limit, order)

    return page


NewestFirst = Annotated[Page, Depends(paged(20, "desc"))]


OldestFirst = Annotated[Page, Depends(paged(100, "asc"))]
