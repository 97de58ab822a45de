"""Checks of vLLM's configuration for a SwiftKV model: refuse unsupported options, choose scheduler and processors.

vLLM finds the class by architecture in `MODELS_CONFIG_MAP`, before it reads weights or chooses a model runner.
"""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.config import CompilationConfig, CUDAGraphMode, KVTransferConfig, ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import find_family
from swiftkv_platform.vllm.quantized import ACCEPTED_METHODS, is_accepted_quantization
from swiftkv_platform.vllm.versions import check_version

_REQUEST_CHECKS = "swiftkv_platform.vllm.requests"
_PROMPT_LENGTHS_PATH = "swiftkv_platform.vllm.deep_tokens:PromptLengths"
_SCHEDULER_PATH = "swiftkv_platform.vllm.scheduler.make_scheduler"
_SUPPORTED_CONNECTORS = ("ExampleConnector", "NixlConnector")
_BIDIRECTIONAL = "bidirectional_kv_xfer"
"""Option of NIXL by which instances that decode also send their caches back to instances that prefill."""
_NATIVE_ENGINE = "SwiftKV's native engine (`swiftkv serve`)"


class SwiftKVChecks(VerifyAndUpdateConfig):
    """vLLM's hooks for the configuration of a model, for all families."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        check_version(vllm.__version__)
        config: Any = model_config.hf_config
        family = find_family({"model_type": config.model_type})
        if family.vllm_obstacle:
            raise _make_error(
                f"{config.model_type} is not served by vLLM: {family.vllm_obstacle}", "model_type", family.model_type
            )
        if model_config.runner_type == "draft":
            raise _make_error(
                "a SwiftKV student cannot be a draft model, since vLLM configures it like the target model; use a "
                "dense model with the same tokens",
                "speculative_config.model",
                model_config.model,
            )
        if model_config.runner_type != "generate":
            raise _make_error(
                "hidden states of skipped tokens do not exist; use runner=generate", "runner", model_config.runner_type
            )
        heads = config.num_key_value_heads_swiftkv
        if config.swiftkv and heads not in (None, config.num_key_value_heads):
            raise ModelError.for_field(
                "num_key_value_heads_swiftkv",
                heads,
                ", but in vLLM, layers that share a KV cache must have the model's "
                f"{config.num_key_value_heads} key-value heads; {_NATIVE_ENGINE} serves this student",
            )
        if not config.swiftkv and not config.swiftkv_teacher_weights:
            raise _make_error(
                "teacher mode needs the teacher's projections, which this checkpoint was exported without",
                "hf_overrides.swiftkv",
                False,
            )

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuse options that conflict with skipped tokens or a shared KV cache, and set the plugin's scheduler and
        processors. Raises `ModelError`."""
        _check_parallelism(vllm_config)
        _check_features(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        is_prefill_only = config.swiftkv and config.swiftkv_prefill_only
        skips = config.swiftkv and config.num_key_value_layers < config.num_hidden_layers and not is_prefill_only
        vllm_config.cache_config.kv_sharing_fast_prefill = skips  # so that vLLM refuses prompt log-probabilities
        if skips:
            _check_skipping(vllm_config)
        if is_prefill_only:
            _check_prefill_only(vllm_config)
            name = "V2OneTokenCheck" if vllm_config.use_v2_model_runner else "OneTokenCheck"
            _add_logits_processor(vllm_config, f"{_REQUEST_CHECKS}:{name}")
        elif skips:
            if config.layer_map.deep_leaders:
                _configure_own_deep_kv(vllm_config)
            _add_prompt_lengths(vllm_config)


def _check_prefill_only(vllm_config: VllmConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_producer:
        raise _make_error(
            "swiftkv_prefill_only is true: this model only fills KV caches for another server. Set "
            "kv_transfer_config with a kv_role of kv_producer or kv_both, or serve the whole student",
            "kv_transfer_config",
            None if transfer is None else transfer.kv_role,
        )
    if vllm_config.speculative_config is not None:
        raise _make_error(
            "a prefill-only server cannot draft; leave speculative_config out", "speculative_config", "set"
        )


def _configure_own_deep_kv(vllm_config: VllmConfig) -> None:
    """Set this project's scheduler, for deep tokens with their own K and V. Raises `ModelError` for options that
    conflict with them."""
    speculative, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if speculative is not None and not vllm_config.use_v2_model_runner:
        raise _make_error(
            "swiftkv_decode_key_value is 'own', and with drafts vLLM's model runner V1 does not report where prompts "
            "end; use runner V2 (the default on a GPU), leave speculative_config out, or use num_lookup_tokens "
            f"in {_NATIVE_ENGINE}",
            "speculative_config.method",
            speculative.method,
        )
    if scheduler.scheduler_cls is not None:
        raise _make_error(
            "swiftkv_decode_key_value is 'own', which needs this plugin's scheduler; leave scheduler_cls out",
            "scheduler_cls",
            scheduler.scheduler_cls,
        )
    if vllm_config.model_config.enable_prompt_embeds:
        raise _make_error(
            "swiftkv_decode_key_value is 'own', and vLLM does not report the length of prompts that are embeddings; "
            "leave enable_prompt_embeds off",
            "enable_prompt_embeds",
            True,
        )
    scheduler.scheduler_cls = _SCHEDULER_PATH


def refuse_full_graphs_of_prompts(compilation: CompilationConfig) -> None:
    """Raise `ModelError` for full CUDA graphs of batches with prompts, in which no tokens can be skipped."""
    mode = compilation.cudagraph_mode
    if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
        raise _make_error(
            f"cudagraph_mode is {mode.name}, but a SwiftKV model can use full graphs only for decode steps; use "
            "FULL_AND_PIECEWISE, or leave it out",
            "compilation_config.cudagraph_mode",
            mode.name,
        )


def _add_logits_processor(vllm_config: VllmConfig, name: str) -> None:
    config = vllm_config.model_config
    config.logits_processors = [*(config.logits_processors or ()), name]


def _add_prompt_lengths(vllm_config: VllmConfig) -> None:
    """Add the check that refuses prompt log-probabilities, which in runner V1 also passes the prompts' lengths to the
    model; in V2 `StudentModelState` does.

    vLLM has no logits processors with speculative decoding. There its server refuses such requests; an offline engine
    hits an assertion (V1) or returns NaN (V2).
    """
    if vllm_config.speculative_config is None:
        is_second = vllm_config.use_v2_model_runner
        name = f"{_REQUEST_CHECKS}:V2PromptLogprobsCheck" if is_second else _PROMPT_LENGTHS_PATH
        _add_logits_processor(vllm_config, name)


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for option in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (value := getattr(parallel, option)) != 1:
            raise ModelError.for_field(option, value, "; SwiftKV models need 1; use tensor_parallel_size instead")
    if parallel.enable_dbo:
        raise _make_error("dual batch overlap is not supported with skipped tokens; leave it off", "enable_dbo", True)


def _check_skipping(vllm_config: VllmConfig) -> None:
    """Raise `ModelError` for settings under which a forward pass that drops skipped tokens before layer l writes wrong
    text or hangs."""
    _check_breakable_graphs()
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if model.is_moe and parallel.data_parallel_size > 1:
        raise ModelError.for_field(
            "data_parallel_size",
            parallel.data_parallel_size,
            ", but the ranks of a model with experts exchange batches of equal size, and layers >= l of a SwiftKV "
            "model have fewer tokens; use 1 and more replicas, or tensor_parallel_size",
        )
    if vllm_config.aux_output_config.enable_return_routed_experts:
        raise _make_error(
            "skipped tokens have no experts in layers >= l; leave enable_return_routed_experts off",
            "enable_return_routed_experts",
            True,
        )
    backend = vllm_config.attention_config.backend
    if vllm_config.speculative_config is not None and backend is not None and backend.name == "FLASHINFER":
        raise _make_error(
            "FlashInfer with drafts is untested with skipped tokens; use attention_backend FLASH_ATTN",
            "attention_backend",
            backend.name,
        )


def _check_breakable_graphs() -> None:
    """Raise `ModelError` if vLLM captures forward passes in breakable CUDA graphs, which `VLLM_BATCH_INVARIANT` turns
    on. The capture freezes the decision that all tokens run layers >= l, so a replay would attend wrongly."""
    names = "VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"
    breakable, invariant = (os.environ.get(name) for name in names)
    name = names[0] if breakable is not None else names[1]
    if breakable == "1" or (breakable is None and invariant not in (None, "", "0")):
        raise _make_error(
            f"{name}=1 captures whole forward passes in CUDA graphs, in which a SwiftKV model cannot skip tokens; set "
            "VLLM_USE_BREAKABLE_CUDAGRAPH=0",
            name,
            "1",
        )


def _check_features(vllm_config: VllmConfig) -> None:
    if vllm_config.lora_config is not None:
        raise _make_error(
            "LoRA adapters need a model's own q, k and v projections, which layers >= l of a student lack; leave "
            "enable_lora off",
            "enable_lora",
            True,
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in _SUPPORTED_CONNECTORS:
        raise _make_error(
            f"the KV connector {transfer.kv_connector} is untested with KV caches that layers share; "
            f"{', '.join(_SUPPORTED_CONNECTORS)} is accepted",
            "kv_transfer_config.kv_connector",
            transfer.kv_connector,
        )
    config: Any = vllm_config.model_config.hf_config
    if transfer is not None and config.swiftkv and config.layer_map.deep_leaders:
        _check_connector_of_own_kv(transfer, config.layer_map.deep_tail)
    _check_drafts(vllm_config)
    quantization = vllm_config.model_config.quantization
    if quantization is not None and not is_accepted_quantization(quantization):
        raise _make_error(
            f"weights quantized with {quantization} are untested; {', '.join(ACCEPTED_METHODS)} or none is accepted",
            "quantization",
            quantization,
        )


def _check_connector_of_own_kv(transfer: KVTransferConfig, deep_tail: int) -> None:
    """Raise `ModelError` if a KV connector may give a prompt the K and V of tokens that are deep in another one."""
    if deep_tail > 1 and transfer.kv_connector == "ExampleConnector":
        raise ModelError.for_field(
            "swiftkv_deep_tail",
            deep_tail,
            ", but ExampleConnector may reuse the KV cache of a longer prompt, in which other tokens ran all layers; "
            "use NixlConnector",
        )
    if transfer.get_from_extra_config(_BIDIRECTIONAL, False):
        raise _make_error(
            "swiftkv_decode_key_value is 'own', so generated tokens have other K and V than the same tokens in the "
            f"next prompt of the chat, and {_BIDIRECTIONAL} would reuse them; leave {_BIDIRECTIONAL} out",
            f"kv_transfer_config.kv_connector_extra_config.{_BIDIRECTIONAL}",
            True,
        )


_DRAFTERS = ("ngram", "suffix")
"""Methods of speculative decoding without a second model."""


def _check_drafts(vllm_config: VllmConfig) -> None:
    speculative: Any = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTERS:
        raise _make_error(
            f"the {speculative.method} method drafts from hidden states, which skipped tokens do not have, or with a "
            f"second model, which vLLM does not combine with layers that share a cache; use {' or '.join(_DRAFTERS)}, "
            f"or lossless early exit in {_NATIVE_ENGINE}",
            "speculative_config.method",
            speculative.method,
        )


def _make_error(message: str, field: str, value: Any) -> ModelError:
    return ModelError(message, field=field, value=value)
