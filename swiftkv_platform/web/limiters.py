"""Limits per caller: how much of a resource (streams, uploads, bytes of bodies) each key and tenant may hold at a time,
and requests per minute. Knows no HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from swiftkv_platform.errors import OverloadedError, RateLimitedError

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
                        "when one has ended",
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
