"""Turns of a tenant's requests, so that no tenant takes all of the processor time that tenants share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from swiftkv_platform.errors import OverloadedError
from swiftkv_platform.limits import FETCHES_AT_ONCE, QUEUED_REQUESTS, REQUESTS_AT_ONCE

Kind = Literal["reading", "changing", "submitting", "fetching", "following", "asking"]
"""Kinds of requests: those that read rows of the database, change them, check a spec, or ask a store or a cluster;
streams that look for what is new; and look-ups of the deployment that is asked. A kind waits only for others of its own
kind."""

SPARED_S = 0.001
"""Seconds of a turn for which no rest is due."""
RESTS = 2.0
"""Seconds of rest for each second of the turn before it: two thirds of the time are left to others."""
MOST_REST_S = 0.1
"""Longest rest between two turns of a tenant, in seconds."""
MOST_WAITING = QUEUED_REQUESTS.default
"""Most requests of a tenant that wait for a turn of one kind."""
_RETRY_AFTER_S = 2.0


class Turns:
    """Limits how many requests of each kind a tenant has at a time."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, Kind], asyncio.Semaphore] = {}
        self._waiting: Counter[tuple[str, Kind]] = Counter()
        self._rested: dict[tuple[str, Kind], float] = {}
        """Monotonic time from which the next turn may begin."""

    @asynccontextmanager
    async def turn(self, tenant: str, kind: Kind) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises `OverloadedError` if too many requests wait."""
        place = tenant, kind
        if self._waiting[place] >= MOST_WAITING and kind != "following":  # streams are limited by their places
            raise OverloadedError(
                f"tenant {tenant!r} has {MOST_WAITING} requests waiting for its other requests, which is the maximum; "
                "send fewer at a time",
                retry_after_s=_RETRY_AFTER_S,
            )
        limit = FETCHES_AT_ONCE if kind == "fetching" else REQUESTS_AT_ONCE
        turns = self._places.setdefault(place, asyncio.Semaphore(limit.default))
        self._waiting[place] += 1
        try:
            await turns.acquire()
        finally:
            self._waiting[place] -= 1
        try:
            if (rest := self._rested.get(place, 0.0) - time.monotonic()) > 0.0:
                await asyncio.sleep(rest)
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._rested[place] = now + min(max(now - began - SPARED_S, 0.0) * RESTS, MOST_REST_S)
        finally:
            turns.release()
