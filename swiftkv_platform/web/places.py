"""Shares of a bounded resource (streams, uploads, bytes of bodies) that each key and tenant may hold. Knows no HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from swiftkv_platform.errors import OverloadedError

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
