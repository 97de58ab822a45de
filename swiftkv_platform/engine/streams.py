"""The outputs of one request on their way from the engine to whoever asked. Knows no engine but what it tells it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import suppress
from typing import Protocol, Self

from swiftkv_platform.engine.outputs import RequestOutput
from swiftkv_platform.errors import EngineDeadError


class Source(Protocol):
    """The part of an engine that a stream tells or asks."""

    def forget(self, request_id: str, *, abort: bool) -> None: ...
    def death(self) -> EngineDeadError: ...


class RequestStream:
    """One admitted request: its output so far whenever there is more of it, the finished one last; with n > 1 those of
    all samples as they come, each with its index. Closing it takes the request back."""

    def __init__(self, engine: Source, request_id: str, num_samples: int, interval_s: float) -> None:
        self.request_id = request_id
        self.newest: dict[int, RequestOutput] = {}
        """Newest output of each sample that has any, by index; ahead of what was read from the stream."""
        self._engine = engine
        self._interval_s = interval_s
        self._unfinished = self._unended = num_samples
        self._unread: dict[tuple[int, int], RequestOutput] = {}
        self._due: deque[RequestOutput] = deque()
        self._due_at = interval_s if math.isinf(interval_s) else 0.0
        self._arrived, self._urgent = asyncio.Event(), asyncio.Event()
        self._open = self._failed = self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises `EngineDeadError` if the engine fails meanwhile."""
        if not self._unfinished:
            self.close()
            raise StopAsyncIteration
        while not self._due:
            await self._arrived.wait()
            await self._hold()
            self._due.extend(self._unread.values())
            self._unread.clear()
            if self._failed:  # both events stay set: what is left is read, and nothing is waited for
                if not self._due:
                    raise self._engine.death()
                break
            self._arrived.clear()
            self._urgent.clear()
        output = self._due.popleft()
        self._unfinished -= output.finished
        return output

    async def _hold(self) -> None:
        """Let more come, until an interval has passed since the last time or a sample is finished."""
        now = asyncio.get_running_loop().time
        if now() < self._due_at:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(self._due_at) else self._due_at):
                    await self._urgent.wait()
        self._due_at = now() + self._interval_s

    @property
    def num_sequences(self) -> int:
        """Samples that the engine still works on; at least one while the stream is open."""
        return max(self._unended, 1)

    def close(self) -> None:
        """Stop listening; what is unfinished is aborted within one step. Again is the same."""
        if not self._closed:
            self._closed = True
            self._engine.forget(self.request_id, abort=self._unfinished > 0)

    def open(self) -> None:
        """Outputs are this request's from now on."""
        self._open = True

    def put(self, output: RequestOutput | None) -> None:
        """Hand over an output, or None: the engine has failed."""
        if output is None:
            self._failed = True
        elif not self._open:
            return
        else:
            self.newest[output.index] = output
            self._unended -= output.finished
            # With an interval the newest output takes the place of the one before it.
            self._unread[output.index, 0 if self._interval_s else len(output.token_ids)] = output
        if output is None or output.finished:
            self._urgent.set()
        self._arrived.set()
