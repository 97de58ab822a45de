"""Values shared by the whole control plane: callers, the clock, pages of lists, fencing tokens, ids, and cached results
of slow calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ulid import ULID

T = TypeVar("T")


Clock = Callable[[], float]
"""Clock of Unix seconds."""


def is_due(at: float, now: float, *, within: float) -> bool:
    """Whether the time `at` has come. It was chosen at most `within` seconds ahead; if it is farther away now, the
    clock has been set back, and it counts as due."""
    return not 0.0 < at - now <= within


@dataclass(frozen=True)
class PageQuery:
    """A request for part of a list."""

    after: str | None = None
    """Id of the last item of the previous page."""
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    """Order by time of creation."""


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page of a list."""

    items: Sequence[T]
    has_more: bool
    unreadable_ids: Sequence[str] = ()
    """Ids of rows of this page that cannot be read."""


@dataclass(frozen=True)
class FencingToken:
    """Fencing token of a held lease. Writes with it are refused after another holder has acquired the lease."""

    name: str
    holder: str
    token: int
    """Increases whenever another holder acquires the lease."""


@dataclass(frozen=True)
class Caller:
    """Tenant and name of a caller."""

    tenant: str
    name: str


def new_id(prefix: Literal["job", "evt", "mdl", "dep", "prm"]) -> str:
    """Return a new id such as `job_01J...`; ids with the same prefix sort by creation time."""
    return f"{prefix}_{ULID()}"


class CachedCall(Generic[T]):
    """The cached result of `function`, which is called again once the result is older than `ttl_s` seconds.

    `function` runs in a thread of its own, so that callers can stop waiting, and a hanging call blocks one thread only.
    """

    def __init__(self, function: Callable[[], T], clock: Clock, *, ttl_s: float) -> None:
        self._function = function
        self._clock = clock
        self._ttl_s = ttl_s
        self._called_at = 0.0
        self._result: Future[T] | None = None
        """Future of the latest call, which may still run."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cached-call")

    def get_future(self) -> Future[T]:
        """Return the future of the result. An exception of `function` is not cached."""
        with self._lock:
            now, result = self._clock(), self._result
            is_old = is_due(self._called_at + self._ttl_s, now, within=self._ttl_s)
            if result is None or (result.done() and (is_old or result.exception() is not None)):
                self._called_at, result = now, self._thread.submit(self._function)
                self._result = result
            return result

    def get(self, timeout: float, default: T) -> T:
        """Return the result, or `default` if it takes longer than `timeout` seconds. Raises what `function` raises."""
        try:
            return self.get_future().result(timeout)
        except TimeoutError:
            return default
