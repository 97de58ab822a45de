"""Outputs of requests as plain data without tensors (tokens, text, log-probabilities, durations), and their streams to
callers.
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

NOT_FINITE_MESSAGE = "the model's logits are not finite; this request was ended, other requests continue"

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: end of sequence, a stop token or a stop string; `length`: max_tokens or the context; `abort`: aborted;
`error`: generation failed, see `RequestOutput.error`."""

TokenLogprobs = Mapping[int, float]
"""Natural logarithms of probabilities by token id: the actual token and the most probable tokens."""


@dataclass(frozen=True)
class RequestMetrics:
    """Durations in seconds since the request arrived. None: the event has not happened yet."""

    queue_time: float | None
    """Seconds until the request was first scheduled."""
    ttft: float | None
    """Seconds until the first token."""
    tpot: float | None
    """Mean seconds between tokens, from the first one on."""
    total: float
    """Seconds until the request finished, or until now."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything generated so far for a request, or for one of its `n` samples."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated tokens, including the stop token, if any."""
    text: str
    """Text of `token_ids` up to the stop; empty if the model has no tokenizer."""
    finish_reason: FinishReason | None
    """Reason why generation ended; None: it is running."""
    metrics: RequestMetrics
    index: int = 0
    """Index of the sample among the request's `n`."""
    stop_reason: int | str | None = None
    """Stop string, or stop token of the request, that ended generation; else None."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per generated token, before temperature and penalties; None unless requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token, from the full model, None for the first token; None unless requested."""
    text_offsets: tuple[int, ...] = ()
    """Start index in the text of each generated token; empty without `logprobs` or a tokenizer."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was cached already."""
    num_exited_tokens: int = 0
    """Number of generated tokens that the exit head chose at layer l, without layers >= l."""
    num_draft_tokens: int = 0
    """Number of verified draft tokens, from the exit head or the text."""
    num_accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    num_skipped_tokens: int = 0
    """Number of prompt tokens that skipped layers >= l."""
    error: str | None = None
    """Error message, if `finish_reason` is `error`."""
    error_field: str | None = None
    """Field of the request that caused the error; None: the model caused it."""
    samples: tuple[RequestOutput, ...] = ()
    """All `n` samples by index, including this one. Set only by `LLMEngine.generate` with n > 1."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def failure(self) -> SwiftKVError:
        """Return `error` as an exception: `InvalidInputError` if a field of the request caused it, else
        `GenerationError`."""
        assert self.error is not None, "the request has not failed"
        if self.error_field is not None:
            return InvalidInputError(self.error, field=self.error_field)
        return GenerationError(self.error)


@dataclass(frozen=True)
class EngineState:
    """Snapshot of an engine's load."""

    num_running: int
    num_waiting: int
    waiting_tokens: Mapping[Sender, int]
    """Number of prompt tokens that are not prefilled yet, by sender."""
    num_preemptions: int
    """Number of preemptions so far. Each one recomputes a sequence later."""
    kv_cache_usage: float
    """Share of the KV cache that sequences hold, 0 to 1."""

    @property
    def num_waiting_tokens(self) -> int:
        return sum(self.waiting_tokens.values())


@dataclass
class StepResult:
    """Result of a step for one scheduled sequence."""

    token_ids: list[int] = field(default_factory=list)
    """Next tokens: none while the prompt is prefilled; else the accepted drafts, if any, and one token after them."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Number of accepted drafts, which are the first of `token_ids`."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of further prompt tokens, in order."""
    is_exited: bool = False
    """Whether the exit head chose the token at layer l."""
    num_skipped_tokens: int = 0
    """Number of tokens of this step that did not run through layers >= l."""
    error: str | None = None
    """Error that ends the sequence after `token_ids`."""
    error_field: str | None = None
    """Field of the request that caused the error; None: the model caused it."""


MAX_EVENT_INTERVAL_S = 0.05
"""Max seconds between a stream's events, too short for readers to notice."""
MAX_EVENT_TIME_SHARE = 0.05
"""Max share of a stream's time that the events of all other streams take."""
EVENTS_PER_MEASUREMENT = 32
"""Number of events per measurement of their cost."""
INITIAL_EVENT_S = 0.0005
"""CPU seconds of an event before the first measurement."""


