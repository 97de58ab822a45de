"""Admission of requests to the native engine or vLLM: checks, limits, tokenization, grammars, streams. Knows no
model."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ulid import ULID

from swiftkv_platform.engine.fairness import FairLimit, FairThreadPool, find_exceeded_share
from swiftkv_platform.engine.grammars import MAX_CONCURRENT_COMPILATIONS, Constraint, GrammarBudget, GrammarCompiler
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.engine.outputs import EngineState, RequestOutput, RequestStream, StreamIntervalController
from swiftkv_platform.engine.requests import (
    InputProcessor,
    Prompt,
    TokenizedRequest,
    TokenizerThreads,
    check_request_id,
)
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, QueueFullError
from swiftkv_platform.limits import PENDING_GRAMMARS
from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams
from swiftkv_platform.specs.structured_outputs import StructuredOutputs
from swiftkv_platform.web.limiters import Sender

MAX_COMPILING_PER_CALLER = PENDING_GRAMMARS.default
"""Max number of a caller's requests whose grammars are being compiled or queued for it. More are refused."""
FREE_COMPILE_S = 0.1
"""Seconds of compiling a grammar that the caller's budget is not charged, enough for ordinary grammars on a busy
machine."""
REFUSAL_DELAY_S = 1.0
"""Seconds before a request is refused because its caller's grammar budget is exhausted. Callers that retry at once
would otherwise keep the event loop busy."""
ANONYMOUS_SENDER = Sender()
_MAX_CALLERS = 10_000
"""Max number of callers whose grammar budgets are kept; the least recent one is dropped."""


@dataclass(frozen=True)
class AdmittedRequest:
    """A tokenized request that was admitted to the queue."""

    request: TokenizedRequest
    stream: RequestStream
    priority: int
    sender: Sender
    constraint: Constraint | None
    """Compiled from `request.params.structured_outputs`."""


