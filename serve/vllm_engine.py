"""vLLM as the engine of a replica; this project's plugin runs SwiftKV models. Knows no HTTP.

vLLM schedules, computes and samples tokens in its own processes. As for the native engine, `EngineFrontend` validates
and admits requests, and `Sequence` tracks outputs token by token, so that text, stop strings, finish reasons and
log-probabilities are the same from both engines.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
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
from swiftkv_platform.sources.model_directories import TOKENIZER_VIEW, create_model_view
from swiftkv_platform.specs.base import MAX_LOGPROBS
from swiftkv_platform.specs.engine import Backend
from swiftkv_platform.specs.structured_outputs import WHITESPACE
from swiftkv_platform.vllm import export_frontend_pid
from swiftkv_platform.web.limiters import Sender

_VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # replicas send no usage statistics
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound replicas of a machine would share the same cores
}
_SHARED_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logprobs", "prompt_logprobs"),
)
_MAX_SEQS_PER_RESERVED_SLOT = 8
"""Sequences of one caller per slot that is reserved for other callers."""
_NATIVE_ONLY = "only engine.backend: native supports it, and this deployment runs vllm"


def set_vllm_environment(config: EngineConfig) -> None:
    """Set the environment variables of vLLM's processes. Keeps the operator's values, except `OMP_NUM_THREADS` if
    `num_threads` is given."""
    export_frontend_pid()
    for name, value in _VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)


def get_max_running_seqs(config: EngineConfig) -> tuple[int, int]:
    """Return (max running sequences of all callers, max of one caller). The rest is reserved for other callers, since
    vLLM does not preempt for them."""
    desired = config.max_num_seqs + max(config.max_num_seqs // _MAX_SEQS_PER_RESERVED_SLOT, 1)
    total = min(desired, config.max_num_batched_tokens)  # a step has at least one token per running sequence
    return total, min(config.max_num_seqs, max(total - 1, 1))


def make_engine_args(directory: Path, config: EngineConfig, model: ModelDescription) -> dict[str, Any]:
    """Return keyword arguments of `AsyncEngineArgs` for a view of a model; missing arguments keep vLLM's defaults."""
    args: dict[str, Any] = {
        "model": str(directory),
        "dtype": _select_dtype(config, model),
        "max_model_len": model.context_length,
        "max_num_seqs": get_max_running_seqs(config)[0],
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_parallel_size,
        "skip_tokenizer_init": model.tokenizer is None,
        "scheduling_policy": "priority",
        "max_logprobs": MAX_LOGPROBS,
        "generation_config": "vllm",  # no defaults from the model, since requests have all parameters
        "structured_outputs_config": {"backend": "guidance"},  # as in the native engine
        "disable_log_stats": True,
    }
    if (directory / TOKENIZER_VIEW).is_dir():
        args["tokenizer"] = str(directory / TOKENIZER_VIEW)
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


def validate_vllm_params(params: SamplingParams, *, skips_prompts: bool) -> None:
    """Raise `InvalidInputError` for parameters that vLLM does not support. `skips_prompts`: whether the model is a
    student, most of whose prompt tokens have no logits."""
    params.require_no_early_exit(f"; {_NATIVE_ONLY}: 'off' is accepted")
    if params.num_lookup_tokens:
        raise InvalidInputError.for_field(
            "num_lookup_tokens", params.num_lookup_tokens, f"; {_NATIVE_ONLY}: 0 is accepted"
        )
    if skips_prompts and params.prompt_logprobs is not None:
        why = f"; for a SwiftKV model {_NATIVE_ONLY}: leave it out, or serve the teacher with engine.swiftkv: false"
        raise InvalidInputError.for_field("prompt_logprobs", params.prompt_logprobs, why)