class StreamIntervalController:
    """Sets the interval between a stream's events: 0 for one stream, and longer with more streams.

    While the event loop sends an event, all other streams wait. So each stream collects tokens for an interval:

        interval = min(other streams * CPU seconds per event / MAX_EVENT_TIME_SHARE, MAX_EVENT_INTERVAL_S)

    The CPU time of an event is measured on the event loop's thread.

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
        """Current seconds for which a stream collects tokens."""
        others = max(self._num_sequences - 1, 0)
        return min(others * self._event_s / MAX_EVENT_TIME_SHARE, MAX_EVENT_INTERVAL_S)

    def add_sequences(self, num_sequences: int) -> None:
        self._num_sequences += num_sequences

    def remove_sequences(self, num_sequences: int) -> None:
        self._num_sequences -= num_sequences

    def count_event(self) -> None:
        """Count an event, on the event loop. Every `EVENTS_PER_MEASUREMENT` events, their cost is updated."""
        if self._since is None:
            self._since = self._clock()
            return
        self._num_events += 1
        if self._num_events == EVENTS_PER_MEASUREMENT:
            now = self._clock()
            self._event_s = (now - self._since) / self._num_events
            self._since, self._num_events = now, 0


class RequestStream:
    """Stream of an admitted request's outputs. Closing it aborts the request.

    It yields the whole output so far each time there are new tokens, and the finished output last. With n > 1 it yields
    the outputs of all samples as they come, each with its index.

    Args:
        interval_s: seconds between outputs; infinite: only finished outputs; None: the interval of `controller`.
    """

    def __init__(
        self,
        engine: EngineFrontend,
        request_id: str,
        num_samples: int,
        interval_s: float | None,
        controller: StreamIntervalController,
        sender: Sender,
    ) -> None:
        self.request_id = request_id
        self.sender = sender
        self.newest_outputs: dict[int, RequestOutput] = {}
        """Newest output of each sample by index. It may be ahead of the outputs that the stream has yielded."""
        self.engine = engine
        """Frontend that admitted the request."""
        self._interval_s = interval_s
        self._unfinished = self._unended = num_samples
        self._unread: dict[tuple[int, int], RequestOutput] = {}
        self._due: deque[RequestOutput] = deque()
        self._due_at = math.inf if interval_s == math.inf else 0.0
        self._interval_controller = controller
        self._num_counted = 0 if interval_s == math.inf else num_samples
        controller.add_sequences(self._num_counted)
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
            if self._failed:  # both events stay set, so that the rest is yielded without waiting
                if not self._due:
                    raise self.engine.make_dead_error()
                break
            self._arrived.clear()
            self._urgent.clear()
        output = self._due.popleft()
        self._unfinished -= output.finished
        if self._num_counted:
            self._interval_controller.count_event()
            self._remove_from_controller(output.finished)
        return output

    def _remove_from_controller(self, num_samples: int) -> None:
        self._interval_controller.remove_sequences(num_samples)
        self._num_counted -= num_samples

    async def _wait_for_interval(self) -> None:
        """Wait until the interval since the last output has passed, or a sample is finished."""
        now = asyncio.get_running_loop().time
        if now() < self._due_at:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if math.isinf(self._due_at) else self._due_at):
                    await self._urgent.wait()
        self._due_at = now() + (self._interval_controller.interval_s if self._interval_s is None else self._interval_s)

    @property
    def num_sequences(self) -> int:
        """Number of samples that the engine has not finished, at least 1."""
        return max(self._unended, 1)

    def close(self) -> None:
        """Drop further outputs, and abort unfinished samples within one step. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._remove_from_controller(self._num_counted)
            self.engine.drop_stream(self.request_id, abort=self._unfinished > 0)

    def start_delivery(self) -> None:
        """Accept outputs from now on. Earlier ones belong to an aborted request with the same id."""
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
