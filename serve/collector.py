"""Outputs of one request, with several prompts and several samples each, streamed or complete. Knows no HTTP format."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import ClientDisconnect, Request
from ulid import ULID

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import DeadlineExceededError, SwiftKVError
from swiftkv_platform.serve.access import Caller
from swiftkv_platform.specs.deployment import ResolvedCapture

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput, RequestStream
    from swiftkv_platform.engine.frontend import EngineFrontend


class Conversation(Protocol):
    """Conversation of a request that is captured."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""

    def make_row_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return `messages`, `tools` and `finish_reason` of the captured row with this answer. Slow for long ones."""


@dataclass(frozen=True)
class CapturePlan:
    """How a request is captured after it has finished. Only requests that were chosen for it have one."""

    settings: ResolvedCapture
    path: str
    """Route, such as `/v1/completions`."""
    decode: Callable[[Sequence[int]], str]
    """Decoder of prompts that are token ids."""
    user: str | None = None
    """End user, as the caller named him."""
    conversation: Conversation | None = None
    """None: the prompts are texts or token ids."""


@dataclass(frozen=True)
class RequestContext:
    """Caller and options of a request."""

    caller: Caller = field(default_factory=Caller)
    request_id: str | None = None
    """Id chosen by the caller; unique among running requests of the caller's tenant."""
    priority: int = 0
    """Lower values are scheduled first."""
    timeout_s: float | None = None
    """Seconds after which the request is aborted; None: no limit."""
    interval_s: float | None = math.inf
    """Seconds for which tokens may be collected into one output; infinity without streaming; None: the deployment's
    setting."""
    ignored_fields: tuple[str, ...] = ()
    """Names of request fields that were accepted without effect."""
    capture: CapturePlan | None = None


@dataclass
class OutputCollector:
    """Collects the outputs of a request's choices, which are numbered prompt * n + sample."""

    id: str
    prompts: Sequence[str | list[int]] = field(repr=False)
    num_choices: int
    context: RequestContext
    on_finished: Callable[[RequestOutput], None]
    on_closed: Callable[[OutputCollector], None]
    """Called once, when the request ends with any outcome."""
    started_ns: int
    """Unix nanoseconds."""
    outcome: str = field(default="left", init=False)
    """`finished`, the code of the error that ended the request, or `left` if the caller has disconnected."""
    _streams: Sequence[RequestStream] = field(repr=False)
    _num_samples: int
    _request_deadline: float | None
    """End of the request's timeout on the event loop's clock; None: no timeout."""
    _closed: bool = field(default=False, init=False)

    @property
    def outputs(self) -> list[RequestOutput]:
        """Newest output of each choice, in order, without choices that have none; may be ahead of `stream_outputs`."""
        return [stream.newest_outputs[index] for stream in self._streams for index in sorted(stream.newest_outputs)]

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens, and of completion tokens generated up to now."""
        prompts = sum(len(output.prompt_token_ids) for output in self.outputs if output.index == 0)
        return prompts + sum(len(output.token_ids) for output in self.outputs)

    @classmethod
    async def submit(
        cls,
        engine: EngineFrontend,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        context: RequestContext,
        on_finished: Callable[[RequestOutput], None],
        on_closed: Callable[[OutputCollector], None],
    ) -> OutputCollector:
        """Submit all prompts of a validated request, or none. Raises as `EngineFrontend.submit_validated`."""
        request_id = context.request_id or f"gen_{ULID()}"
        tenant, started_ns = context.caller.tenant, time.time_ns()
        deadline = None if context.timeout_s is None else asyncio.get_running_loop().time() + context.timeout_s
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
            request_id, prompts, num_choices, context, on_finished, on_closed, started_ns, streams, params.n, deadline
        )

    async def stream_outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (choice, its output so far) for each new output.

        Raises:
            DeadlineExceededError: `timeout_s` has passed.
            GenerationError: the model's outputs are not finite.
            InvalidInputError: a constraint is too complex.
            EngineDeadError: the engine has failed.
        """
        num_finished = 0
        try:
            async for prompt, output in _merge(self._streams, self._request_deadline):
                choice = prompt * self._num_samples + output.index
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
                f"the request was not finished within timeout_s, {self.context.timeout_s:g} s",
                field="timeout_s",
                value=self.context.timeout_s,
            ) from error
        except SwiftKVError as error:
            self.outcome = error.code
            raise
        finally:
            self.close()

    async def collect(self) -> list[RequestOutput]:
        """Return the finished outputs, by choice. Raises as `stream_outputs`."""
        outputs = {choice: output async for choice, output in self.stream_outputs()}
        return [outputs[choice] for choice in range(self.num_choices)]

    def close(self) -> None:
        """Abort unfinished samples, which frees their KV blocks within one step. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.close()
        self.on_closed(self)


async def collect_unless_disconnected(collector: OutputCollector, request: Request) -> list[RequestOutput]:
    """Return `collector.collect()`. If the client disconnects, aborts the request and raises `ClientDisconnect`."""
    collecting = asyncio.ensure_future(collector.collect())
    disconnecting = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({collecting, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ClientDisconnect
        return await collecting
    finally:
        for future in (collecting, disconnecting):
            future.cancel()
        await asyncio.gather(collecting, disconnecting, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected. The request's body must be read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _merge(streams: Sequence[RequestStream], deadline: float | None) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield (index of the stream, output) in order of arrival. Raises `TimeoutError` at the deadline."""
    clock = asyncio.get_running_loop().time
    if len(streams) == 1:  # the common case, without a task per token
        [stream] = streams
        with suppress(StopAsyncIteration):
            while True:
                timeout = None if deadline is None else max(deadline - clock(), 0.0)
                yield 0, await (anext(stream) if timeout is None else asyncio.wait_for(anext(stream), timeout))
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            timeout = None if deadline is None else max(deadline - clock(), 0.0)
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
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
