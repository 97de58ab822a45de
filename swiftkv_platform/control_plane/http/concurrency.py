"""Concurrent requests: a limit per tenant, so that no tenant takes all processor time, and the end of a request's
work when its client disconnects."""

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
    """The client of a request. Threads register callbacks that stop their work."""

    def __init__(self) -> None:
        self._is_disconnected = False
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def disconnect(self) -> None:
        """Call all registered callbacks."""
        with self._lock:
            self._is_disconnected = True
            for stop in self._callbacks:
                stop()

    def check_connected(self) -> None:
        """Raise `ClientDisconnect` if the client has disconnected."""
        if self._is_disconnected:
            raise ClientDisconnect

    @contextmanager
    def stop_on_disconnect(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` if the client disconnects within the context. Raises `ClientDisconnect` if it has disconnected
        before."""
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
    """Watch a request's connection within the context. The request's body must have been read: watching discards
    further data."""
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
"""The request's client, watched until the route's function returns. Only for routes whose body `BodyRoute` has read."""


RequestKind = Literal["reading", "changing", "submitting", "fetching", "following", "asking"]
"""Kinds of requests: reading rows, changing rows, validating a spec (submitting), calling a store or cluster
(fetching), polling for an event stream (following), and finding a deployment (asking). Requests wait only for
requests of the same kind."""

MIN_SECONDS_BEFORE_PAUSE = 0.001
"""A request that takes at most this long causes no pause."""
PAUSE_RATIO = 2.0
"""Seconds of pause per second of the previous request: two thirds of the time remain for other tenants."""
MAX_PAUSE_S = 0.1
"""Max seconds of pause between two requests of a tenant."""
MAX_QUEUED = QUEUED_REQUESTS.default
"""Max queued requests of a tenant per kind."""
_RETRY_AFTER_S = 2.0


class TenantConcurrencyLimiter:
    """Limits the concurrent requests of each tenant and kind."""

    def __init__(self) -> None:
        self._semaphores: dict[tuple[str, RequestKind], asyncio.Semaphore] = {}
        self._num_queued: Counter[tuple[str, RequestKind]] = Counter()
        self._paused_until: dict[tuple[str, RequestKind], float] = {}
        """Monotonic time of the end of the pause."""

    @asynccontextmanager
    async def acquire(self, tenant: str, kind: RequestKind) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the context. Raises `OverloadedError` if too many requests are queued."""
        key = tenant, kind
        # 1. queue  2. pause after the tenant's last request  3. run, and set the next pause
        if self._num_queued[key] >= MAX_QUEUED and kind != "following":  # streams have a limit of their own
            raise OverloadedError(
                f"tenant {tenant!r} has {MAX_QUEUED} queued requests, the max; send fewer concurrent requests",
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
                pause_s = max(now - began - MIN_SECONDS_BEFORE_PAUSE, 0.0) * PAUSE_RATIO
                self._paused_until[key] = now + min(pause_s, MAX_PAUSE_S)
        finally:
            semaphore.release()
