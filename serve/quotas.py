"""Limits of a key per minute: buckets of requests and of tokens. Knows no HTTP and no engine.

A bucket holds a minute's worth and fills evenly, so that a limit is no cliff at the full minute. Each replica counts
for itself: a caller that is routed to several of them may ask each of them for as much.
"""

from __future__ import annotations

import math
import threading
import time

from swiftkv_platform.errors import RateLimitedError
from swiftkv_platform.security.principals import Principal
from swiftkv_platform.web.rate_limits import Clock, TokenBucket

Limits = tuple[int | None, int | None]
"""Requests and tokens a minute."""
_MOST_QUOTAS = 10_000
"""Callers whose quotas are kept; the one that asked longest ago is given up."""


class Quota:
    """The buckets of one caller. A limit that is None is none."""

    def __init__(self, principal: Principal, clock: Clock = time.monotonic) -> None:
        limits = (principal.requests_per_minute, principal.tokens_per_minute)
        self._name = principal.name
        self._requests, self._tokens = (None if limit is None else TokenBucket(limit, clock) for limit in limits)

    def count_request(self) -> None:
        """Raises `RateLimitedError` for one too many, which then does not count."""
        if self._requests is not None:
            self._check(self._requests, 1, "requests")
            self._requests.take(1)

    def reserve_tokens(self, amount: int) -> Reservation:
        """Hold `amount` tokens, at most a minute's, for an answer that begins. Raises `RateLimitedError`."""
        if self._tokens is None:
            return Reservation()
        amount = min(amount, self._tokens.per_minute)
        self._check(self._tokens, amount, "tokens")
        self._tokens.take(amount)
        return Reservation(self._tokens, amount)

    def headers(self) -> dict[str, str]:
        """OpenAI's `x-ratelimit` headers."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(bucket.level), 0))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def _check(self, bucket: TokenBucket, amount: int, what: str) -> None:
        wait = bucket.seconds_until(amount)
        if wait > 0.0:
            raise RateLimitedError(
                f"key {self._name!r} may use {bucket.per_minute} {what} a minute; try again in {wait:.1f} s",
                field="Authorization",
                retry_after_s=wait,
            )


class Reservation:
    """Tokens held for an answer until it is known what it took."""

    def __init__(self, bucket: TokenBucket | None = None, amount: int = 0) -> None:
        self._bucket = bucket
        self._amount = amount

    def settle(self, used: int) -> None:
        """Replace what was held by the `used` tokens; only the first call counts."""
        if self._bucket is not None:
            self._bucket.take(used - self._amount)
            self._bucket = None


class Quotas:
    """The quota of every caller that has asked, kept while its limits stay; all keys of one caller share it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_caller: dict[tuple[str, str, Limits], Quota] = {}
        """Quotas; the one asked last comes last."""
        self._lock = threading.Lock()

    def of(self, principal: Principal) -> Quota | None:
        """Return the quota of a caller; None for one without limits."""
        limits = (principal.requests_per_minute, principal.tokens_per_minute)
        if limits == (None, None):
            return None
        caller = (principal.tenant, principal.name, limits)
        with self._lock:
            quota = self._by_caller.pop(caller, None) or Quota(principal, self._clock)
            self._by_caller[caller] = quota
            if len(self._by_caller) > _MOST_QUOTAS:
                del self._by_caller[next(iter(self._by_caller))]
        return quota
