"""Parts of lists as routes ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Depends, Query

from swiftkv_platform.control_plane.base import Page
from swiftkv_platform.control_plane.http.turns import ReadingTurn

Order = Literal["asc", "desc"]


def paged(default: int, first: Order, *, most: int = 1000) -> Callable[..., Page]:
    """The part of a list that a query asks for, of `default` items without a word."""

    def page(
        after: str | None = Query(None, description="`last_id` of the page before"),
        limit: int = Query(default, ge=1, le=most),
        order: Order = first,
    ) -> Page:
        return Page(after, limit, order)

    return page


def _in_turn(page: Annotated[Page, Depends(paged(20, "desc"))], _turn: ReadingTurn) -> Page:
    return page


NewestFirst = Annotated[Page, Depends(_in_turn)]
"""A page of the database's rows, once it is the tenant's turn; see `ReadingTurn`."""


OldestFirst = Annotated[Page, Depends(paged(100, "asc"))]
