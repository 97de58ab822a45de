"""Requests on their way into an engine, whichever it is: checks, limits, reading, grammars, streams. Knows no model."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ulid import ULID

from swiftkv_platform.engine.constraint import Allowance, Constraint
from swiftkv_platform.engine.grammars import GrammarCompiler
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.engine.outputs import EngineState, RequestOutput
from swiftkv_platform.engine.requests import Prompt, Readers, ReadRequest, RequestReader
from swiftkv_platform.engine.streams import EventPace, RequestStream
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, QueueFullError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams
from swiftkv_platform.specs.structured_outputs import StructuredOutputs

MAX_COMPILING = 8
"""Requests whose grammars are being compiled, or wait for that; one more is refused at once."""
PATIENCE_S = 1.0
"""Seconds that a request waits for time of its caller's grammars, without a place in the queue, before it is refused: a
caller that asks again at once would keep the event loop busy with refusals."""
_MOST_CALLERS = 10_000
"""Callers whose grammars' time is counted; the one that asked longest ago is forgotten."""


@dataclass(frozen=True)
class Admitted:
    """A request that has been read and is to be answered."""

    request: ReadRequest
    stream: RequestStream
    priority: int
    tenant: str
    constraint: Constraint | None
    """Compiled from `request.params.structured_outputs`."""


