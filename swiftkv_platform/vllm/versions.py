"""The vLLM versions that the plugin was tested with, and the interfaces that it needs in other versions. Imports vLLM
only to inspect an untested version."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from swiftkv_platform.errors import ModelError

TESTED_VERSIONS = ("0.32", "0.33")
"""Minor versions that the plugin was tested with, oldest first; 0.33 only on a GPU."""

_PLUGIN_MODULES = [f"swiftkv_platform.vllm.{name}" for name in ("causal_lm", "scheduler", "model_state")]
"""Modules that import, directly or indirectly, all names of vLLM that the plugin uses."""

_LAYERS, _SCHEDULER = "vllm.model_executor.layers", "vllm.v1.core.sched.scheduler:Scheduler"
_CONFIG_CHECKS_PATH = "vllm.model_executor.models.config:VerifyAndUpdateConfig"

CALLED_FUNCTIONS: Mapping[str, str] = {
    f"{_LAYERS}.attention:Attention.__init__": "self num_heads head_size scale num_kv_heads cache_config quant_config "
    "per_layer_sliding_window prefix kv_sharing_target_layer_name",
    f"{_LAYERS}.attention:Attention.get_attn_backend": "self",
    f"{_LAYERS}.attention.attention:unified_kv_cache_update": "key value layer_name",
    f"{_LAYERS}.rotary_embedding:get_rope": "head_size max_position rope_parameters",
    "vllm.compilation.backends:set_model_tag": "tag",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.Source": "model_or_path revision prefix",
    "vllm.model_executor.models.gemma3:Gemma3MLP.__init__": "self hidden_size intermediate_size hidden_activation "
    "quant_config prefix",
    "vllm.model_executor.models.llama:LlamaMLP.__init__": "self hidden_size intermediate_size hidden_act quant_config "
    "bias prefix",
    "vllm.model_executor.models.mixtral:MixtralMoE.__init__": "self num_experts top_k hidden_size intermediate_size "
    "quant_config prefix",
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeSparseMoeBlock.__init__": "self vllm_config prefix",
    "vllm.model_executor.models.utils:AutoWeightsLoader.load_weights": "self weights mapper",
    "vllm.model_executor.models.utils:WeightsMapper._map_name": "self key",
    f"{_CONFIG_CHECKS_PATH}.verify_and_update_config": "vllm_config",
    f"{_CONFIG_CHECKS_PATH}.verify_and_update_model_config": "model_config",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks": "self block_ids",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": "self request",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": "self request_id",
    f"{_SCHEDULER}._free_request_blocks": "self request",
    f"{_SCHEDULER}._update_request_as_session": "self session update",
    f"{_SCHEDULER}._update_waiting_for_remote_kv": "self request",
    f"{_SCHEDULER}.add_request": "self request",
    "vllm.v1.request:Request.update_block_hashes": "self",
    "vllm.v1.sample.logits_processor:LogitsProcessor.update_state": "self batch_update",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata "
    "fast_build",
    "vllm.v1.attention.backend:CommonAttentionMetadata.__init__": "self query_start_loc query_start_loc_cpu seq_lens "
    "num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal "
    "seq_lens_cpu_upper_bound is_prefilling",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.add_request": "self req_index new_req_data",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn": "self input_batch cudagraph_mode "
    "block_tables slot_mappings attn_groups kv_cache_config",
    "vllm.v1.sample.logits_processor.builtin:process_dict_updates": "req_entries batch_update new_state",
}
"""Functions that the plugin calls or overrides, with their arguments. All must exist, and no other may be required."""

READ_CONFIG_FIELDS: Mapping[str, str] = {
    "vllm.config:CacheConfig": "kv_sharing_fast_prefill",
    "vllm.config:SchedulerConfig": "scheduler_cls async_scheduling max_num_batched_tokens",
    "vllm.config:CompilationConfig": "cudagraph_capture_sizes cudagraph_mode splitting_ops static_forward_context",
    "vllm.config:SpeculativeConfig": "method num_speculative_tokens",
    "vllm.forward_context:ForwardContext": "attn_metadata batch_descriptor slot_mapping",
    "vllm.forward_context:BatchDescriptor": "num_tokens",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "idx_mapping_np",
}

USED_IN_SOURCE: Mapping[str, str] = {
    "vllm.v1.request:Request.__init__": "_block_hasher block_hashes num_prompt_tokens",
    f"{_SCHEDULER}.__init__": "hash_block_size kv_cache_config kv_cache_manager requests",
    f"{_SCHEDULER}": "_free_request_blocks _update_waiting_for_remote_kv",
    "vllm.v1.worker.gpu.attn_utils:build_attn_metadata": "is_prefilling seq_lens_cpu_upper_bound",
    "vllm.v1.worker.gpu.attn_utils:init_attn_backend": "get_attn_backend",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn": "is_prefilling",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "get_attn_backend is_prefilling seq_lens_cpu_upper_bound",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader": "secondary_weights",
}
"""Attributes that the plugin reads or sets, by the code that assigns or reads them; and methods that it overrides, by
the code that calls them. Without the call the plugin's text would be wrong without an error."""


