"""Streams of a request's outputs from the engine to its caller, with a pace that limits the cost of events."""

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
from swiftkv_platform.web.places import Sender

MAX_INTERVAL_S = 0.05
"""Maximum interval that the pace chooses, which is too short for readers to notice."""
EVENT_SHARE = 0.05
"""Share of a stream's time that the events of all others may take."""
EVENTS_MEASURED = 32
"""Number of events over which their cost is measured."""
FIRST_EVENT_S = 0.0005
"""Assumed cost of an event until it is measured."""


class Source(Protocol):
    """The interface of an engine that a stream needs."""

    def forget(self, request_id: str, *, abort: bool) -> None: ...
    def death(self) -> EngineDeadError: ...


class EventPace:
    """Interval between a stream's events: zero for a single stream, longer the more streams there are.

    An event delays all other streams while the event loop writes and sends it. So tokens are collected just long enough
    for other streams' events to take `EVENT_SHARE` of a stream's time, but at most `MAX_INTERVAL_S`. The cost of an
    event is measured as CPU time of the event loop's thread.

    Args:
        clock: CPU time of the thread in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._num_sequences = 0
        self._event_s = FIRST_EVENT_S
        self._since: float | None = None
        self._num_events = 0

    @property
    def interval_s(self) -> float:
        """Seconds for which a stream may collect tokens, given the present streams and cost of events."""
        others = max(self._num_sequences - 1, 0)
        return min(others * self._event_s / EVENT_SHARE, MAX_INTERVAL_S)

    def joined(self, num_sequences: int) -> None:
        self._num_sequences += num_sequences

    def left(self, num_sequences: int) -> None:
        self._num_sequences -= num_sequences

    def sent(self) -> None:
        """Count an event, on the event loop. The cost is updated after every `EVENTS_MEASURED` events."""
        if self._since is None:
            self._since = self._clock()
            return
        self._num_events += 1
        if self._num_events == EVENTS_MEASURED:
            now = self._clock()
            self._event_s = (now - self._since) / self._num_events
            self._since, self._num_events = now, 0


class RequestStream:
    """The outputs of an admitted request: the output so far each time there is more, and the finished one last; with
    n > 1 those of all samples as they come, each with its index. Closing the stream aborts the request.

    Args:
        interval_s: seconds for which tokens may be collected, infinite if only finished outputs matter; None: `pace`
            decides.
    """

    def __init__(
        self,
        engine: Source,
        request_id: str,
        num_samples: int,
        interval_s: float | None,
        pace: EventPace,
        sender: Sender,
    ) -> None:
        self.request_id = request_id
        self.sender = sender
        self.newest: dict[int, RequestOutput] = {}
        """Newest output of each sample by index, which may be ahead of the outputs read from the stream."""
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
        """Wait for the next output. Raises `EngineDeadError`: the engine has failed."""
        if not self._unfinished:
            self.close()
            raise StopAsyncIteration
        while not self._due:
            await self._arrived.wait()
            await self._hold()
            self._due.extend(self._unread.values())
            self._unread.clear()
            if self._failed:  # both events stay set, so the rest is read without waiting
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
        """Collect outputs until the interval has passed since the last time, or a sample is finished."""
        now = asyncio.get_running_loop().time
        if now() < self._due_at:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(self._due_at) else self._due_at):
                    await self._urgent.wait()
        self._due_at = now() + (self._pace.interval_s if self._interval_s is None else self._interval_s)

    @property
    def num_sequences(self) -> int:
        """Number of samples that the engine has not finished, but at least one."""
        return max(self._unended, 1)

    def close(self) -> None:
        """Stop listening; unfinished samples are aborted within one step. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._leave(self._num_paced)
            self._engine.forget(self.request_id, abort=self._unfinished > 0)

    def open(self) -> None:
        """Accept outputs from now on; earlier ones belong to another request with the same id."""
        self._open = True

    def put(self, output: RequestOutput | None) -> None:
        """Add an output; None: the engine has failed."""
        if output is None:
            self._failed = True
        elif not self._open:
            return
        else:
            self.newest[output.index] = output
            self._unended -= output.finished
            # With an interval, the newest output replaces the previous one.
            self._unread[output.index, len(output.token_ids) if self._interval_s == 0.0 else 0] = output
        if output is None or output.finished:
            self._urgent.set()
        self._arrived.set()
