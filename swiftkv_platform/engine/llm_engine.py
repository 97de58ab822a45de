"""The engine: requests in, tokens out, one step at a time. It is not thread-safe."""

from __future__ import annotations

import sys
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from ulid import ULID

from swiftkv_platform.engine.block_manager import BlockManager
from swiftkv_platform.engine.grammars import Constraint, GrammarCompiler
from swiftkv_platform.engine.kv_cache import KVCache
from swiftkv_platform.engine.loading import LoadedModel, ModelDescription, check_tensor_parallel_size, load_model
from swiftkv_platform.engine.memory import compute_num_blocks, make_cache, make_largest_step, measure_memory
from swiftkv_platform.engine.model_runner import ModelRunner
from swiftkv_platform.engine.outputs import EngineState, RequestOutput, StepResult
from swiftkv_platform.engine.ranks import AllocateMessage, BroadcastingDecoder, RankProcesses
from swiftkv_platform.engine.requests import InputProcessor, Prompt, TokenizedRequest, check_request_id
from swiftkv_platform.engine.scheduler import ScheduledSequence, Scheduler
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.engine.speculative import DraftPlanner, estimate_draft_costs
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.weights.adapters import open_merged_model
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.specs.engine import EngineConfig
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


class LLMEngine:
    """Generates text with a model, dense or SwiftKV, for many requests at a time."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, rank_processes: RankProcesses | None = None) -> None:
        self.config = config
        self._rank_processes = rank_processes
        self.description: ModelDescription = loaded
        self.max_model_len = loaded.context_length
        self.model_config = loaded.config
        self.tokenizer = loaded.tokenizer
        """transformers' tokenizer; None if the model's directory has none."""
        self._drafting = DraftPlanner(estimate_draft_costs(loaded.model))
        decoder = None if rank_processes is None else BroadcastingDecoder(loaded.model.model, rank_processes)
        self._runner = ModelRunner(
            loaded.model,
            self._make_cache(loaded, config),
            self._drafting,
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
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            drafting=self._drafting,
        )
        self.input_processor = InputProcessor(loaded, config, num_slots=self.num_blocks * self.block_size)
        """Validates and tokenizes requests. Thread-safe."""
        self.grammar_compiler = GrammarCompiler(loaded, config)
        """Compiles grammars of structured outputs. Thread-safe."""
        self._running: dict[str, list[Sequence]] = {}  # sequences in the scheduler, by request
        self._pending_samples: dict[
            str, list[Sequence]
        ] = {}  # samples waiting for the first sample's prefill, by request

    @classmethod
    def from_pretrained(cls, path: str | Path, config: EngineConfig | None = None) -> Self:
        """Load a Hugging Face directory or hub id. Raises `ModelError`; `InvalidInputError`: the backend is vLLM."""
        config = config or EngineConfig()
        if config.backend == "vllm":
            raise InvalidInputError(
                "backend is 'vllm', but this is the native engine; native and auto are accepted",
                field="backend",
                value=config.backend,
            )
        if config.tensor_parallel_size == 1:
            return cls(load_model(path, config), config)
        check_tensor_parallel_size(path, config)
        model_directory = fetch_model_directory(str(path), field="model")
        with open_merged_model(model_directory) as (weights, _):  # an adapter is merged once for all ranks
            rank_processes = RankProcesses.start(str(weights), config)
            try:
                loaded = load_model(path, config, rank_processes.ranks, weights=Path(weights))
                rank_processes.wait_until_loaded()
                return cls(loaded, config, rank_processes)
            except BaseException:
                rank_processes.close()
                raise

    def _make_cache(self, loaded: LoadedModel, config: EngineConfig, num_blocks: int | None = None) -> KVCache:
        """Make the KV cache, here and on the other ranks."""
        cache = make_cache(loaded, config, num_blocks)
        if self._rank_processes is not None:
            self._rank_processes.send_message(AllocateMessage(cache.num_blocks))
        return cache

    def _measure_num_blocks(self, loaded: LoadedModel, config: EngineConfig) -> int:
        """Run the largest step, measure its memory, and return the number of blocks that fit on the GPU."""
        cache = self._runner.kv_cache
        memory = measure_memory(lambda: self._runner.run(make_largest_step(loaded, config, cache)), cache.device)
        return compute_num_blocks(loaded, config, cache, memory)

    def close(self) -> None:
        """End the processes of the other ranks, if any. The engine cannot generate afterwards."""
        if self._rank_processes is not None:
            self._rank_processes.close()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id. Raises `InvalidInputError`: an empty or too long prompt, a token id
        outside the vocabulary, a request id in use, unsupported parameters, a request larger than the KV cache, or a
        grammar that cannot be compiled."""
        params = params or SamplingParams()
        request_id = request_id or f"gen_{ULID()}"
        check_request_id(request_id, self._running)
        self.input_processor.validate([prompt], params)
        request = self.input_processor.tokenize(prompt, params)
        wanted = params.structured_outputs
        constraint = None if wanted is None else self.grammar_compiler.compile(wanted)
        self.add_tokenized_request(request, request_id, priority=0, sender=Sender(), constraint=constraint)
        return request_id

    def add_tokenized_request(
        self,
        request: TokenizedRequest,
        request_id: str,
        *,
        priority: int,
        sender: Sender,
        constraint: Constraint | None,
    ) -> None:
        """Queue a request from `input_processor`. Raises `InvalidInputError`: the id is in use.

        Args:
            priority: lower is served first; equal priorities, first come, first served.
            sender: cached prefixes are reused only within its tenant. Tenants, and the keys of each tenant, get fair
                shares of the time.
            constraint: the request's `structured_outputs`, compiled by `grammar_compiler`.
        """
        check_request_id(request_id, self._running)
        sequences = self.input_processor.make_sequences(
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
        results = self._runner.run(scheduled) if scheduled else []
        return self._process_results(scheduled, results)

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
    ) -> list[RequestOutput]:
        """Generate outputs for all prompts, in their order.

        Args:
            params: one for all prompts, or one per prompt.
            progress: show a progress bar; None: only on a terminal.

        Raises:
            InvalidInputError: as `add_request`; then nothing is generated.
        """
        params_by_prompt = _expand_params(prompts, params)
        request_ids: list[str] = []
        samples: dict[str, list[RequestOutput]] = {}
        try:
            for prompt, one in zip(prompts, params_by_prompt, strict=True):
                request_ids.append(self.add_request(prompt, one))
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
