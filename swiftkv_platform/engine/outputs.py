"""Outputs that a caller gets: tokens, text, log-probabilities, durations, as plain data without tensors; and their
streams from the engine to callers, with a pace that limits the cost of events.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from swiftkv_platform.errors import GenerationError, InvalidInputError, SwiftKVError
from swiftkv_platform.web.limiters import Sender

if TYPE_CHECKING:
    from swiftkv_platform.engine.frontend import EngineFrontend

NOT_FINITE_MESSAGE = "the model's logits are not a number; the request was ended, others are not affected"

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: end of sequence, a stop token or a stop string; `length`: max_tokens or the context; `abort`: aborted;
`error`: the answer failed, see `RequestOutput.error`."""

TokenLogprobs = Mapping[int, float]
"""Natural logarithms of probabilities by token id: the actual token and the most probable ones."""


@dataclass(frozen=True)
class RequestMetrics:
    """Durations in seconds since the request arrived; None for events that have not happened."""

    queue_time: float | None
    """Seconds until it was first scheduled."""
    ttft: float | None
    """Seconds until the first token."""
    tpot: float | None
    """Mean seconds between tokens, from the first one on."""
    total: float
    """Seconds until it finished, or until now."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything generated so far for a request, or for one of its `n` samples."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated tokens, including the one that ended the answer."""
    text: str
    """Text of `token_ids` up to the stop; empty if the model has no tokenizer."""
    finish_reason: FinishReason | None
    """Reason why it ended; None while it runs."""
    metrics: RequestMetrics
    index: int = 0
    """Index of the sample among the request's `n`."""
    stop_reason: int | str | None = None
    """The stop string, or the request's stop token, that ended the answer; None for any other end."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per generated token, before temperature and penalties; None unless asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token, from the full model, None for the first; None unless asked for."""
    text_offsets: tuple[int, ...] = ()
    """Indices in the text at which each generated token's text begins; empty without `logprobs` or a tokenizer."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was cached already."""
    num_exited_tokens: int = 0
    """Number of generated tokens that were chosen at layer l, without layers >= l."""
    num_draft_tokens: int = 0
    """Number of tokens that were drafted, by the exit head or from the text, and verified."""
    num_accepted_tokens: int = 0
    """Number of drafted tokens that became tokens of the answer."""
    num_skipped_tokens: int = 0
    """Number of prompt tokens that were computed without layers >= l."""
    error: str | None = None
    """Error that ended the answer, if `finish_reason` is `error`."""
    error_field: str | None = None
    """Field of the request that caused the error; None: the model did."""
    samples: tuple[RequestOutput, ...] = ()
    """All `n` samples in order of their index, beginning with this one; only from `LLMEngine.generate` with n > 1."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def failure(self) -> SwiftKVError:
        """Return `error` as an exception: `InvalidInputError` if a field of the request caused it, else
        `GenerationError`."""
        assert self.error is not None, "it has not failed"
        if self.error_field is not None:
            return InvalidInputError(self.error, field=self.error_field)
        return GenerationError(self.error)


@dataclass(frozen=True)
class EngineState:
    """Load of an engine at a moment."""

    num_running: int
    num_waiting: int
    waiting_tokens: Mapping[Sender, int]
    """Number of prompt tokens not prefilled yet, by their senders."""
    num_preemptions: int
    """Number of preemptions so far; each recomputes a sequence that was pushed out of the KV cache."""
    kv_cache_usage: float
    """Share of the KV cache that sequences hold, 0 to 1."""

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens not prefilled yet."""
        return sum(self.waiting_tokens.values())


@dataclass
class StepResult:
    """Result of a step for one scheduled sequence."""

    token_ids: list[int] = field(default_factory=list)
    """Next tokens: none while the prompt is prefilled, else one, or the accepted drafts and the one after them."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Number of drafts among `token_ids`, which are the first ones."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the next prompt tokens that have none yet."""
    is_exited: bool = False
    num_skipped_tokens: int = 0
    """Number of tokens of this step that did not run through layers >= l."""
    error: str | None = None
    """Error because of which nothing can follow `token_ids`."""
    error_field: str | None = None
    """Field of the request that caused the error; None: the model did."""


