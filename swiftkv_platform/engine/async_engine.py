"""The engine for many callers on one event loop. A worker thread steps the model, so that the loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from swiftkv_platform.engine.frontend import AdmittedRequest, EngineFrontend
from swiftkv_platform.engine.llm_engine import EngineModel, LLMEngine
from swiftkv_platform.engine.outputs import EngineState
from swiftkv_platform.errors import EngineDeadError
from swiftkv_platform.model.weights.adapters import FindBase
from swiftkv_platform.specs.engine import Backend

ResultT = TypeVar("ResultT")


class AsyncLLMEngine(EngineFrontend):
    """An `LLMEngine` for coroutines of one event loop.

    All calls to the engine run one after another in one worker thread, so no locks are needed: a request,
    tokenized elsewhere (`tokenizer_threads`), is added or aborted between two steps. While there is work, each step
    queues the next one behind such calls and posts its outputs to the event loop, so the model never waits for the
    event loop."""

    backend: Backend = "native"

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine.config, engine.description, engine.input_processor, engine.grammar_compiler)
        self.engine = engine
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stepping = False
        """Whether a step is queued or running. Only the worker thread uses this and `_is_stopped`."""
        self._is_stopped = False

    @property
    def state(self) -> EngineState:
        return self.engine.state

    async def load_adapter(self, name: str, path: str | Path, find_base: FindBase | None = None) -> AdapterFrontend:
        """Load an adapter, while steps run, and serve it. Raises as `LLMEngine.load_adapter` and
        `LLMEngine.add_adapter`."""
        loaded = await asyncio.to_thread(self.engine.load_adapter, path, find_base)
        await self.run_between_steps(lambda: self.engine.add_adapter(name, loaded))
        return self.get_adapter(name)

    def get_adapter(self, name: str) -> AdapterFrontend:
        """Return the frontend of a loaded adapter."""
        return AdapterFrontend(self, name, self.engine.adapters[name])

    async def _start_request(self, admitted: AdmittedRequest) -> None:
        await self.start_request(admitted, None)

    async def start_request(self, admitted: AdmittedRequest, adapter: str | None) -> None:
        """Add a request for an adapter, or for the engine's own model, before the next step."""
        await self.run_between_steps(lambda: self._add_request(admitted, adapter))

    def _abort_request(self, request_id: str) -> None:
        self._worker.submit(self.engine.abort, request_id)  # runs after the current step

    async def _stop_engine(self) -> None:
        if not self._is_stopped:
            await asyncio.wrap_future(self._worker.submit(self._stop_stepping))
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self.engine.close)

    def _run_step(self) -> None:
        """Run a step in the worker, and queue the next step after all waiting calls."""
        assert self._loop is not None
        if self._is_stopped:
            return
        try:
            outputs = self.engine.step()
            self._is_stepping = self.engine.has_unfinished_requests
        except Exception as error:
            self._is_stopped = True
            self._loop.call_soon_threadsafe(self._handle_failure, error)
            return
        self._loop.call_soon_threadsafe(self._deliver_outputs, outputs)
        if self._is_stepping:
            self._worker.submit(self._run_step)

    def _stop_stepping(self) -> None:
        self._is_stopped = True

    def _handle_failure(self, error: Exception) -> None:
        self._is_stopped = True
        super()._handle_failure(error)

    def _add_request(self, admitted: AdmittedRequest, adapter: str | None) -> None:
        """Add a request, in the worker. Check waiting tokens again, because other requests may have been added."""
        self._check_waiting_tokens(admitted.sender)
        self.engine.add_tokenized_request(
            admitted.request,
            admitted.stream.request_id,
            priority=admitted.priority,
            sender=admitted.sender,
            constraint=admitted.constraint,
            adapter=adapter,
        )
        # It runs after `_deliver_outputs` of earlier steps, so outputs of an aborted request with the same id do not
        # reach this stream.
        assert self._loop is not None
        self._loop.call_soon_threadsafe(admitted.stream.start_delivery)
        if not self._is_stepping:
            self._is_stepping = True
            self._worker.submit(self._run_step)

    async def run_between_steps(self, call: Callable[[], ResultT]) -> ResultT:
        """Run `call` in the worker thread between two steps. Raises `EngineDeadError`."""
        self.check_health()
        self._loop = asyncio.get_running_loop()
        return await self._loop.run_in_executor(self._worker, call)


class AdapterFrontend(EngineFrontend):
    """Admits requests to an adapter of an `AsyncLLMEngine`: with the adapter's own tokenizer and checks, in the
    engine's queue."""

    backend: Backend = "native"

    def __init__(self, engine: AsyncLLMEngine, name: str, model: EngineModel) -> None:
        super().__init__(engine.config, model.loaded, model.input_processor, model.grammar_compiler, shared=engine)
        self.name = name
        self._engine = engine

    @property
    def state(self) -> EngineState:
        return self._engine.state

    def check_health(self) -> None:
        self._engine.check_health()

    def make_dead_error(self) -> EngineDeadError:
        return self._engine.make_dead_error()

    def drop_stream(self, request_id: str, *, abort: bool) -> None:
        self._engine.drop_stream(request_id, abort=abort)

    async def aclose(self) -> None:
        """Unload the adapter, which has no unfinished request. The engine runs on."""
        await self._stop_engine()

    async def _start_request(self, admitted: AdmittedRequest) -> None:
        await self._engine.start_request(admitted, self.name)

    def _abort_request(self, request_id: str) -> None:
        self._engine._abort_request(request_id)

    async def _stop_engine(self) -> None:
        with suppress(EngineDeadError):  # an engine that has ended holds no adapters
            await self._engine.run_between_steps(lambda: self._engine.engine.remove_adapter(self.name))
