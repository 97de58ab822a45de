"""The outputs of one request on their way from the engine to whoever asked. Knows no engine but what it tells it."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, Self

from swiftkv_platform.engine.outputs import RequestOutput
from swiftkv_platform.errors import EngineDeadError

MAX_INTERVAL_S = 0.05
"""Longest time for which tokens are collected by itself: less than a reader sees."""
EVENT_SHARE = 0.05
"""Share of a stream's time that the events of all others may take."""
EVENTS_MEASURED = 32
"""Events over which their cost is measured."""
FIRST_EVENT_S = 0.0005
"""Cost of an event before any was measured."""


class Source(Protocol):
    """The part of an engine that a stream tells or asks."""

    def forget(self, request_id: str, *, abort: bool) -> None: ...
    def death(self) -> EngineDeadError: ...


class EventPace:
    """Interval between events of a stream: none for one that runs alone, longer the more run beside it.

    An event holds up all other streams for as long as the event loop takes to write and send it. So tokens are
    collected for as long as keeps what the others' events take of a stream's time at `EVENT_SHARE`, and never longer
    than `MAX_INTERVAL_S`. What an event takes is measured: processor time of the event loop's thread by event.

    Args:
        clock: that of the thread's processor time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._num_sequences = 0
        self._event_s = FIRST_EVENT_S
        self._since: float | None = None
        self._num_events = 0

    @property
    def interval_s(self) -> float:
        """Seconds for which a stream may collect tokens, by what runs and what events take now."""
        others = max(self._num_sequences - 1, 0)
        return min(others * self._event_s / EVENT_SHARE, MAX_INTERVAL_S)

    def joined(self, num_sequences: int) -> None:
        self._num_sequences += num_sequences

    def left(self, num_sequences: int) -> None:
        self._num_sequences -= num_sequences

    def sent(self) -> None:
        """Count an event, on the event loop. Their cost is known anew after each `EVENTS_MEASURED`."""
        if self._since is None:
            self._since = self._clock()
            return
        self._num_events += 1
        if self._num_events == EVENTS_MEASURED:
            now = self._clock()
            self._event_s = (now - self._since) / self._num_events
            self._since, self._num_events = now, 0


class RequestStream:
    """One admitted request: its output so far whenever there is more of it, the finished one last; with n > 1 those of
    all samples as they come, each with its index. Closing it takes the request back.

    Args:
        interval_s: seconds for which tokens may be collected, infinite where only finished outputs matter; None: as
            `pace` says.
    """

    def __init__(
        self, engine: Source, request_id: str, num_samples: int, interval_s: float | None, pace: EventPace
    ) -> None:
        self.request_id = request_id
        self.newest: dict[int, RequestOutput] = {}
        """Newest output of each sample that has any, by index; ahead of what was read from the stream."""
        self._engine = engine
        self._interval_s = interval_s
        self._unfinished = self._unended = num_samples
        self._unread: dict[tuple[int, int], RequestOutput] = {}
        self._due: deque[RequestOutput] = deque()
        self._due_at = math.inf if interval_s == math.inf else 0.0
        self._pace = pace
        self._num_paced = 0 if interval_s == math.inf else num_samples
        pace.joined(self._num_paced)
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
        if self._num_paced:
            self._pace.sent()
            self._leave(output.finished)
        return output

    def _leave(self, num_samples: int) -> None:
        self._pace.left(num_samples)
        self._num_paced -= num_samples

    async def _hold(self) -> None:
        """Let more come, until an interval has passed since the last time or a sample is finished."""
        now = asyncio.get_running_loop().time
        if now() < self._due_at:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(self._due_at) else self._due_at):
                    await self._urgent.wait()
        self._due_at = now() + (self._pace.interval_s if self._interval_s is None else self._interval_s)

    @property
    def num_sequences(self) -> int:
        """Samples that the engine still works on; at least one while the stream is open."""
        return max(self._unended, 1)

    def close(self) -> None:
        """Stop listening; what is unfinished is aborted within one step. Again is the same."""
        if not self._closed:
            self._closed = True
            self._leave(self._num_paced)
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
            self._unread[output.index, len(output.token_ids) if self._interval_s == 0.0 else 0] = output
        if output is None or output.finished:
            self._urgent.set()
        self._arrived.set()
