"""The engine: requests in, tokens out, one step at a time (not thread-safe); and the engine for many callers on one
event loop, whose thread steps the model, so that the loop stays free."""

from __future__ import annotations

import asyncio
import sys
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from ulid import ULID

from swiftkv_platform.engine.adapters import map_weight_bytes_by_address
from swiftkv_platform.engine.frontend import AdmittedRequest, EngineFrontend
from swiftkv_platform.engine.grammars import Constraint, GrammarCompiler
from swiftkv_platform.engine.kv_cache import BlockManager, KVCache
from swiftkv_platform.engine.loading import (
    LoadedModel,
    ModelDescription,
    check_tensor_parallel_size,
    load_adapter,
    load_model,
)
from swiftkv_platform.engine.memory import compute_num_blocks, make_cache, make_largest_step, measure_memory
from swiftkv_platform.engine.model_runner import ModelRunner
from swiftkv_platform.engine.outputs import EngineState, RequestOutput, StepResult
from swiftkv_platform.engine.ranks import AllocateMessage, BroadcastingDecoder, RankProcesses
from swiftkv_platform.engine.requests import InputProcessor, Prompt, TokenizedRequest, check_request_id
from swiftkv_platform.engine.scheduler import ScheduledSequence, Scheduler
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.engine.speculative import AdapterDraftPlanner, DraftPlanner, estimate_draft_costs
from swiftkv_platform.errors import EngineDeadError, InvalidInputError
from swiftkv_platform.model.weights.adapters import FindBase, open_merged_model
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams
from swiftkv_platform.web.limiters import Sender


