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
        self._is_disconnected = False
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def disconnect(self) -> None:
        """Stop all registered work."""
        with self._lock:
            self._is_disconnected = True
            for stop in self._callbacks:
                stop()

    def check_connected(self) -> None:
        """Raise `ClientDisconnect` if the client has left."""
        if self._is_disconnected:
            raise ClientDisconnect

    @contextmanager
    def stop_on_disconnect(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` if the client leaves within the context. Raises `ClientDisconnect` if it has left before."""
        with self._lock:
            self.check_connected()
            self._callbacks.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(stop)


@asynccontextmanager
async def watch_client(request: Request) -> AsyncIterator[Client]:
    """Watch a request's connection within the context. Only for requests whose body has been read: watching discards
    what still comes."""
    client = Client()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        client.disconnect()

    watching = asyncio.create_task(watch())
    try:
        yield client
    finally:
        watching.cancel()


async def _get_connected_client(request: Request) -> AsyncIterator[Client]:
    async with watch_client(request) as client:
        yield client


ConnectedClient = Annotated[Client, Depends(_get_connected_client, scope="function")]
"""The request's client, watched until the route's function returns. For routes whose body `BodyRoute` has read."""


RequestKind = Literal["reading", "changing", "submitting", "fetching", "following", "asking"]
"""Kinds of requests: those that read rows of the database, change them, check a spec, or ask a store or a cluster;
streams that look for what is new; and look-ups of the deployment that is asked. A kind waits only for others of its own
kind."""

FREE_S = 0.001
"""Seconds of a turn for which no rest is due."""
PAUSE_RATIO = 2.0
"""Seconds of rest for each second of the turn before it: two thirds of the time are left to others."""
MAX_PAUSE_S = 0.1
"""Longest rest between two turns of a tenant, in seconds."""
MAX_QUEUED = QUEUED_REQUESTS.default
"""Most requests of a tenant that wait for a turn of one kind."""
_RETRY_AFTER_S = 2.0


class TenantConcurrencyLimiter:
    """Limits how many requests of each kind a tenant has at a time."""

    def __init__(self) -> None:
        self._semaphores: dict[tuple[str, RequestKind], asyncio.Semaphore] = {}
        self._num_queued: Counter[tuple[str, RequestKind]] = Counter()
        self._paused_until: dict[tuple[str, RequestKind], float] = {}
        """Monotonic time from which the next turn may begin."""

    @asynccontextmanager
    async def acquire(self, tenant: str, kind: RequestKind) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises `OverloadedError` if too many requests wait."""
        key = tenant, kind
        if self._num_queued[key] >= MAX_QUEUED and kind != "following":  # streams are limited by their places
            raise OverloadedError(
                f"tenant {tenant!r} has {MAX_QUEUED} requests waiting for its other requests, which is the maximum; "
                "send fewer at a time",
                retry_after_s=_RETRY_AFTER_S,
            )
        limit = CONCURRENT_FETCHES if kind == "fetching" else CONCURRENT_REQUESTS
        semaphore = self._semaphores.setdefault(key, asyncio.Semaphore(limit.default))
        self._num_queued[key] += 1
        try:
            await semaphore.acquire()
        finally:
            self._num_queued[key] -= 1
        try:
            if (rest := self._paused_until.get(key, 0.0) - time.monotonic()) > 0.0:
                await asyncio.sleep(rest)
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._paused_until[key] = now + min(max(now - began - FREE_S, 0.0) * PAUSE_RATIO, MAX_PAUSE_S)
        finally:
            semaphore.release()