def is_tested(version: str) -> bool:
    """Whether the plugin was tested with this minor version. Raises `ModelError` for an older one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return False
    oldest = tuple(map(int, TESTED_VERSIONS[0].split(".")))
    if tuple(map(int, match.groups())) < oldest:
        raise ModelError(
            f"vLLM {version} is older than this plugin supports: SwiftKV models are served by vLLM "
            f"{TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}, or by the native engine (`swiftkv serve`)",
            field="vllm.version",
            value=version,
        )
    return match[0] in TESTED_VERSIONS


@lru_cache
def check_version(version: str) -> None:
    """Accept a tested version, or with a warning a newer one with unchanged interfaces. Raises `ModelError` for
    others."""
    if is_tested(version):
        return
    changed = list(_find_interface_changes())
    if changed:
        raise make_untested_error(version, changed)
    logging.getLogger("vllm.swiftkv").warning(
        "The SwiftKV plugin has not been tested with vLLM %s, only with %s. The names and arguments that it uses of "
        "vLLM are unchanged; compare some answers with those of a tested version.",
        version,
        ", ".join(TESTED_VERSIONS),
    )


def make_untested_error(version: str, changed: list[str]) -> ModelError:
    """Return the error for an untested version. `changed`: clauses that describe its differences."""
    return ModelError(
        f"this plugin has not been tested with vLLM {version}, and there {'; '.join(changed)}. Use vLLM "
        f"{TESTED_VERSIONS[-1]}, a newer version of this project, or the native engine (`swiftkv serve`)",
        field="vllm.version",
        value=version,
    )


def _find_interface_changes() -> Iterator[str]:
    """Yield a clause for each used name that the installed vLLM lacks or has changed."""
    for module in _PLUGIN_MODULES:
        try:
            importlib.import_module(module)
        except (ImportError, AttributeError, TypeError) as error:
            yield f"{module} cannot be imported ({error})"
    tables = (
        (CALLED_FUNCTIONS, _compare_arguments),
        (READ_CONFIG_FIELDS, _compare_fields),
        (USED_IN_SOURCE, _compare_source),
    )
    for table, compare in tables:
        for name, expected in table.items():
            module, _, path = name.partition(":")
            try:
                found: Any = importlib.import_module(module)
                for part in path.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                yield f"{module}.{path} no longer exists"
                continue
            if differences := compare(found, expected.split()):
                yield f"{module}.{path} {differences}"


def _compare_arguments(function: Any, given: list[str]) -> str:
    parameters = inspect.signature(function).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    gone = [name for name in given if name not in parameters]
    new = [name for name in required if name not in given]
    return " and ".join(
        f"{verb} {', '.join(names)}" for verb, names in (("no longer takes", gone), ("now requires", new)) if names
    )


def _compare_fields(kind: Any, expected: list[str]) -> str:
    present = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})} | set(
        getattr(kind, "_fields", ())
    )
    gone = [name for name in expected if name not in present]
    return f"has no {', '.join(gone)}" if gone else ""


def _compare_source(code: Any, expected: list[str]) -> str:
    source = inspect.getsource(code)
    gone = [name for name in expected if re.search(rf"\b{name}\b", source) is None]
    return f"no longer uses {', '.join(gone)}" if gone else ""
