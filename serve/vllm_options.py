"""Convert this project's engine options and sampling parameters to vLLM's. Runs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm import SamplingParams as VLLMParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from swiftkv_platform.engine import EngineConfig, SamplingParams, StructuredOutputs
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import MAX_LOGPROBS
from swiftkv_platform.specs.structured_outputs import WHITESPACE
from swiftkv_platform.vllm.registration import announce_frontend

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
    if params.early_exit.mode != "off":
        mode = params.early_exit.mode
        raise InvalidInputError(f"early_exit is {mode!r}; {_NATIVE}: 'off' is accepted", field="early_exit", value=mode)
    if params.num_lookup_tokens:
        raise InvalidInputError(
            f"num_lookup_tokens is {params.num_lookup_tokens}; {_NATIVE}: 0 is accepted",
            field="num_lookup_tokens",
            value=params.num_lookup_tokens,
        )
    if skips_prompts and params.prompt_logprobs is not None:
        raise InvalidInputError(
            f"prompt_logprobs is {params.prompt_logprobs}; for a SwiftKV model {_NATIVE}: leave it out, or serve the "
            "teacher with engine.swiftkv: false",
            field="prompt_logprobs",
            value=params.prompt_logprobs,
        )


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