class EngineFrontend(ABC):
    """Admits requests to an engine, for coroutines of one event loop. Subclasses start and abort admitted requests."""

    backend: Backend

    def __init__(
        self,
        config: EngineConfig,
        model: ModelDescription,
        input_processor: InputProcessor,
        grammars: GrammarCompiler,
        *,
        shared: EngineFrontend | None = None,
    ) -> None:
        """Make a frontend. `shared`: another frontend of the same engine, whose queue, limits and threads it shares."""
        self.config = config
        self.model = model
        self.input_processor = input_processor
        self.grammar_compiler = grammars
        self._failure: str | None = None
        if shared is None:
            self.tokenizer_threads = TokenizerThreads(self.max_sequences_per_caller)
            self._compilers = FairThreadPool(MAX_CONCURRENT_COMPILATIONS, "grammars", max_per_sender=1)
            self._compiling = FairLimit(MAX_COMPILING_PER_CALLER, "grammars", "are being compiled")
            self._budgets: OrderedDict[Sender, GrammarBudget] = OrderedDict()
            self._streams: dict[str, RequestStream] = {}
            self._interval_controller = StreamIntervalController()
            self._wait_estimator = QueueWaitEstimator()
        else:
            self.tokenizer_threads = shared.tokenizer_threads
            self._compilers, self._compiling, self._budgets = shared._compilers, shared._compiling, shared._budgets
            self._streams, self._interval_controller = shared._streams, shared._interval_controller
            self._wait_estimator = shared._wait_estimator

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """Current requests and memory. Returns at once."""

    @abstractmethod
    async def _start_request(self, admitted: AdmittedRequest) -> None:
        """Pass a request to the engine. Its outputs go to its stream after `start_delivery`."""

    @abstractmethod
    def _abort_request(self, request_id: str) -> None:
        """Abort a request if it is unfinished. Returns at once."""

    @abstractmethod
    async def _stop_engine(self) -> None:
        """Stop the engine, after its streams have ended."""

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        sender: Sender = ANONYMOUS_SENDER,
        interval_s: float | None = None,
    ) -> RequestStream:
        """Validate a request with one prompt, and admit it. Raises as `validate` and `submit_validated`."""
        params = params or SamplingParams()
        self.validate([prompt], params)
        request_id = request_id or f"gen_{ULID()}"
        [stream] = await self.submit_validated(
            {request_id: prompt}, params, priority=priority, sender=sender, interval_s=interval_s
        )
        return stream

    def validate(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Check a request once, with all its prompts, as far as possible without tokenizing. Returns at once.

        Raises:
            InvalidInputError: as `InputProcessor.validate`, or more samples than `max_num_seqs` + `max_num_waiting`.
            EngineDeadError: a step has failed; the engine answers no more requests.
        """
        self.check_health()
        num_sequences = len(prompts) * params.n
        if num_sequences > self.max_sequences_per_caller:
            raise InvalidInputError(
                f"{len(prompts)} prompts x n {params.n} are {num_sequences} outputs; the max per request is "
                f"{self.max_sequences_per_caller} (max_num_seqs + max_num_waiting)",
                field="n" if params.n > 1 else "prompt",
                value=params.n if params.n > 1 else len(prompts),
            )
        self.input_processor.validate(prompts, params)

    async def submit_validated(
        self,
        prompts: Mapping[str, Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        sender: Sender = ANONYMOUS_SENDER,
        interval_s: float | None = None,
    ) -> list[RequestStream]:
        """Admit all prompts of a request that `validate` has accepted, or none of them. The caller reads each returned
        stream to its end or closes it.

        Args:
            prompts: prompts by the id of their stream.
            sender: tenant and its key, or client address; each key, and each tenant, has a fair share of the queue, of
                the engine's time and of grammars' CPU time.
            interval_s: interval of the streams' outputs, instead of `stream_interval_s`; infinite if only finished
                outputs matter.

        Raises:
            InvalidInputError: as `InputProcessor.read`, or an id that is in use.
            QueueFullError: the sender has too many running and waiting sequences, waiting prompt tokens
                (`max_waiting_prompt_tokens`) or compiling grammars, or would wait longer than `max_queue_s`.
            RateLimitedError: the sender's grammar budget is exhausted.
            EngineDeadError: a step has failed; the engine answers no more requests.
        """
        if params.structured_outputs is not None and self._get_grammar_budget(sender).is_exhausted:
            await asyncio.sleep(REFUSAL_DELAY_S)
        # 1. check the queue's limits for all prompts, and reserve their places by adding their streams
        self.check_health()
        for request_id in prompts:
            check_request_id(request_id, self._streams)
        self._check_admission(len(prompts) * params.n, sender)
        interval_s = self.config.stream_interval_s if interval_s is None else interval_s
        streams = {
            request_id: RequestStream(self, request_id, params.n, interval_s, self._interval_controller, sender)
            for request_id in prompts
        }
        self._streams |= streams
        # 2. compile the grammar, tokenize, and pass each prompt to the engine
        try:
            for request_id, prompt in prompts.items():
                constraint = await self._make_constraint(params, sender)
                request = await self.tokenizer_threads.run(
                    partial(self.input_processor.tokenize, prompt, params), len(prompt), sender
                )
                await self._start_request(AdmittedRequest(request, streams[request_id], priority, sender, constraint))
                self.check_health()
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        return list(streams.values())

    @property
    def num_requests(self) -> int:
        return sum(stream.engine is self for stream in self._streams.values())

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine has failed or was closed."""
        if self._failure is not None:
            raise self.make_dead_error()

    async def aclose(self) -> None:
        """Stop after the current step; callers still being served get `EngineDeadError`."""
        self._fail_streams("the engine was shut down")
        self._compilers.close(self.make_dead_error())
        self.tokenizer_threads.close()
        await self._stop_engine()

    def drop_stream(self, request_id: str, *, abort: bool) -> None:
        """Drop the request's stream. `abort`: also abort the request, without waiting for the end of its step."""
        self._streams.pop(request_id, None)
        if abort and self._failure is None:
            self._abort_request(request_id)

    def _deliver_outputs(self, outputs: list[RequestOutput]) -> None:
        """Put outputs into their streams, on the event loop; all outputs go through here."""
        try:
            self._wait_estimator.record_completions(
                sum(output.finished for output in outputs), is_full=self._count_queued(self._num_sequences) > 0
            )
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.put_output(output)
        except Exception as error:
            self._handle_failure(error)

    def _handle_failure(self, error: Exception) -> None:
        """End all streams after a failed step, so that no caller waits forever."""
        get_logger().error("engine_failed", exc_info=error)
        self._fail_streams(f"the engine failed and must be restarted: {error!r}")

    def _fail_streams(self, failure: str) -> None:
        self._failure = self._failure or failure
        for stream in self._streams.values():
            stream.put_output(None)

    def make_dead_error(self) -> EngineDeadError:
        return EngineDeadError(self._failure or "the engine is no longer running")

    @property
    def max_sequences_per_caller(self) -> int:
        """Max running and waiting sequences of one caller. Other callers have their own share."""
        return self.config.max_num_seqs + self.config.max_num_waiting

    @property
    def _num_sequences(self) -> int:
        """Number of sequences of all requests, including requests that are being tokenized."""
        return sum(stream.num_sequences for stream in self._streams.values())

    def _check_admission(self, num_sequences: int, sender: Sender) -> None:
        config, held = self.config, Counter[Sender]()
        for stream in self._streams.values():
            held[stream.sender] += stream.num_sequences
        share = find_exceeded_share(sender, num_sequences, held, self.max_sequences_per_caller)
        if share is not None:
            raise QueueFullError(
                f"queue full: {share.used} of {share.limit} sequences of {share.name} are running or waiting, and the "
                f"request has {num_sequences}; try again later",
                retry_after_s=self._wait_estimator.estimate_wait_s(share.used + num_sequences - share.limit),
            )
        if config.max_queue_s is not None:
            # Senders are served in turn. So another sender's queue counts only up to the length of this sender's.
            num_ahead = (held[sender] + 1) * len(held.keys() | {sender})
            wait = self._wait_estimator.estimate_wait_s(min(self._count_queued(self._num_sequences), num_ahead))
            if wait > config.max_queue_s:
                raise QueueFullError(
                    f"queue full: a request would wait {wait:.1f} s, max_queue_s is {config.max_queue_s:g}; try again "
                    "later",
                    retry_after_s=wait - config.max_queue_s,
                )
        self._check_waiting_tokens(sender)

    async def _make_constraint(self, params: SamplingParams, sender: Sender) -> Constraint | None:
        """Compile the request's grammar, if any. Raises as `GrammarCompiler.compile` and
        `GrammarBudget.raise_if_exhausted`."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        budget = self._get_grammar_budget(sender)
        budget.raise_if_exhausted(wanted.name)
        constraint = self.grammar_compiler.find_cached(wanted) or await self._compile_and_charge(wanted, sender)
        constraint.cpu_time.budget = budget
        return constraint

    def _get_grammar_budget(self, sender: Sender) -> GrammarBudget:
        budget = self._budgets[sender] = self._budgets.pop(sender, GrammarBudget())
        if len(self._budgets) > _MAX_CALLERS:
            self._budgets.popitem(last=False)
        return budget

    async def _compile_and_charge(self, structured_outputs: StructuredOutputs, sender: Sender) -> Constraint:
        """Compile a grammar. A slow one is charged to the sender's budget, even if it is refused."""
        budget = self._get_grammar_budget(sender)

        def compile_grammar() -> Constraint:
            self.grammar_compiler.get_vocabulary(structured_outputs)  # made once, so not charged to a caller
            began = time.monotonic()
            try:
                return self.grammar_compiler.compile(structured_outputs)
            finally:
                budget.spend_seconds(max(time.monotonic() - began - FREE_COMPILE_S, 0.0))

        with self._compiling.limit_call(sender):
            return await self._compilers.run(sender, compile_grammar)

    def _count_queued(self, num_sequences: int) -> int:
        """Return how many sequences would wait if one more was added to `num_sequences`, including that one."""
        waiting = self.state.num_waiting
        beyond = num_sequences + 1 - self.config.max_num_seqs
        return max(beyond, waiting + 1 if waiting else 0)

    def _check_waiting_tokens(self, sender: Sender) -> None:
        limit = self.config.max_waiting_prompt_tokens
        if limit is None:
            return
        waiting = self.state.waiting_tokens
        if not waiting.get(sender):  # a caller's first prompt is accepted at any length
            return
        share = find_exceeded_share(sender, 1, waiting, limit)
        if share is not None:
            raise QueueFullError(
                f"queue full: {share.used} prompt tokens of {share.name} are waiting; the limit is {share.limit}; try "
                "again later"
            )


_MAX_REMEMBERED_COMPLETIONS = 32
"""Max number of remembered completions. More would smooth better, but follow changes of the load later."""
_MIN_REMEMBERED_COMPLETIONS = 4
"""Min number of completions for an estimate."""


class QueueWaitEstimator:
    """Estimates queue times from the times at which requests ended while the engine was full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_MAX_REMEMBERED_COMPLETIONS)

    def record_completions(self, count: int, *, is_full: bool) -> None:
        """Record that `count` requests have ended. `is_full`: whether another request would have had to wait."""
        if not is_full:
            self._times.clear()  # completions of an engine with idle capacity do not predict queue times
        else:
            self._times.extend([self._clock()] * count)

    def estimate_wait_s(self, num_queued: int) -> float:
        """Estimate the seconds until the last of `num_queued` requests starts; 0 while nothing is known."""
        if num_queued <= 0 or len(self._times) < _MIN_REMEMBERED_COMPLETIONS:
            return 0.0
        # Include the time since the last completion: a stalled engine is slow.
        return num_queued * (self._clock() - self._times[0]) / len(self._times)
