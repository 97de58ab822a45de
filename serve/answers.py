"""Answers of one request: outputs of several prompts and several samples each, streamed or complete. Knows no HTTP
format."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from ulid import ULID

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import DeadlineExceededError, SwiftKVError
from swiftkv_platform.serve.access import Caller

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput, RequestStream
    from swiftkv_platform.engine.frontend import EngineFrontend


@dataclass(frozen=True)
class RequestContext:
    """Caller and options of a request."""

    caller: Caller = field(default_factory=Caller)
    request_id: str | None = None
    """Chosen by the caller; unique within its tenant while the request runs."""
    priority: int = 0
    """Lower goes first."""
    timeout_s: float | None = None
    """Seconds after which the request is aborted; None: no limit."""
    interval_s: float | None = math.inf
    """Seconds for which tokens may be collected into one output; infinity for an answer that is not streamed; None: the
    deployment's setting."""
    ignored_fields: tuple[str, ...] = ()
    """Names of request fields that were accepted without effect."""


@dataclass
class Answers:
    """All choices of one request. Choices are numbered prompt * n + sample."""

    id: str
    prompts: Sequence[str | list[int]] = field(repr=False)
    num_choices: int
    context: RequestContext
    on_finished: Callable[[RequestOutput], None]
    """Called for each finished sample."""
    on_closed: Callable[[Answers], None]
    """Called once at the end, whatever the outcome."""
    began_ns: int
    """Unix nanoseconds."""
    outcome: str = field(default="left", init=False)
    """`finished`, the code of the error that ended it, or `left` if the caller did not wait for the end."""
    _streams: Sequence[RequestStream] = field(repr=False)
    _n: int
    _deadline: float | None
    """Time on the event loop's clock."""
    _closed: bool = field(default=False, init=False)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Newest output of each choice that has one, by choice; may be ahead of what has been read."""
        return [stream.newest_outputs[index] for stream in self._streams for index in sorted(stream.newest_outputs)]

    @property
    def num_tokens(self) -> int:
        """Number of prompt and completion tokens of the outputs so far."""
        prompts = sum(len(output.prompt_token_ids) for output in self.outputs if output.index == 0)
        return prompts + sum(len(output.token_ids) for output in self.outputs)

    @classmethod
    async def begin(
        cls,
        engine: EngineFrontend,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        context: RequestContext,
        on_finished: Callable[[RequestOutput], None],
        on_closed: Callable[[Answers], None],
    ) -> Answers:
        """Submit all prompts of a validated request, or none. Raises as `EngineFrontend.submit_validated`."""
        request_id = context.request_id or f"gen_{ULID()}"
        tenant, began_ns = context.caller.tenant, time.time_ns()
        now = asyncio.get_running_loop().time()
        deadline = None if context.timeout_s is None else now + context.timeout_s
        streams = await engine.submit_validated(
            # Tenants choose ids freely; they must not collide with, or abort, another tenant's.
            {f"{tenant}/{request_id}/{number}": prompt for number, prompt in enumerate(prompts)},
            params,
            priority=context.priority,
            sender=context.caller.sender,
            interval_s=context.interval_s,
        )
        num_choices = len(prompts) * params.n
        return cls(
            request_id, prompts, num_choices, context, on_finished, on_closed, began_ns, streams, params.n, deadline
        )

    async def as_they_come(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (choice, its output so far) whenever it has grown.

        Raises:
            DeadlineExceededError: `timeout_s` has passed.
            GenerationError: the model's outputs are not finite.
            InvalidInputError: a constraint turned out too complex.
            EngineDeadError: the engine has failed.
        """
        num_finished = 0
        try:
            async for prompt, output in _merged(self._streams, self._deadline):
                choice = prompt * self._n + output.index
                if output.finish_reason == "error":
                    raise output.failure()
                if output.finished:
                    self.on_finished(output)
                    num_finished += 1
                    if num_finished == self.num_choices:
                        self.outcome = "finished"
                yield choice, output
        except TimeoutError as error:
            self.outcome = DeadlineExceededError.code
            raise DeadlineExceededError(
                f"the answer was not finished within timeout_s, {self.context.timeout_s:g} s",
                field="timeout_s",
                value=self.context.timeout_s,
            ) from error
        except SwiftKVError as error:
            self.outcome = error.code
            raise
        finally:
            self.close()

    async def all(self) -> list[RequestOutput]:
        """Return the finished outputs, by choice. Raises as `as_they_come`."""
        outputs = {choice: output async for choice, output in self.as_they_come()}
        return [outputs[choice] for choice in range(self.num_choices)]

    def close(self) -> None:
        """Abort unfinished samples; their blocks are freed within one step. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.close()
        self.on_closed(self)


async def whole(answers: Answers, request: Request) -> list[RequestOutput]:
    """Return `answers.all()`. Raises as it does, and `ClientDisconnect`, aborting the request, if the client leaves."""
    reading = asyncio.ensure_future(answers.all())
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ClientDisconnect
        return await reading
    finally:
        for future in (reading, leaving):
            future.cancel()
        await asyncio.gather(reading, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    """Return when the client has disconnected. The request's body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[RequestStream], deadline: float | None) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield (index of the stream, output) in order of arrival. Raises `TimeoutError` at the deadline."""
    clock = asyncio.get_running_loop().time
    if len(streams) == 1:  # the common case, without a task for each token
        [stream] = streams
        with suppress(StopAsyncIteration):
            while True:
                within = None if deadline is None else max(deadline - clock(), 0.0)
                yield 0, await (anext(stream) if within is None else asyncio.wait_for(anext(stream), within))
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            remaining = None if deadline is None else max(deadline - clock(), 0.0)
            done, _ = await asyncio.wait(waiting, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for future in done:
                index = waiting.pop(future)
                try:
                    output = future.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
