"""Cached answers, looked up at most every few seconds however many callers ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from swiftkv_platform.control_plane.base import Clock, is_due

T = TypeVar("T")


class Kept(Generic[T]):
    """The cached answer of `ask`, which is called again once the answer is older than `keep_s` seconds.

    `ask` runs in a thread of its own, so that callers may give up waiting, and a hanging `ask` blocks one thread only.
    """

    def __init__(self, ask: Callable[[], T], clock: Clock, *, keep_s: float) -> None:
        self._ask = ask
        self._clock = clock
        self._keep_s = keep_s
        self._asked = 0.0
        self._answer: Future[T] | None = None
        """Future of the latest call of `ask`, which may still run."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kept")

    def get(self) -> Future[T]:
        """Return the future of the answer. A failure of `ask` is not kept."""
        with self._lock:
            now, answer = self._clock(), self._answer
            is_old = is_due(self._asked + self._keep_s, now, within=self._keep_s)
            if answer is None or (answer.done() and (is_old or answer.exception() is not None)):
                self._asked, answer = now, self._thread.submit(self._ask)
                self._answer = answer
            return answer

    def within(self, seconds: float, otherwise: T) -> T:
        """Return the answer, or `otherwise` if it takes longer than `seconds`. Raises what `ask` raises."""
        try:
            return self.get().result(seconds)
        except TimeoutError:
            return otherwise
