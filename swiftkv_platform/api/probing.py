"""Answers to probes, looked up at most every few seconds however many ask. Knows no route."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.orchestration.ports import Clock

T = TypeVar("T")


class Kept(Generic[T]):
    """The answer of `ask`, asked again once it is older than `keep_s` seconds; one thread asks at a time."""

    def __init__(self, ask: Callable[[], T], clock: Clock, *, keep_s: float) -> None:
        self._ask = ask
        self._clock = clock
        self._keep_s = keep_s
        self._kept: tuple[float, T] | None = None
        """Time of the last question, and its answer."""
        self._lock = threading.Lock()

    def get(self) -> T:
        """Raises as `ask`; a failure is not kept."""
        with self._lock:
            now = self._clock()
            if self._kept is None or now - self._kept[0] >= self._keep_s:
                self._kept = now, self._ask()
            return self._kept[1]


def complaint_of(check: Callable[[], None]) -> Callable[[], str | None]:
    """`check` as a question: what it complains of, None for nothing."""

    def ask() -> str | None:
        try:
            check()
        except SwiftKVError as error:
            return error.message
        return None

    return ask
