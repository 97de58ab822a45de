"""Parts of lists as routes ask for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

from fastapi import Depends, Query, Request

from swiftkv_platform.control_plane.base import Page

Order = Literal["asc", "desc"]


class PageTurns:
    """One page of documents at a time for each tenant: of specs as large as can be, a page is work for a processor."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, tenant: str) -> asyncio.Lock:
        return self._locks[tenant]


def paged(default: int, first: Order, *, most: int = 1000) -> Callable[..., Page]:
    """The part of a list that a query asks for, of `default` items without a word."""

    def page(
        after: str | None = Query(None, description="`last_id` of the page before"),
        limit: int = Query(default, ge=1, le=most),
        order: Order = first,
    ) -> Page:
        return Page(after, limit, order)

    return page


async def _in_turn(request: Request, page: Annotated[Page, Depends(paged(20, "desc"))]) -> AsyncIterator[Page]:
    turns: PageTurns = request.app.state.page_turns
    async with turns.of(request.state.caller.tenant):
        yield page


NewestFirst = Annotated[Page, Depends(_in_turn, scope="function")]
"""A page of the database's rows, once it is the tenant's turn; what is streamed comes after it. A route's caller stands
before it in the parameters, and a route that waits for a store or a cluster takes another."""


OldestFirst = Annotated[Page, Depends(paged(100, "asc"))]