class EngineFrontend(ABC):
    """An engine for coroutines of one event loop; a subclass begins and aborts what was admitted."""

    backend: Backend
    """Engine that a deployment knows it by."""

    def __init__(
        self, config: EngineConfig, model: ModelDescription, reader: RequestReader, grammars: GrammarCompiler
    ) -> None:
        self.config = config
        self.model = model
        self.reader = reader
        self.grammars = grammars
        self.readers = Readers(self.max_sequences)
        """Threads for all that makes text of tokens or tokens of text for a caller."""
        self._compiling = ThreadPoolExecutor(max_workers=MAX_COMPILING, thread_name_prefix="grammars")
        self._num_compiling = 0
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()
        self._streams: dict[str, RequestStream] = {}
        self._pace = EventPace()
        self._failure: str | None = None
        self._departures = Departures()

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """Requests and memory at the moment. Takes no time."""

    @abstractmethod
    async def _begin(self, admitted: Admitted) -> None:
        """Hand a request to the engine, whose outputs go to its stream, once that is open."""

    @abstractmethod
    def _abort(self, request_id: str) -> None:
        """Take a request back, if it is unfinished. Returns at once."""

    @abstractmethod
    async def _stop(self) -> None:
        """End the engine, after its last stream."""

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """`submit`, and the outputs; a caller that stops listening (`aclose` or cancellation) aborts the request."""
        stream = await self.submit(prompt, params, request_id, priority=priority, tenant=tenant)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        caller: str = "",
        interval_s: float | None = None,
    ) -> RequestStream:
        """Admit a request; the caller reads the stream to its end or closes it.

        Args:
            caller: whose grammars' time is counted together.
            interval_s: of the stream, in place of `stream_interval_s`; infinite where only finished outputs matter.

        Raises:
            InvalidInputError: as `RequestReader.read`, and for more samples than `max_num_seqs` and
                `max_num_waiting` have room for.
            QueueFullError: running and waiting sequences leave too little of that room, `max_waiting_prompt_tokens`
                tokens wait, the wait would be longer than `max_queue_s`, or too many grammars are being compiled.
            RateLimitedError: the caller's grammars have taken all the time that they may.
            EngineDeadError: a step has failed; no request will be answered any more.
        """
        request_id, params = request_id or f"gen_{ULID()}", params or SamplingParams()
        if params.structured_outputs is not None and self._allowance(caller).is_spent:
            await asyncio.sleep(PATIENCE_S)
        self._check_unused(request_id)
        self.check([prompt], params)
        interval_s = self.config.stream_interval_s if interval_s is None else interval_s
        stream = RequestStream(self, request_id, params.n, interval_s, self._pace)
        self._streams[request_id] = stream
        try:
            constraint = await self._constraint(params, caller)
            request = await self.readers.run(lambda: self.reader.read(prompt, params), len(prompt))
            await self._begin(Admitted(request, stream, priority, tenant, constraint))
            self.check_health()
        except BaseException:
            stream.close()
            raise
        return stream

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Refuse what need not be read to be refused, all prompts together. Takes no time. Raises as `submit`."""
        self.check_health()
        num_sequences = len(prompts) * params.n
        if num_sequences > self.max_sequences:
            raise InvalidInputError(
                f"{len(prompts)} prompts x n {params.n} are {num_sequences} answers; a request accepts "
                f"{self.max_sequences} (max_num_seqs + max_num_waiting)",
                field="n",
                value=params.n,
            )
        for prompt in prompts:
            self.reader.check(prompt, params)
        self._check_admission(num_sequences)

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def check_health(self) -> None:
        """Raises `EngineDeadError` once the loop has failed or was closed."""
        if self._failure is not None:
            raise self.death()

    async def aclose(self) -> None:
        """Stop after the present step; callers still being served get `EngineDeadError`."""
        self._fail("the engine was shut down")
        self._compiling.shutdown(wait=False)
        self.readers.close()
        await self._stop()

    def forget(self, request_id: str, *, abort: bool) -> None:
        """Drop the request's stream. An abort is not waited for."""
        self._streams.pop(request_id, None)
        if abort and self._failure is None:
            self._abort(request_id)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand outputs to callers, on the event loop; no other place does."""
        try:
            self._departures.note(sum(output.finished for output in outputs), full=self._num_in_line > 0)
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.put(output)
        except Exception as error:
            self._break_down(error)

    def _break_down(self, error: Exception) -> None:
        """End all streams after a failed step, so that no caller waits for an answer that cannot come."""
        get_logger().error("engine_failed", exc_info=error)
        self._fail(f"the engine failed and has to be restarted: {error!r}")

    def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        for stream in self._streams.values():
            stream.put(None)

    def death(self) -> EngineDeadError:
        """Return the error that ends all requests."""
        return EngineDeadError(self._failure or "the engine runs no more")

    @property
    def max_sequences(self) -> int:
        """Sequences that run and wait at most."""
        return self.config.max_num_seqs + self.config.max_num_waiting

    @property
    def _num_sequences(self) -> int:
        """Sequences of all requests, those included that are still being read."""
        return sum(stream.num_sequences for stream in self._streams.values())

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams:
            raise InvalidInputError(
                f"request_id {request_id!r} is in use; give each running request its own",
                field="request_id",
                value=request_id,
            )

    def _check_admission(self, num_sequences: int) -> None:
        config, taken = self.config, self._num_sequences
        lacking = taken + num_sequences - self.max_sequences
        if lacking > 0:
            raise QueueFullError(
                f"queue full: {taken} sequences run or wait already, {self.max_sequences} may, and the request has "
                f"{num_sequences}; try again later",
                retry_after_s=self._departures.expected_wait(lacking),
            )
        if config.max_queue_s is not None:
            wait = self._departures.expected_wait(self._num_in_line)
            if wait > config.max_queue_s:
                raise QueueFullError(
                    f"queue full: a request would wait {wait:.1f} s, max_queue_s is {config.max_queue_s:g}; try again "
                    "later",
                    retry_after_s=wait - config.max_queue_s,
                )
        self._check_waiting_tokens()

    async def _constraint(self, params: SamplingParams, caller: str) -> Constraint | None:
        """Compiled while the engine steps on. Raises as `GrammarCompiler.compile` and `Allowance.check`."""
        wanted = params.structured_outputs
        if wanted is None:
            return None
        allowance = self._allowance(caller)
        allowance.check(wanted.name)
        constraint = self.grammars.find(wanted) or await self._compiled(wanted)
        constraint.charge(allowance)
        return constraint

    def _allowance(self, caller: str) -> Allowance:
        allowance = self._allowances[caller] = self._allowances.pop(caller, Allowance())
        if len(self._allowances) > _MOST_CALLERS:
            self._allowances.popitem(last=False)
        return allowance

    async def _compiled(self, wanted: StructuredOutputs) -> Constraint:
        if self._num_compiling >= MAX_COMPILING:
            raise QueueFullError(f"queue full: {MAX_COMPILING} grammars are being compiled; try again later")
        self._num_compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compiling, self.grammars.compile, wanted)
        finally:
            self._num_compiling -= 1

    @property
    def _num_in_line(self) -> int:
        """Sequences that would wait if one more came, that one included."""
        waiting = self.state.num_waiting
        beyond = self._num_sequences + 1 - self.config.max_num_seqs
        return max(beyond, waiting + 1 if waiting else 0)

    def _check_waiting_tokens(self) -> None:
        limit = self.config.max_waiting_prompt_tokens
        if limit is not None and (waiting := self.state.num_waiting_tokens) >= limit:
            raise QueueFullError(f"queue full: {waiting} prompt tokens wait to be read, {limit} may; try again later")


_WINDOW = 32
"""Departures remembered: enough to even out answers that end together, few enough to follow the load."""
_ENOUGH = 4
"""Departures without which there is no judgement."""


class Departures:
    """Times at which requests have ended while all places were taken."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_WINDOW)

    def note(self, count: int, *, full: bool) -> None:
        """`count` requests have ended; `full`: others were waiting, or would have."""
        if not full:
            self._times.clear()  # how often idle places become free says nothing of a queue
        else:
            self._times.extend([self._clock()] * count)

    def expected_wait(self, num_in_line: int) -> float:
        """Seconds until the last of `num_in_line` requests has its turn; 0 while nothing is known."""
        if num_in_line <= 0 or len(self._times) < _ENOUGH:
            return 0.0
        # The time since the last departure counts as well, or a stalled engine would look fast.
        return num_in_line * (self._clock() - self._times[0]) / len(self._times)