def make_vllm_params(sequence: Sequence, *, seed: int | None, unknown: Mapping[int, float]) -> VLLMParams:
    """Return vLLM's parameters for one sample. `Sequence` handles text, stop strings and end of sequence, so that both
    engines finish alike. `unknown`: biases against ids without a token."""
    params = sequence.params
    return VLLMParams(
        max_tokens=max(sequence.max_output_tokens, 1),  # vLLM always generates a token; `_process_output` drops it
        min_tokens=min(params.min_tokens, sequence.max_output_tokens),
        **{name: getattr(params, name) for name in _SHARED_PARAMS},
        logit_bias={**params.logit_bias, **unknown} or None,
        seed=seed,
        stop_token_ids=sorted(sequence.stop_token_ids),
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        ignore_eos=True,  # `stop_token_ids` contains them
        structured_outputs=None
        if params.structured_outputs is None
        else _convert_constraint(params.structured_outputs),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _select_dtype(config: EngineConfig, model: ModelDescription) -> str:
    """Return the dtype of the weights; for `auto` the checkpoint's, since vLLM's `auto` converts float32 to
    bfloat16."""
    if config.dtype != "auto":
        return config.dtype
    dtype = getattr(model.config, "dtype", None)
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _convert_constraint(constraint: StructuredOutputs) -> StructuredOutputsParams:
    """Return the constraint in vLLM's form, with the same meaning as in `GrammarCompiler`."""
    if constraint.kind in ("json", "json_object"):
        whitespace: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        if constraint.disable_any_whitespace:
            whitespace = {"whitespace_flexible": False}
        schema: dict[str, Any] = json.loads(constraint.text)
        return StructuredOutputsParams(json={**schema, "x-guidance": schema.get("x-guidance", {}) | whitespace})
    if constraint.kind == "regex":
        return StructuredOutputsParams(regex=constraint.text)
    if constraint.kind == "choice":
        return StructuredOutputsParams(choice=list(constraint.choice or ()))
    # vLLM takes a grammar for GBNF if no line begins with `%llguidance` or `start:`.
    header = "" if constraint.text.lstrip().startswith("%llguidance") else "%llguidance {}\n"
    return StructuredOutputsParams(grammar=header + constraint.text)


def load_vllm(directory: Path, config: EngineConfig, **overrides: Any) -> VLLMEngine:
    """Start vLLM with a model directory. Blocks until its processes are ready. `overrides`: of `AsyncEngineArgs`.
    Raises `ModelError` for a model or an option that vLLM or the plugin does not support."""
    model = describe_model(directory, config)
    view = create_model_view(directory, Settings().home / "views")  # only checked files, for vLLM's processes
    _require_device(config)
    set_vllm_environment(config)
    stats = SchedulerStats()
    try:
        args = AsyncEngineArgs(**make_engine_args(view, config, model) | overrides)
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: stats])
    except (ValueError, RuntimeError) as error:
        # RuntimeError: one of vLLM's processes failed; its log has the details.
        raise ModelError(
            f"vLLM does not support this model with these options: {error}. Try engine.backend: native", field="engine"
        ) from error
    return VLLMEngine(llm, config, model, stats)


_FORBIDDING_BIAS = -100.0
"""Logit bias that forbids a token, the least that vLLM accepts."""
_REAP_TIMEOUT_S = 5.0
"""Max seconds to wait for the end of a killed process."""
_MIN_LOGPROB = -9999.0
"""Log-probability of a token that a constraint forbids, as in OpenAI's API and vLLM's server, since JSON has no minus
infinity."""
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""Finish reasons by vLLM's, for a `Sequence` that has not finished by itself."""