MAX_EVENT_INTERVAL_S = 0.05
"""Maximum interval that the pace chooses, which is too short for readers to notice."""
MAX_EVENT_TIME_SHARE = 0.05
"""Share of a stream's time that the events of all others may take."""
EVENTS_PER_MEASUREMENT = 32
"""Number of events over which their cost is measured."""
INITIAL_EVENT_S = 0.0005


class EventPace:
    """Interval between a stream's events: zero for a single stream, longer the more streams there are.

    An event delays all other streams while the event loop writes and sends it. So tokens are collected just long enough
    for other streams' events to take `MAX_EVENT_TIME_SHARE` of a stream's time, but at most `MAX_EVENT_INTERVAL_S`. The
    cost of an event is measured as CPU time of the event loop's thread.

    Args:
        clock: CPU time of the thread in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._num_sequences = 0
        self._event_s = INITIAL_EVENT_S
        self._since: float | None = None
        self._num_events = 0

    @property
    def interval_s(self) -> float:
        """Seconds for which a stream may collect tokens, given the present streams and cost of events."""
        others = max(self._num_sequences - 1, 0)
        return min(others * self._event_s / MAX_EVENT_TIME_SHARE, MAX_EVENT_INTERVAL_S)

    def add_sequences(self, num_sequences: int) -> None:
        self._num_sequences += num_sequences

    def remove_sequences(self, num_sequences: int) -> None:
        self._num_sequences -= num_sequences

    def record_event(self) -> None:
        """Count an event, on the event loop. The cost is updated after every `EVENTS_PER_MEASUREMENT` events."""
        if self._since is None:
            self._since = self._clock()
            return
        self._num_events += 1
        if self._num_events == EVENTS_PER_MEASUREMENT:
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
        engine: EngineFrontend,
        request_id: str,
        num_samples: int,
        interval_s: float | None,
        pace: EventPace,
        sender: Sender,
    ) -> None:
        self.request_id = request_id
        self.sender = sender
        self.newest_outputs: dict[int, RequestOutput] = {}
        """Newest output of each sample by index, which may be ahead of the outputs read from the stream."""
        self._engine = engine
        self._interval_s = interval_s
        self._unfinished = self._unended = num_samples
        self._unread: dict[tuple[int, int], RequestOutput] = {}
        self._due: deque[RequestOutput] = deque()
        self._due_at = math.inf if interval_s == math.inf else 0.0
        self._pace = pace
        self._num_paced = 0 if interval_s == math.inf else num_samples
        pace.add_sequences(self._num_paced)
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
            await self._wait_for_interval()
            self._due.extend(self._unread.values())
            self._unread.clear()
            if self._failed:  # both events stay set, so the rest is read without waiting
                if not self._due:
                    raise self._engine.make_dead_error()
                break
            self._arrived.clear()
            self._urgent.clear()
        output = self._due.popleft()
        self._unfinished -= output.finished
        if self._num_paced:
            self._pace.record_event()
            self._remove_from_pace(output.finished)
        return output

    def _remove_from_pace(self, num_samples: int) -> None:
        self._pace.remove_sequences(num_samples)
        self._num_paced -= num_samples

    async def _wait_for_interval(self) -> None:
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
            self._remove_from_pace(self._num_paced)
            self._engine.drop_stream(self.request_id, abort=self._unfinished > 0)

    def start_delivery(self) -> None:
        """Accept outputs from now on; earlier ones belong to another request with the same id."""
        self._open = True

    def put_output(self, output: RequestOutput | None) -> None:
        """Add an output; None: the engine has failed."""
        if output is None:
            self._failed = True
        elif not self._open:
            return
        else:
            self.newest_outputs[output.index] = output
            self._unended -= output.finished
            # With an interval, the newest output replaces the previous one.
            self._unread[output.index, len(output.token_ids) if self._interval_s == 0.0 else 0] = output
        if output is None or output.finished:
            self._urgent.set()
        self._arrived.set()
