"""Turns of a tenant's requests: specs as large as can be are work for a processor, which all tenants share."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Literal

from fastapi import Depends, Request

Kind = Literal["reading", "submitting"]

MOST_REST_S = 0.1
"""Most seconds between two turns of a tenant, which are as many as the first one took: half of the time is others'."""


class Turns:
    """One request of each kind at a time for each tenant."""

    def __init__(self) -> None:
        self._locks: defaultdict[tuple[str, Kind], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._rested: dict[tuple[str, Kind], float] = {}
        """Time from which on there may be the next turn."""

    @asynccontextmanager
    async def turn(self, tenant: str, kind: Kind) -> AsyncIterator[None]:
        async with self._locks[tenant, kind]:
            began = time.monotonic()
            if (rest := self._rested.get((tenant, kind), began) - began) > 0.0:
                await asyncio.sleep(rest)
                began += rest
            try:
                yield
            finally:
                now = time.monotonic()
                self._rested[tenant, kind] = now + min(now - began, MOST_REST_S)


def _turn(kind: Kind) -> Callable[[Request], AsyncIterator[None]]:
    async def turn(request: Request) -> AsyncIterator[None]:
        turns: Turns = request.app.state.turns
        async with turns.turn(request.state.caller.tenant, kind):
            yield

    return turn


ReadingTurn = Annotated[None, Depends(_turn("reading"), scope="function")]
"""Turn of a request that answers with rows of the database, until its function returns; what is streamed comes after
it. A route's caller stands before it in the parameters, and a route that waits for a store or a cluster takes none."""
SubmittingTurn = Annotated[None, Depends(_turn("submitting"), scope="function")]
"""Turn of a request that checks a spec, which may ask a store: it keeps none from reading."""
