"""Token buckets, and the request rate limit of each caller. Knows no HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable

from swiftkv_platform.errors import RateLimitedError

Clock = Callable[[], float]
_MINUTE_S = 60.0
_MOST_BUCKETS = 10_000
"""Bounds memory against a caller with many addresses; the least recently used bucket is dropped."""


class TokenBucket:
    """Token bucket refilled at `per_minute`; its level is negative after more was taken than it held. `capacity`: its
    highest level; None: one minute's refill."""

    def __init__(self, per_minute: int, clock: Clock, *, capacity: float | None = None) -> None:
        self.per_minute = per_minute
        self._capacity = float(per_minute if capacity is None else capacity)
        self._clock = clock
        self._level = self._capacity
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        # A clock that is set back must not drain the bucket.
        refilled = self._level + max(now - self._at, 0.0) * self.per_minute / _MINUTE_S
        self._level, self._at = min(refilled, self._capacity), now
        return self._level

    def take(self, amount: float) -> None:
        """Take `amount`, even below zero; a negative amount is put back."""
        self._level = min(self.level - amount, self._capacity)

    def seconds_until(self, level: float) -> float:
        """Return the seconds until the bucket holds `level` if nothing is taken."""
        return max((level - self.level) * _MINUTE_S / self.per_minute, 0.0)


class RateLimit:
    """Request rate limit of each key or address. `burst`: requests accepted at once; None: a tenth of `per_minute`.
    `of`: kind of caller ("key") that the error message names."""

    def __init__(self, per_minute: int, clock: Clock, *, burst: int | None = None, of: str = "key") -> None:
        self._per_minute = per_minute
        self._capacity = float(burst) if burst is not None else max(per_minute / 10.0, 1.0)
        self._clock = clock
        self._of = of
        self._buckets: dict[str, TokenBucket] = {}
        """Buckets by name, least recently used first."""
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """Count a request. Raises `RateLimitedError` with the time until it would be accepted."""
        with self._lock:
            bucket = self._buckets.pop(name, None)
            if bucket is None:
                bucket = TokenBucket(self._per_minute, self._clock, capacity=self._capacity)
            wait = bucket.seconds_until(1.0)
            if wait <= 0.0:
                bucket.take(1.0)
            self._buckets[name] = bucket
            if len(self._buckets) > _MOST_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
        if wait > 0.0:
            raise RateLimitedError(
                f"{self._of} {name!r} has sent more than {self._per_minute:g} requests a minute; try again in "
                f"{wait:.1f} s",
                field="Authorization",
                retry_after_s=wait,
            )
