"""vLLM as the engine of a replica; SwiftKV models run by this project's plugin. Knows no HTTP.

vLLM schedules, computes and samples tokens in its own processes. Requests are read, limited and refused here as for the
native engine (`EngineFrontend`), and vLLM's outputs are tracked token by token (`Sequence`), so that text, stop
strings, finish reasons and log-probabilities are the same from both.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Several
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from vllm import RequestOutput as VLLMOutput
from vllm import SamplingParams as VLLMParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from swiftkv_platform.engine import EngineConfig, Prompt, SamplingParams, StructuredOutputs
from swiftkv_platform.engine.fairness import FairSemaphore
from swiftkv_platform.engine.frontend import AdmittedRequest, EngineFrontend
from swiftkv_platform.engine.grammars import GrammarCompiler
from swiftkv_platform.engine.loading import ModelDescription, describe_model
from swiftkv_platform.engine.outputs import EngineState, FinishReason, StepResult, TokenLogprobs
from swiftkv_platform.engine.requests import InputProcessor
from swiftkv_platform.engine.sequence import Sequence, SequenceStatus
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.model_directories import create_model_view
from swiftkv_platform.specs.base import MAX_LOGPROBS
from swiftkv_platform.specs.engine import Backend
from swiftkv_platform.specs.structured_outputs import WHITESPACE
from swiftkv_platform.vllm import announce_frontend
from swiftkv_platform.web.limiters import Sender

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # replicas send nothing to vLLM's authors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would put all replicas of a machine on the same cores
}
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logprobs", "prompt_logprobs"),
)
"""Parameters of the same name and meaning."""
_OTHERS_PART = 8
"""Sequences of one caller for each place that is kept for others."""
_NATIVE = "only backend native supports it, and this deployment's is vllm"


def set_environment(config: EngineConfig) -> None:
    """Set the environment variables that vLLM's processes read at start. Variables set by the operator are kept, except
    `OMP_NUM_THREADS` if `num_threads` is given."""
    announce_frontend()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)


def max_running(config: EngineConfig) -> tuple[int, int]:
    """Return how many sequences vLLM runs at a time, and how many of one caller. Others find places at once, since vLLM
    does not preempt for them."""
    wanted = config.max_num_seqs + max(config.max_num_seqs // _OTHERS_PART, 1)
    of_all = min(wanted, config.max_num_batched_tokens)  # a step has at least one token per running sequence
    return of_all, min(config.max_num_seqs, max(of_all - 1, 1))


def engine_args(directory: Path, config: EngineConfig, model: ModelDescription) -> dict[str, Any]:
    """Return the keyword arguments of `AsyncEngineArgs`; vLLM chooses the others."""
    args: dict[str, Any] = {
        "model": str(directory),
        "dtype": _dtype(config, model),
        "max_model_len": model.context_length,
        "max_num_seqs": max_running(config)[0],
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_parallel_size,
        "skip_tokenizer_init": model.tokenizer is None,
        "scheduling_policy": "priority",
        "max_logprobs": MAX_LOGPROBS,
        "generation_config": "vllm",  # no defaults from the model: requests have all parameters
        "structured_outputs_config": {"backend": "guidance"},  # as in the native engine
        "disable_log_stats": True,
    }
    if "block_size" in config.model_fields_set:
        args["block_size"] = config.block_size
    if config.seed is not None:
        args["seed"] = config.seed & 0xFFFFFFFF
    overrides = {}
    if not config.swiftkv and model.config.model_type.endswith("_swiftkv"):
        overrides["swiftkv"] = False
    if getattr(model.config, "tie_word_embeddings", None) is False:
        overrides["tie_word_embeddings"] = False  # as in the weight files; config.json may differ
    if overrides:
        args["hf_overrides"] = overrides
    return args


def check_params(params: SamplingParams, *, skips_prompts: bool) -> None:
    """Raise `InvalidInputError` for parameters that vLLM does not support, naming the field and the backend that does.
    `skips_prompts`: whether the model is a student, most of whose prompt tokens have no logits."""
    params.require_no_early_exit(f"; {_NATIVE}: 'off' is accepted")
    if params.num_lookup_tokens:
        raise InvalidInputError.for_field("num_lookup_tokens", params.num_lookup_tokens, f"; {_NATIVE}: 0 is accepted")
    if skips_prompts and params.prompt_logprobs is not None:
        why = f"; for a SwiftKV model {_NATIVE}: leave it out, or serve the teacher with engine.swiftkv: false"
        raise InvalidInputError.for_field("prompt_logprobs", params.prompt_logprobs, why)


def vllm_params(sequence: Sequence, *, seed: int | None) -> VLLMParams:
    """Return vLLM's parameters for one sample. Text, stop strings and end of sequence are handled by our `Sequence`, so
    that both engines end answers alike."""
    params = sequence.params
    return VLLMParams(
        max_tokens=max(sequence.max_output_tokens, 1),  # vLLM always generates; an unwanted token is dropped
        min_tokens=min(params.min_tokens, sequence.max_output_tokens),
        **{name: getattr(params, name) for name in _SAME},
        logit_bias=dict(params.logit_bias) or None,
        seed=seed,
        stop_token_ids=sorted(sequence.stop_token_ids),
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        ignore_eos=True,  # the ends of sequence are among `stop_token_ids`
        structured_outputs=None if params.structured_outputs is None else _constraint(params.structured_outputs),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _dtype(config: EngineConfig, model: ModelDescription) -> str:
    """Return the dtype to load in; for `auto` the checkpoint's, since vLLM's `auto` would turn float32 to bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    dtype = getattr(model.config, "dtype", None)
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _constraint(wanted: StructuredOutputs) -> StructuredOutputsParams:
    """Return the constraint in vLLM's form, with the same meaning as in `GrammarCompiler`."""
    if wanted.kind in ("json", "json_object"):
        whitespace: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        if wanted.disable_any_whitespace:
            whitespace = {"whitespace_flexible": False}
        schema: dict[str, Any] = json.loads(wanted.text)
        return StructuredOutputsParams(json={**schema, "x-guidance": schema.get("x-guidance", {}) | whitespace})
    if wanted.kind == "regex":
        return StructuredOutputsParams(regex=wanted.text)
    if wanted.kind == "choice":
        return StructuredOutputsParams(choice=list(wanted.choice or ()))
    return StructuredOutputsParams(grammar=wanted.text)


