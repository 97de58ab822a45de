"""Bounds on callers: shares of a resource (streams, uploads, bytes of bodies) that each key and tenant may hold, token
buckets, and the request rate of each caller. Knows no HTTP."""

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
class Share:
    """Most that one key, one tenant, and all callers together may hold at a time."""

    of_key: int
    of_tenant: int
    of_all: int


class Places:
    """Amounts of `what` held by each key, each tenant and all callers, bounded by a `Share`."""

    def __init__(self, what: str, share: Share, *, retry_after_s: float = _RETRY_AFTER_S) -> None:
        self._what = what
        self._share = share
        self._retry_after_s = retry_after_s
        self._taken: Counter[tuple[str, ...]] = Counter()
        """Held amounts by (), (tenant,) and (tenant, key)."""
        self._lock = threading.Lock()

    @contextmanager
    def place(self, tenant: str, key: str, amount: int = 1) -> Iterator[Place]:
        """Hold `amount` within the context. Raises `OverloadedError` if it is not available."""
        place = Place(self, tenant, key)
        place.grow(amount)
        try:
            yield place
        finally:
            place.free()

    @property
    def taken(self) -> int:
        """Amount that all callers hold together."""
        return self._taken[()]

    def take(self, tenant: str, key: str, amount: int) -> None:
        """Take `amount` more. Raises `OverloadedError`. A key or tenant that holds nothing may take up to `of_all`."""
        share = self._share
        bounds = {
            (tenant, key): (share.of_key, f"key {key!r}"),
            (tenant,): (share.of_tenant, f"tenant {tenant!r}"),
            (): (share.of_all, "all callers"),
        }
        with self._lock:
            for holder, (most, name) in bounds.items():
                held = self._taken[holder]
                if held + amount > (most if held or not holder else share.of_all):
                    raise OverloadedError(
                        f"{name} would have {held + amount} {self._what} at a time; at most {most} are allowed: wait "
                        "for one to end",
                        retry_after_s=self._retry_after_s,
                    )
            for holder in bounds:
                self._taken[holder] += amount

    def give_back(self, tenant: str, key: str, amount: int) -> None:
        """Return `amount`, taken by `take`."""
        with self._lock:
            for holder in ((tenant, key), (tenant,), ()):
                self._taken[holder] -= amount
                if not self._taken[holder]:
                    del self._taken[holder]


class Place:
    """Amount that one request holds."""

    def __init__(self, places: Places, tenant: str, key: str) -> None:
        self._places = places
        self._holder = (tenant, key)
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Hold `amount` more. Raises `OverloadedError`; what was held before stays held."""
        if amount:
            self._places.take(*self._holder, amount)
            self._amount += amount

    def free(self) -> None:
        """Give back all of it; a second call does nothing."""
        amount, self._amount = self._amount, 0
        if amount:
            self._places.give_back(*self._holder, amount)


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
        capacity = float(burst) if burst is not None else max(per_minute / 10.0, 1.0)
        self._of = of
        self._bucket_of = lru_cache(_MOST_BUCKETS)(lambda _name: TokenBucket(per_minute, clock, capacity=capacity))
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """Count a request. Raises `RateLimitedError` with the time until it would be accepted."""
        with self._lock:
            bucket = self._bucket_of(name)
            wait = bucket.seconds_until(1.0)
            if wait <= 0.0:
                bucket.take(1.0)
        if wait > 0.0:
            raise RateLimitedError(
                f"{self._of} {name!r} has sent more than {self._per_minute:g} requests a minute; try again in "
                f"{wait:.1f} s",
                field="Authorization",
                retry_after_s=wait,
            )
