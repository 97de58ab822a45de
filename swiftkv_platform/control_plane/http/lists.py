"""Parts of lists as routes ask for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request

from swiftkv_platform.control_plane.base import Page

Order = Literal["asc", "desc"]


class PageTurns:
    """One page of a list at a time for each tenant: of specs as large as can be, a page is work for a processor."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, tenant: str) -> asyncio.Lock:
        return self._locks[tenant]


def paged(default: int, first: Order, *, most: int = 1000) -> Any:
    """The part of a list that a query asks for, of `default` items without a word, once it is the tenant's turn. A
    route's caller comes before it in the parameters."""

    async def page(
        request: Request,
        after: str | None = Query(None, description="`last_id` of the page before"),
        limit: int = Query(default, ge=1, le=most),
        order: Order = first,
    ) -> AsyncIterator[Page]:
        turns: PageTurns = request.app.state.page_turns
        async with turns.of(request.state.caller.tenant):
            yield Page(after, limit, order)

    return Depends(page, scope="function")  # an answer that is streamed comes after its turn


NewestFirst = Annotated[Page, paged(20, "desc")]


OldestFirst = Annotated[Page, paged(100, "asc")]
