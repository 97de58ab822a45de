"""Threads beside the engine's, in which texts become tokens and tokens text. Knows no engine and no tokenizer.

A tokenizer lets go of Python's lock while it works, so the model and the event loop go on meanwhile. A long text holds
up other long ones, never a short one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from swiftkv_platform.errors import EngineDeadError, QueueFullError

R = TypeVar("R")

NUM_SHORT = 2
"""Threads for short texts."""
LONG_BYTES = 1 << 16
"""A text of more has a thread that all long ones share, so that one at a time takes a tokenizer's memory."""


class Readers:
    """Runs what reads a text.

    Args:
        max_waiting: calls that may run or wait and belong to no admitted request; one more is refused at once.
    """

    def __init__(self, max_waiting: int) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT, thread_name_prefix="reader")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="reader-long")
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._closed = False

    async def run(self, call: Callable[[], R], num_bytes: int) -> R:
        """Run `call`, for a request that was admitted; `num_bytes` is about how much it reads. Raises
        `EngineDeadError` once closed."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        pool = self._long if num_bytes > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    async def run_unadmitted(self, call: Callable[[], R], num_bytes: int) -> R:
        """Run `call` for a caller that no queue counts. Raises `QueueFullError`, and as `run`."""
        if self._num_waiting >= self._max_waiting:
            raise QueueFullError(f"queue full: {self._max_waiting} texts wait to be read; try again later")
        self._num_waiting += 1
        try:
            return await self.run(call, num_bytes)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Begin nothing more; callers that wait are cancelled. Returns at once."""
        self._closed = True
        for pool in (self._short, self._long):
            pool.shutdown(wait=False)
