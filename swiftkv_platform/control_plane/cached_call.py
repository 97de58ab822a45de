"""Results of slow calls, cached for seconds and shared by all callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from swiftkv_platform.control_plane.base import Clock, is_due

T = TypeVar("T")


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
