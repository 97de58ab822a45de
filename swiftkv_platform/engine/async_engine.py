"""The engine for many callers on one event loop, which stays free: a worker thread steps the model. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ulid import ULID

from swiftkv_platform.engine.config import SamplingParams
from swiftkv_platform.engine.llm_engine import LLMEngine, Prompt
from swiftkv_platform.engine.scheduler import MAX_NUM_SEQS
from swiftkv_platform.engine.sequence import RequestOutput
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, QueueFullError
from swiftkv_platform.logs import get_logger

R = TypeVar("R")

Stream = asyncio.Queue[RequestOutput | None]
"""What a caller is sent; None says that nothing more comes."""


class AsyncLLMEngine:
    """Serves an `LLMEngine` to coroutines of one event loop.

    Everything that touches the engine runs in one worker thread, call after call, so nothing needs a lock: a request is
    added or aborted between two steps. The stepping loop starts with the first request.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._streams: dict[str, Stream] = {}
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's output so far after each of its steps, the finished one last.

        A caller that stops listening (`aclose` or cancellation) aborts the request within one step.

        Raises:
            InvalidInputError: as `LLMEngine.add_request`.
            QueueFullError: `max_num_waiting` requests wait already.
            EngineDeadError: a step has failed; no request will be answered any more.
        """
        request_id = request_id or f"gen_{ULID()}"
        self._check_admission(request_id)
        stream = self._streams[request_id] = Stream()
        finished = False
        try:
            await self._in_worker(lambda: self.engine.add_request(prompt, params, request_id))
            self._wake()
            while not finished:
                output = await stream.get()
                if output is None:
                    raise self._dead()
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            if not finished:
                self._abort(request_id)

    @property
    def num_requests(self) -> int:
        """Callers being served or waiting."""
        return len(self._streams)

    def check_health(self) -> None:
        """Raises `EngineDeadError` once the loop has failed or was closed."""
        if self._failure is not None:
            raise self._dead()

    async def aclose(self) -> None:
        """Stop after the present step; callers still being served get `EngineDeadError`."""
        self._fail("the engine was shut down")
        if self._loop is not None:
            self._loop.cancel()
        await asyncio.to_thread(self._worker.shutdown)

    async def _run(self) -> None:
        """Step while there is work; the only place that hands outputs to callers."""
        try:
            while True:
                await self._work.wait()
                for output in await self._in_worker(self.engine.step):
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put_nowait(output)
                if not self.engine.has_unfinished_requests:
                    self._work.clear()
        except Exception as error:
            get_logger().exception("engine_loop_failed")
            self._fail(f"the engine failed and has to be restarted: {error!r}")

    def _wake(self) -> None:
        self.check_health()
        if self._loop is None:
            self._loop = asyncio.create_task(self._run(), name="engine-loop")
        self._work.set()

    def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        for stream in self._streams.values():
            stream.put_nowait(None)

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(self._failure or "the engine runs no more")

    def _check_admission(self, request_id: str) -> None:
        self.check_health()
        if request_id in self._streams:
            raise InvalidInputError(
                f"request_id {request_id!r} is in use; give each running request its own",
                field="request_id",
                value=request_id,
            )
        max_num_waiting = self.engine.config.max_num_waiting
        if len(self._streams) >= MAX_NUM_SEQS + max_num_waiting:
            raise QueueFullError(f"queue full: {max_num_waiting} requests wait already; try again later")

    def _abort(self, request_id: str) -> None:
        """Queue the abort behind whatever the worker is doing; nobody waits for it."""
        if self._failure is None:
            self._worker.submit(self.engine.abort, request_id)

    async def _in_worker(self, call: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)