class SchedulerStats(StatLoggerBase):  # type: ignore[misc]  # mypy does not see vLLM
    """Keeps the last metrics of vLLM's scheduler."""

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
    """Runs requests on vLLM's `AsyncLLM`, for coroutines of one event loop.

    Each sample is a separate vLLM request, with a task that passes its outputs to the caller's stream. vLLM gets as
    many as it can run; the others wait here, since vLLM's queue is not fair to callers. One caller has at most
    `max_num_seqs` running sequences; the rest is reserved for others, since vLLM does not preempt.
    """

    backend: Backend = "vllm"

    def __init__(self, llm: AsyncLLM, config: EngineConfig, model: ModelDescription, stats: SchedulerStats) -> None:
        # vLLM requires a KV cache of at least the context, so all prompts within the context fit.
        input_processor = InputProcessor(model, config, num_slots=model.context_length)
        super().__init__(config, model, input_processor, GrammarCompiler(model, config))
        self.llm = llm
        self._stats = stats
        unknown = range(model.num_token_ids, model.config.get_text_config().vocab_size)
        self._unknown_token_biases = dict.fromkeys(unknown, _FORBIDDING_BIAS)
        self._skips_prompts = model.config.num_key_value_layers < model.config.num_hidden_layers
        total, per_caller = get_max_running_seqs(config)
        self._turns = FairSemaphore(total, max_per_sender=per_caller)
        self._unfinished: set[Sequence] = set()
        self._waiting_for_first_token: set[Sequence] = set()
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    @property
    def state(self) -> EngineState:
        """State of the engine: requests as tracked here, other metrics from vLLM's scheduler after its last step."""
        num_waiting = min(self._stats.num_waiting + self._turns.num_waiting, len(self._waiting_for_first_token))
        tokens: Counter[Sender] = Counter()
        for sequence in self._waiting_for_first_token:
            tokens[sequence.sender] += sequence.num_prompt_tokens
        return EngineState(
            num_running=len(self._unfinished) - num_waiting,
            num_waiting=num_waiting,
            waiting_tokens=tokens,
            num_preemptions=self._stats.num_preemptions,
            kv_cache_usage=self._stats.kv_cache_usage if self._unfinished else 0.0,
        )

    def validate(self, prompts: AbstractSequence[Prompt], params: SamplingParams) -> None:
        """Raise `InvalidInputError` for requests that the native engine refuses, and for options that vLLM lacks."""
        super().validate(prompts, params)  # first, so that one mistake has the same error on both engines
        validate_vllm_params(params, skips_prompts=self._skips_prompts)

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
            self._waiting_for_first_token.add(sequence)
            task = asyncio.create_task(self._run_sequence(sequence, prompt), name=f"vllm {request_id}/{sequence.index}")
            tasks.add(task)
            task.add_done_callback(partial(self._clean_up, sequence, tasks))

    def _abort_request(self, request_id: str) -> None:
        for task in self._tasks.get(request_id, ()):
            task.cancel()  # which also aborts vLLM's request

    async def _stop_engine(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        output_handler = self.llm.output_handler
        if output_handler is not None:  # it would report the end of vLLM's processes as a failure
            output_handler.cancel()
        await asyncio.gather(*tasks, *([] if output_handler is None else [output_handler]), return_exceptions=True)
        await asyncio.to_thread(_shut_down, self.llm)

    async def _run_sequence(self, sequence: Sequence, prompt: TokensPrompt) -> None:
        """Pass vLLM's outputs of one sample to its stream until it ends or is aborted."""
        is_unseeded = sequence.params.seed is None and self.config.seed is None  # vLLM is faster without seeds
        name = f"{sequence.request_id}/{sequence.index}"
        try:
            seed = None if is_unseeded else sequence.seed
            params = make_vllm_params(sequence, seed=seed, unknown=self._unknown_token_biases)
            async with (
                self._turns.hold_slot(sequence.sender, priority=sequence.priority),
                aclosing(self.llm.generate(prompt, params, name, priority=sequence.priority)) as outputs,
            ):
                async for output in outputs:
                    self._process_output(sequence, output)
                    if sequence.finish_reason is None and sequence.constraint is not None:
                        # vLLM computes grammars up to llguidance's larger limits, while all requests wait. So abort
                        # requests above our limits.
                        await asyncio.to_thread(sequence.constraint.compute_allowed_mask, sequence.output_token_ids)
                        if sequence.constraint.failure is not None:
                            self._apply_result(sequence, StepResult())
                    if sequence.finish_reason is not None:
                        break  # for example at a stop string, which vLLM does not check
        except VLLMClientError as error:
            constraint = sequence.constraint
            field = getattr(error, "parameter", None) or ("prompt" if constraint is None else constraint.name)
            self._apply_result(sequence, StepResult(error=f"vLLM refuses the request: {error}", error_field=field))
        except VLLMDeadError as error:
            self._handle_failure(error)
        except Exception as error:
            get_logger().error("vllm_request_failed", request_id=sequence.request_id, exc_info=error)
            self._apply_result(sequence, StepResult(error=f"vLLM failed: {error!r}"))

    def _process_output(self, sequence: Sequence, output: VLLMOutput) -> None:
        """Process a delta of vLLM, which has several tokens if they were generated faster than read."""
        # 1. split the delta into a result per token
        [completion] = output.outputs
        token_ids, logprobs = list(completion.token_ids), [_to_logprobs(entry) for entry in completion.logprobs or ()]
        if not sequence.can_generate:
            token_ids, logprobs = [], []
        results = [StepResult(token_ids=[token], logprobs=logprobs[i : i + 1]) for i, token in enumerate(token_ids)]
        results = results or [StepResult()]
        # 2. start the sequence at its first output
        if sequence in self._waiting_for_first_token:
            self._waiting_for_first_token.discard(sequence)
            num_cached_tokens, stats = output.num_cached_tokens or 0, output.metrics
            waited_s = None if stats is None else max(stats.scheduled_ts - stats.queued_ts, 0.0)
            sequence.start(num_cached_tokens=num_cached_tokens, waited_s=waited_s)
            results[0].prompt_logprobs = [_to_logprobs(entry) for entry in (output.prompt_logprobs or ())[1:]]
            if self._skips_prompts:  # as after one prefill step, which does not skip the last token
                results[0].num_skipped_tokens = sequence.num_prompt_tokens - num_cached_tokens - 1
        # 3. apply the results
        *earlier, last = results
        for result in earlier:
            self._apply_result(sequence, result)
            if sequence.finish_reason is not None:
                return
        self._apply_result(sequence, last, finish_reason=completion.finish_reason)

    def _apply_result(self, sequence: Sequence, result: StepResult, *, finish_reason: str | None = None) -> None:
        """Apply a result to the sequence, and put its output into the stream."""
        if sequence.status is SequenceStatus.WAITING:
            sequence.start(num_cached_tokens=0)
        sequence.apply_result(result)
        if sequence.finish_reason is None and sequence.constraint is not None and sequence.constraint.failure:
            sequence.apply_result(StepResult(error=sequence.constraint.failure, error_field=sequence.constraint.name))
        if sequence.finish_reason is None and finish_reason is not None:
            if (reason := _FINISH_REASONS.get(finish_reason)) is not None:
                sequence.finish(reason)
            else:
                sequence.apply_result(StepResult(error=f"vLLM ended the request with {finish_reason!r}"))
        if sequence.finish_reason is not None:
            self._unfinished.discard(sequence)
        self._deliver_outputs([sequence.make_output()])

    def _clean_up(self, sequence: Sequence, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        """Remove a sample when its task has ended, even if the task was canceled before its start."""
        self._unfinished.discard(sequence)
        self._waiting_for_first_token.discard(sequence)
        tasks.discard(task)
        if not tasks and self._tasks.get(sequence.request_id) is tasks:
            del self._tasks[sequence.request_id]


def _shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes and reap them, so that swaps leave no zombie processes."""
    manager = llm.engine_core.resources.engine_manager
    llm.shutdown()
    for process in () if manager is None else manager.processes:
        process.join(_REAP_TIMEOUT_S)


def _to_logprobs(logprobs: Mapping[int, Any]) -> TokenLogprobs:
    return {token: max(float(entry.logprob), _MIN_LOGPROB) for token, entry in logprobs.items()}


def _require_device(config: EngineConfig) -> None:
    """Raise `ModelError` for a device that the installed vLLM does not support."""
    if config.device not in ("auto", current_platform.device_type):
        built_for = f", but the installed vLLM is built for {current_platform.device_type!r}"
        raise ModelError.for_field("engine.device", config.device, f"{built_for}; use 'auto', or engine.backend native")