@contextmanager
def show_progress_bar(total: int, *, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a progress bar. `shown`: show it on stderr; None: only if stderr is a terminal."""
    columns = (TextColumn("outputs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not (sys.stderr.isatty() if shown is None else shown)
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


@dataclass(frozen=True)
class EngineModel:
    """One of an engine's models: its own, or an adapter."""

    loaded: LoadedModel
    runner: ModelRunner
    input_processor: InputProcessor
    """Validates and tokenizes requests. Thread-safe."""
    grammar_compiler: GrammarCompiler
    """Compiles grammars of structured outputs. Thread-safe."""


class LLMEngine:
    """Generates text with a model, dense or SwiftKV, and with adapters of the same base, for many requests at a time.

    A step runs one batch for each model that has scheduled sequences.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        rank_processes: RankProcesses | None = None,
        *,
        adapters: Mapping[str, LoadedModel] = MappingProxyType({}),
    ) -> None:
        """Make an engine. `adapters`: the first adapters, as for `add_adapter`."""
        self.config = config
        self._rank_processes = rank_processes
        self.description: ModelDescription = loaded
        self.max_model_len = loaded.context_length
        self.model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        """transformers' tokenizer; None if the model's directory has none."""
        # 1. make the KV cache in the memory that the weights leave
        self._unused_adapter_bytes = max((config.max_adapter_bytes or 0) - _count_adapter_bytes(loaded, adapters), 0)
        drafting = DraftPlanner(estimate_draft_costs(loaded.model))
        decoder = None if rank_processes is None else BroadcastingDecoder(loaded.model.model, rank_processes)
        self._runner = ModelRunner(
            loaded.model,
            self._make_cache(loaded, config),
            drafting,
            decoder,
            num_token_ids=loaded.num_token_ids,
        )
        if self._runner.device.type == "cuda" and config.kv_cache_bytes is None:
            num_blocks = self._measure_num_blocks(loaded, config)
            self._runner.replace_kv_cache(lambda: self._make_cache(loaded, config, num_blocks))
        cache = self._runner.kv_cache
        self.num_blocks = cache.num_blocks
        self.block_size = cache.block_size
        self._blocks = BlockManager(
            self.num_blocks,
            self.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            fingerprint=f"{loaded.digest}/{cache.format}",
        )
        # 2. make the scheduler
        self._draft_planners: dict[str | None, DraftPlanner] = {None: drafting}
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            drafting=AdapterDraftPlanner(self._draft_planners),
        )
        # 3. add the models
        self.input_processor = InputProcessor(loaded, config, num_slots=self.num_blocks * self.block_size)
        """Validates and tokenizes requests. Thread-safe."""
        self.grammar_compiler = GrammarCompiler(loaded, config)
        """Compiles grammars of structured outputs. Thread-safe."""
        self._base = loaded
        self._models: dict[str | None, EngineModel] = {
            None: EngineModel(loaded, self._runner, self.input_processor, self.grammar_compiler)
        }
        for name, adapter in adapters.items():
            self.add_adapter(name, adapter)
        self._running: dict[str, list[Sequence]] = {}  # sequences in the scheduler, by request
        self._pending_samples: dict[
            str, list[Sequence]
        ] = {}  # samples waiting for the first sample's prefill, by request

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        weights: Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        find_base: FindBase | None = None,
    ) -> Self:
        """Load a Hugging Face directory or hub id.

        Args:
            weights: directory with the weights, if it is not `path` (an adapter assembled with its base).
            adapters: further adapters of the same base, by name. None: the engine takes no adapters.
            find_base: see `open_merged_model`; used for adapters that replace tensors of the base.

        Raises:
            ModelError: the model or an adapter cannot be loaded. InvalidInputError: the backend is vLLM, or options
                that exclude adapters.
        """
        config = config or EngineConfig()
        if config.backend == "vllm":
            raise InvalidInputError(
                "backend is 'vllm', but this is the native engine; native and auto are accepted",
                field="backend",
                value=config.backend,
            )
        if adapters is not None:
            check_adapter_options(config)
        if config.tensor_parallel_size == 1:
            loaded = load_model(path, config, weights=weights, has_adapters=adapters is not None)
            resident = [loaded]
            for adapter in (adapters or {}).values():
                resident.append(load_adapter(adapter, config, resident, find_base))
            return cls(loaded, config, adapters=dict(zip(adapters or {}, resident[1:], strict=True)))
        check_tensor_parallel_size(path, config)
        model_directory = fetch_model_directory(str(path), field="model")
        merged = open_merged_model(model_directory) if weights is None else nullcontext((weights, None))
        with merged as (whole, _):  # an adapter is merged once for all ranks
            rank_processes = RankProcesses.start(str(whole), config)
            try:
                loaded = load_model(path, config, rank_processes.ranks, weights=Path(whole))
                rank_processes.wait_until_loaded()
                return cls(loaded, config, rank_processes)
            except BaseException:
                rank_processes.close()
                raise

    def _make_cache(self, loaded: LoadedModel, config: EngineConfig, num_blocks: int | None = None) -> KVCache:
        """Make the KV cache, here and on the other ranks."""
        cache = make_cache(loaded, config, num_blocks, reserved_bytes=self._unused_adapter_bytes)
        if self._rank_processes is not None:
            self._rank_processes.send_message(AllocateMessage(cache.num_blocks))
        return cache

    def _measure_num_blocks(self, loaded: LoadedModel, config: EngineConfig) -> int:
        """Run the largest step, measure its memory, and return the number of blocks that fit on the GPU."""
        cache = self._runner.kv_cache
        memory = measure_memory(lambda: self._runner.run(make_largest_step(loaded, config, cache)), cache.device)
        return compute_num_blocks(loaded, config, cache, memory, reserved_bytes=self._unused_adapter_bytes)

    def close(self) -> None:
        """End the processes of the other ranks, if any. The engine cannot generate afterwards."""
        if self._rank_processes is not None:
            self._rank_processes.close()

    def load_adapter(self, path: str | Path, find_base: FindBase | None = None) -> LoadedModel:
        """Load an adapter for `add_adapter`. Any thread may call it, while steps run. Raises as `loading.load_adapter`,
        and `InvalidInputError`: the engine was made without adapters."""
        if self._base.origin is None:
            raise InvalidInputError("the engine was made without adapters; give adapters={}", field="adapters")
        return load_adapter(path, self.config, [model.loaded for model in list(self._models.values())], find_base)

    def add_adapter(self, name: str, loaded: LoadedModel) -> EngineModel:
        """Serve an adapter from now on. Raises `InvalidInputError`: the name is in use."""
        if name in self._models:
            raise InvalidInputError(f"adapter {name!r} is loaded already", field="adapters", value=name)
        drafting = DraftPlanner(estimate_draft_costs(loaded.model))
        model = EngineModel(
            loaded,
            ModelRunner(loaded.model, self._runner.kv_cache, drafting, num_token_ids=loaded.num_token_ids),
            InputProcessor(
                loaded,
                self.config,
                num_slots=self.num_blocks * self.block_size,
                adapter=name,
                adapter_digest=loaded.digest,
                arrivals=self.input_processor.arrivals,
            ),
            GrammarCompiler(loaded, self.config),
        )
        self._models[name], self._draft_planners[name] = model, drafting
        return model

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter that has no unfinished request. Its memory is freed with the last reference to it."""
        running = [
            sequence for each in (self._running, self._pending_samples) for one in each.values() for sequence in one
        ]
        assert not any(sequence.adapter == name for sequence in running), f"adapter {name!r} has unfinished requests"
        del self._models[name], self._draft_planners[name]

    @property
    def adapters(self) -> dict[str, EngineModel]:
        """Loaded adapters by name."""
        return {name: model for name, model in list(self._models.items()) if name is not None}

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        adapter: str | None = None,
    ) -> str:
        """Queue a request and return its id. `adapter`: its name; None: the engine's own model. Raises
        `InvalidInputError`: an empty or too long prompt, a token id outside the vocabulary, a request id in use,
        unsupported parameters, a request larger than the KV cache, a grammar that cannot be compiled, or an unknown
        adapter."""
        params = params or SamplingParams()
        request_id = request_id or f"gen_{ULID()}"
        check_request_id(request_id, self._running)
        model = self._get_model(adapter)
        model.input_processor.validate([prompt], params)
        request = model.input_processor.tokenize(prompt, params)
        wanted = params.structured_outputs
        constraint = None if wanted is None else model.grammar_compiler.compile(wanted)
        self.add_tokenized_request(
            request, request_id, priority=0, sender=Sender(), constraint=constraint, adapter=adapter
        )
        return request_id

    def _get_model(self, adapter: str | None) -> EngineModel:
        if adapter not in self._models:
            names = ", ".join(self.adapters) or "none"
            raise InvalidInputError.for_field("adapter", adapter, f"; loaded adapters: {names}")
        return self._models[adapter]

    def add_tokenized_request(
        self,
        request: TokenizedRequest,
        request_id: str,
        *,
        priority: int,
        sender: Sender,
        constraint: Constraint | None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request from the model's `input_processor`. Raises `InvalidInputError`: the id is in use, or the
        adapter is not loaded.

        Args:
            priority: lower is served first; equal priorities, first come, first served.
            sender: cached prefixes are reused only within its tenant. Tenants, and the keys of each tenant, get fair
                shares of the time.
            constraint: the request's `structured_outputs`, compiled by the model's `grammar_compiler`.
            adapter: name of the adapter that runs the request; None: the engine's own model.
        """
        check_request_id(request_id, self._running)
        sequences = self._get_model(adapter).input_processor.make_sequences(
            request_id, request, priority=priority, sender=sender, constraint=constraint
        )
        first, *others = sequences
        self._running[request_id] = [first]
        if others:
            self._pending_samples[request_id] = others
        self._scheduler.add_sequence(first)

    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns the outputs of sequences that got a token or ended; empty without unfinished requests,
        and while prompts are prefilled."""
        scheduled = self._scheduler.schedule()
        return self._process_results(scheduled, self._run_models(scheduled))

    def _run_models(self, scheduled: list[ScheduledSequence]) -> list[StepResult]:
        """Run the batch of each model that has scheduled sequences, one after another. Returns their results in the
        order of `scheduled`."""
        results: dict[Sequence, StepResult] = {}
        for adapter in dict.fromkeys(item.sequence.adapter for item in scheduled):
            own = [item for item in scheduled if item.sequence.adapter == adapter]
            found = self._models[adapter].runner.run(own)
            results |= {item.sequence: result for item, result in zip(own, found, strict=True)}
        return [results[item.sequence] for item in scheduled]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request, free its blocks, and return its output. None if no unfinished request has this id."""
        sequences = [*self._running.get(request_id, ()), *self._pending_samples.pop(request_id, ())]
        for sequence in sequences:
            sequence.finish("abort")
            if sequence in self._running[request_id]:
                self._scheduler.remove_sequence(sequence)
        self._running.pop(request_id, None)
        return sequences[0].make_output() if sequences else None

    def generate(
        self,
        prompts: abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for all prompts, in their order.

        Args:
            params: one for all prompts, or one per prompt.
            adapter: as in `add_request`.
            progress: show a progress bar; None: only on a terminal.

        Raises:
            InvalidInputError: as `add_request`; then nothing is generated.
        """
        params_by_prompt = _expand_params(prompts, params)
        request_ids: list[str] = []
        samples: dict[str, list[RequestOutput]] = {}
        try:
            for prompt, one in zip(prompts, params_by_prompt, strict=True):
                request_ids.append(self.add_request(prompt, one, adapter=adapter))
            with show_progress_bar(sum(one.n for one in params_by_prompt), shown=progress) as advance:
                while any(request_id in self._running for request_id in request_ids):
                    for output in self.step():
                        if output.finished:
                            samples.setdefault(output.request_id, []).append(output)
                            advance()
        finally:
            for request_id in request_ids:
                self.abort(request_id)
        return [_merge_samples(samples[request_id]) for request_id in request_ids]

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    @property
    def state(self) -> EngineState:
        """Current requests and memory. Thread-safe; at most one step old."""
        return EngineState(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            waiting_tokens=self._scheduler.waiting_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            kv_cache_usage=1.0 - self.num_free_blocks / self.num_blocks,
        )

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks of the KV cache that are free for sequences."""
        return self._blocks.num_free_blocks

    def assert_consistent(self) -> None:
        """Assert that each block of the KV cache is free or in use."""
        self._scheduler.assert_consistent()

    def _process_results(self, scheduled: list[ScheduledSequence], results: list[StepResult]) -> list[RequestOutput]:
        """Add the step's results to the sequences, remove finished sequences, and return the outputs."""
        outputs = []
        for item, result in zip(scheduled, results, strict=True):
            sequence = item.sequence
            sequence.apply_result(result)
            if result.error is None:
                uncommitted = sequence.num_tokens - sequence.num_computed_tokens
                self._scheduler.commit_tokens(
                    sequence, min(item.num_scheduled_tokens + result.num_accepted_tokens, uncommitted)
                )
                if not sequence.can_generate and sequence.num_computed_tokens == sequence.num_tokens:
                    sequence.finish("length")
            if sequence.num_output_tokens or sequence.finish_reason:
                self._queue_samples(sequence)
            if sequence.finish_reason is not None:
                self._remove_sequence(sequence)
            if result.token_ids or sequence.finish_reason is not None:
                outputs.append(sequence.make_output())
        return outputs

    def _queue_samples(self, first: Sequence) -> None:
        """Queue the other samples of a request, after the first sample has prefilled the prompt."""
        for sequence in self._pending_samples.pop(first.request_id, ()):
            sequence.prompt_logprobs = list(first.prompt_logprobs)
            self._running[first.request_id].append(sequence)
            self._scheduler.add_sequence(sequence)

    def _remove_sequence(self, sequence: Sequence) -> None:
        self._scheduler.remove_sequence(sequence)
        self._running[sequence.request_id].remove(sequence)
        if not self._running[sequence.request_id]:
            del self._running[sequence.request_id]


def check_adapter_options(config: EngineConfig) -> None:
    """Raise `InvalidInputError` for options of an engine that takes no adapters."""
    if config.tensor_parallel_size > 1:
        raise InvalidInputError.for_field(
            "tensor_parallel_size", config.tensor_parallel_size, ", but adapters need 1; deploy each of them separately"
        )
    if not config.swiftkv:
        raise InvalidInputError(
            "swiftkv is false, but adapters are students; leave it out", field="swiftkv", value=False
        )


def _count_adapter_bytes(base: LoadedModel, adapters: Mapping[str, LoadedModel]) -> int:
    """Return the bytes of the adapters' weights that the base does not have."""
    weights: dict[int, int] = {}
    for adapter in adapters.values():
        weights |= map_weight_bytes_by_address(adapter.model)
    return sum(size for address, size in weights.items() if address not in map_weight_bytes_by_address(base.model))


def _expand_params(
    prompts: abc.Sequence[Prompt], params: SamplingParams | abc.Sequence[SamplingParams] | None
) -> abc.Sequence[SamplingParams]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        raise InvalidInputError("prompts is a single prompt; give a list of prompts", field="prompts")
    each = params if isinstance(params, abc.Sequence) else [params or SamplingParams()] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidInputError(
            f"params has {len(each)} entries for {len(prompts)} prompts; give one for all prompts, or one per prompt",
            field="params",
            value=len(each),
        )
    return each


def _merge_samples(samples: list[RequestOutput]) -> RequestOutput:
    """Return the first of a request's outputs, with all of them in `samples` if there are several."""
    samples.sort(key=lambda output: output.index)
    return replace(samples[0], samples=tuple(samples)) if len(samples) > 1 else samples[0]


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
