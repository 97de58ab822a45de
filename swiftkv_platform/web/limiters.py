"""Limits per caller: how much of a resource (streams, uploads, bytes of bodies) each key and tenant may hold at a time,
and requests per minute; concurrent requests per tenant, so that none takes all processor time; and the end of a
request's work when its client disconnects."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from swiftkv_platform.errors import OverloadedError, RateLimitedError
from swiftkv_platform.limits import CONCURRENT_FETCHES, CONCURRENT_REQUESTS, QUEUED_REQUESTS

_RETRY_AFTER_S = 2.0


class Sender(NamedTuple):
    """Sender of requests: a key of a tenant, or without keys a client address."""

    tenant: str = ""
    key: str = ""


@dataclass(frozen=True)
class ConcurrencyLimits:
    """Max amounts that one key, one tenant and all callers together may hold at a time."""

    per_key: int
    per_tenant: int
    total: int


class ConcurrencyLimiter:
    """Limits how much of a resource each key, each tenant and all callers hold at a time. `resource`: its plural noun,
    for error messages."""

    def __init__(self, resource: str, limits: ConcurrencyLimits, *, retry_after_s: float = _RETRY_AFTER_S) -> None:
        self._resource = resource
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._held: Counter[tuple[str, ...]] = Counter()
        """Held amounts by (), (tenant,) and (tenant, key)."""
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, tenant: str, key: str, amount: int = 1) -> Iterator[Allocation]:
        """Hold `amount` within the context. Raises `OverloadedError` if it is not available."""
        allocation = Allocation(self, tenant, key)
        allocation.grow(amount)
        try:
            yield allocation
        finally:
            allocation.release()

    @property
    def total_held(self) -> int:
        return self._held[()]

    def acquire(self, tenant: str, key: str, amount: int) -> None:
        """Acquire `amount` more. A key or tenant that holds nothing may acquire up to `total`. Raises
        `OverloadedError`."""
        limits = self._limits
        limit_by_holder = {
            (tenant, key): (limits.per_key, f"key {key!r}"),
            (tenant,): (limits.per_tenant, f"tenant {tenant!r}"),
            (): (limits.total, "all callers"),
        }
        with self._lock:
            for holder, (limit, name) in limit_by_holder.items():
                held = self._held[holder]
                if held + amount > (limit if held or not holder else limits.total):
                    raise OverloadedError(
                        f"{name} would have {held + amount} {self._resource} at a time; the limit is {limit}. Retry "
                        "when another request has ended",
                        retry_after_s=self._retry_after_s,
                    )
            for holder in limit_by_holder:
                self._held[holder] += amount

    def release(self, tenant: str, key: str, amount: int) -> None:
        with self._lock:
            for holder in ((tenant, key), (tenant,), ()):
                self._held[holder] -= amount
                if not self._held[holder]:
                    del self._held[holder]


class Allocation:
    """Amount that one request holds of a `ConcurrencyLimiter`'s resource."""

    def __init__(self, limiter: ConcurrencyLimiter, tenant: str, key: str) -> None:
        self._limiter = limiter
        self._holder = (tenant, key)
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Hold `amount` more. If it is not available, raises `OverloadedError`, and keeps the amount held so far."""
        if amount:
            self._limiter.acquire(*self._holder, amount)
            self._amount += amount

    def release(self) -> None:
        amount, self._amount = self._amount, 0
        if amount:
            self._limiter.release(*self._holder, amount)


Clock = Callable[[], float]
_MINUTE_S = 60.0
_MAX_BUCKETS = 10_000
"""Max callers with a bucket; the least recent one is dropped, since one caller may use many addresses."""


class TokenBucket:
    """Token bucket refilled at `per_minute`. Its level is negative if more was consumed than it held. `capacity`: max
    level; None: one minute's refill."""

    def __init__(self, per_minute: int, clock: Clock, *, capacity: float | None = None) -> None:
        self.per_minute = per_minute
        self._capacity = float(per_minute if capacity is None else capacity)
        self._clock = clock
        self._level = self._capacity
        self._refilled_at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        # A clock that is set back must not drain the bucket.
        refilled = self._level + max(now - self._refilled_at, 0.0) * self.per_minute / _MINUTE_S
        self._level, self._refilled_at = min(refilled, self._capacity), now
        return self._level

    def consume(self, amount: float) -> None:
        """Remove `amount`, even below zero; a negative amount is added."""
        self._level = min(self.level - amount, self._capacity)

    def seconds_until(self, level: float) -> float:
        """Return the seconds until the bucket reaches `level` if nothing is consumed."""
        return max((level - self.level) * _MINUTE_S / self.per_minute, 0.0)


class RateLimiter:
    """Limits requests per minute of each key or address. `burst`: max requests at once; None: a tenth of `per_minute`.
    `caller_kind`: "key" or "address", for error messages."""

    def __init__(self, per_minute: int, clock: Clock, *, burst: int | None = None, caller_kind: str = "key") -> None:
        self._per_minute = per_minute
        capacity = float(burst) if burst is not None else max(per_minute / 10.0, 1.0)
        self._caller_kind = caller_kind
        self._get_bucket = lru_cache(_MAX_BUCKETS)(lambda _name: TokenBucket(per_minute, clock, capacity=capacity))
        self._lock = threading.Lock()

    def count_request(self, caller: str) -> None:
        """Count a request of a key or address. Raises `RateLimitedError` with the time until it would be accepted."""
        with self._lock:
            bucket = self._get_bucket(caller)
            wait = bucket.seconds_until(1.0)
            if wait <= 0.0:
                bucket.consume(1.0)
        if wait > 0.0:
            raise RateLimitedError(
                f"{self._caller_kind} {caller!r} has sent more than {self._per_minute:g} requests per minute; try "
                f"again in {wait:.1f} s",
                field="Authorization",
                retry_after_s=wait,
            )


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
