"""Who waits for an answer: a tenant's requests take turns, so that no tenant takes all of the processor time that
tenants share, and work for a client stops when it has left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Literal

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from swiftkv_platform.errors import OverloadedError
from swiftkv_platform.limits import CONCURRENT_FETCHES, CONCURRENT_REQUESTS, QUEUED_REQUESTS


class Client:
    """The client of one request. Threads register how to stop their work."""

    def __init__(self) -> None:
        self._has_left = False
        self._stops: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Stop all registered work."""
        with self._lock:
            self._has_left = True
            for stop in self._stops:
                stop()

    def check_present(self) -> None:
        """Raise `ClientDisconnect` if the client has left."""
        if self._has_left:
            raise ClientDisconnect

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` if the client leaves within the context. Raises `ClientDisconnect` if it has left before."""
        with self._lock:
            self.check_present()
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)


@asynccontextmanager
async def watched_client(request: Request) -> AsyncIterator[Client]:
    """Watch a request's connection within the context. Only for requests whose body has been read: watching discards
    what still comes."""
    client = Client()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        client.leave()

    watching = asyncio.create_task(watch())
    try:
        yield client
    finally:
        watching.cancel()


async def _waiting_client(request: Request) -> AsyncIterator[Client]:
    async with watched_client(request) as client:
        yield client


WaitingClient = Annotated[Client, Depends(_waiting_client, scope="function")]
"""The request's client, watched until the route's function returns. For routes whose body `BodyRoute` has read."""


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
        limit = CONCURRENT_FETCHES if kind == "fetching" else CONCURRENT_REQUESTS
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