def load_vllm(directory: Path, config: EngineConfig, **overrides: Any) -> VLLMEngine:
    """Start vLLM on a model directory. Blocks until its processes are ready. `overrides`: of `AsyncEngineArgs`. Raises
    `ModelError` for a model or an option that vLLM or the plugin refuses."""
    model = describe_model(directory, config)
    view = create_model_view(directory, Settings().home / "views")  # vLLM's processes see only checked files
    _check_device(config)
    set_environment(config)
    stats = Stats()
    try:
        args = AsyncEngineArgs(**engine_args(view, config, model) | overrides)
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: stats])
    except (ValueError, RuntimeError) as error:
        # A RuntimeError means that one of vLLM's processes failed; its log has the details.
        raise ModelError(
            f"vLLM cannot serve this model with these options: {error}; engine.backend: native may", field="engine"
        ) from error
    return VLLMEngine(llm, config, model, stats)


_REAP_S = 5.0
"""Seconds to wait for the end of a killed process."""
_LEAST_LOGPROB = -9999.0
"""Log-probability of a token that a constraint forbids. OpenAI and vLLM's own server write it instead of minus
infinity, which JSON cannot express."""
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""vLLM's finish reasons that are passed on if `Sequence` has not finished by itself."""


class Stats(StatLoggerBase):  # type: ignore[misc]  # mypy does not see vLLM
    """Keeps the newest figures of vLLM's scheduler."""

    def __init__(self) -> None:
        self.num_waiting = self.num_preemptions = 0
        self.kv_cache_usage = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class VLLMEngine(EngineFrontend):
    """Serves vLLM's `AsyncLLM` to coroutines of one event loop.

    Each sample of a request is a separate vLLM request, with a task that passes its outputs to the caller's stream.
    vLLM gets as many as it can run; the others wait here, since its own queue is not fair to callers. One caller has at
    most `max_num_seqs` of them; the rest is for others, since vLLM does not preempt for them.
    """

    backend: Backend = "vllm"

    def __init__(self, llm: AsyncLLM, config: EngineConfig, model: ModelDescription, stats: Stats) -> None:
        # vLLM refuses to load with a KV cache smaller than the context, so any prompt within the context fits.
        input_processor = InputProcessor(model, config, num_slots=model.context_length)
        super().__init__(config, model, input_processor, GrammarCompiler(model, config))
        self.llm = llm
        self._stats = stats
        self._skips_prompts = model.config.num_key_value_layers < model.config.num_hidden_layers
        of_all, max_per_sender = max_running(config)
        self._turns = FairSemaphore(of_all, max_per_sender=max_per_sender)
        self._unfinished: set[Sequence] = set()
        self._unread: set[Sequence] = set()
        """Unfinished sequences that have no token yet."""
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        """Tasks of each request's samples, by request."""

    @property
    def state(self) -> EngineState:
        """State of the engine: requests as tracked here, other figures from vLLM's scheduler after its last step."""
        num_waiting = min(self._stats.num_waiting + self._turns.num_waiting, len(self._unread))
        tokens: Counter[Sender] = Counter()
        for sequence in self._unread:
            tokens[sequence.sender] += sequence.num_prompt_tokens
        return EngineState(
            num_running=len(self._unfinished) - num_waiting,
            num_waiting=num_waiting,
            waiting_tokens=tokens,
            num_preemptions=self._stats.num_preemptions,
            kv_cache_usage=self._stats.kv_cache_usage if self._unfinished else 0.0,
        )

    def validate(self, prompts: Several[Prompt], params: SamplingParams) -> None:
        """Raise `InvalidInputError` for requests that the native engine refuses, and for options that vLLM lacks."""
        self.check_health()
        check_params(params, skips_prompts=self._skips_prompts)
        super().validate(prompts, params)

    def check_health(self) -> None:
        """Raise `EngineDeadError` if vLLM's processes have ended or the engine was closed."""
        if self._failure is None and self.llm.errored:
            self._handle_failure(self.llm.dead_error)
        super().check_health()

    async def _start_request(self, admitted: AdmittedRequest) -> None:
        sender, request_id = admitted.sender, admitted.stream.request_id
        self._check_waiting_tokens(sender)
        salt = {"cache_salt": sender.tenant} if sender.tenant else {}
        prompt = TokensPrompt(prompt_token_ids=list(admitted.request.token_ids), **salt)
        sequences = self.input_processor.make_sequences(
            request_id, admitted.request, priority=admitted.priority, sender=sender, constraint=admitted.constraint
        )
        admitted.stream.start_delivery()
        tasks = self._tasks[request_id] = set()
        for sequence in sequences:
            self._unfinished.add(sequence)
            self._unread.add(sequence)
            task = asyncio.create_task(self._follow(sequence, prompt), name=f"vllm {request_id}/{sequence.index}")
            tasks.add(task)
            task.add_done_callback(partial(self._ended, sequence, tasks))

    def _abort_request(self, request_id: str) -> None:
        for task in self._tasks.get(request_id, ()):
            task.cancel()  # which also aborts vLLM's request

    async def _stop_engine(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        output_handler = self.llm.output_handler
        if output_handler is not None:  # otherwise it would report the end of vLLM's processes as a failure
            output_handler.cancel()
        await asyncio.gather(*tasks, *([] if output_handler is None else [output_handler]), return_exceptions=True)
        await asyncio.to_thread(_shut_down, self.llm)

    async def _follow(self, sequence: Sequence, prompt: TokensPrompt) -> None:
        """Pass vLLM's outputs of one sample to its stream until it ends or is aborted."""
        drawn = sequence.params.seed is None and self.config.seed is None  # vLLM is faster without seeds per request
        name = f"{sequence.request_id}/{sequence.index}"
        try:
            params = vllm_params(sequence, seed=None if drawn else sequence.seed)
            async with (
                self._turns.hold(sequence.sender, priority=sequence.priority),
                aclosing(self.llm.generate(prompt, params, name, priority=sequence.priority)) as outputs,
            ):
                async for output in outputs:
                    self._take(sequence, output)
                    if sequence.finish_reason is None and sequence.constraint is not None:
                        # vLLM computes grammars up to llguidance's larger limits, while all requests wait. Abort a
                        # request that exceeds our limits before that.
                        await asyncio.to_thread(sequence.constraint.compute_allowed_mask, sequence.output_token_ids)
                        if sequence.constraint.failure is not None:
                            self._put(sequence, StepResult())
                    if sequence.finish_reason is not None:
                        break  # such as at a stop string, which vLLM does not check
        except VLLMClientError as error:
            field = getattr(error, "parameter", None) or "prompt"
            self._put(sequence, StepResult(error=str(error), error_field=field))
        except VLLMDeadError as error:
            self._handle_failure(error)
        except Exception as error:
            get_logger().error("vllm_request_failed", request_id=sequence.request_id, exc_info=error)
            self._put(sequence, StepResult(error=f"vLLM could not answer: {error!r}"))

    def _take(self, sequence: Sequence, output: VLLMOutput) -> None:
        """Process a delta of vLLM's, which has several tokens if they were generated faster than read."""
        [completion] = output.outputs
        token_ids, logprobs = list(completion.token_ids), [_values(entry) for entry in completion.logprobs or ()]
        if not sequence.can_generate:
            token_ids, logprobs = [], []
        results = [StepResult(token_ids=[token], logprobs=logprobs[at : at + 1]) for at, token in enumerate(token_ids)]
        results = results or [StepResult()]
        if sequence in self._unread:
            self._unread.discard(sequence)
            num_cached_tokens, stats = output.num_cached_tokens or 0, output.metrics
            waited_s = None if stats is None else max(stats.scheduled_ts - stats.queued_ts, 0.0)
            sequence.start(num_cached_tokens=num_cached_tokens, waited_s=waited_s)
            results[0].prompt_logprobs = [_values(entry) for entry in (output.prompt_logprobs or ())[1:]]
            if self._skips_prompts:  # as if the prompt was read in one step, in which its last token is not skipped
                results[0].num_skipped_tokens = sequence.num_prompt_tokens - num_cached_tokens - 1
        *before, last = results
        for result in before:
            self._put(sequence, result)
            if sequence.finish_reason is not None:
                return
        self._put(sequence, last, ended=completion.finish_reason)

    def _put(self, sequence: Sequence, result: StepResult, *, ended: str | None = None) -> None:
        """Apply a result to the sequence, and deliver its output to the stream."""
        if sequence.status is SequenceStatus.WAITING:
            sequence.start(num_cached_tokens=0)
        sequence.apply_result(result)
        if sequence.finish_reason is None and sequence.constraint is not None and sequence.constraint.failure:
            sequence.apply_result(StepResult(error=sequence.constraint.failure, error_field=sequence.constraint.name))
        if sequence.finish_reason is None and ended is not None:
            sequence.finish(_REASONS.get(ended, "abort"))
        if sequence.finish_reason is not None:
            self._unfinished.discard(sequence)
        self._deliver_outputs([sequence.make_output()])

    def _ended(self, sequence: Sequence, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        """Clean up after a sample's task has ended or was cancelled before it began."""
        self._unfinished.discard(sequence)
        self._unread.discard(sequence)
        tasks.discard(task)
        if not tasks and self._tasks.get(sequence.request_id) is tasks:
            del self._tasks[sequence.request_id]


def _shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes and reap them, so that swaps leave no zombie processes."""
    manager = llm.engine_core.resources.engine_manager
    llm.shutdown()
    for process in () if manager is None else manager.processes:
        process.join(_REAP_S)


def _values(logprobs: Mapping[int, Any]) -> TokenLogprobs:
    return {token: max(float(entry.logprob), _LEAST_LOGPROB) for token, entry in logprobs.items()}


def _check_device(config: EngineConfig) -> None:
    """Raise `ModelError` for a device that the installed vLLM was not built for."""
    if config.device not in ("auto", current_platform.device_type):
        built_for = f", but the installed vLLM is built for {current_platform.device_type!r}"
        raise ModelError.for_field("engine.device", config.device, f"{built_for}; use 'auto', or backend native")
