"""Quantized weights: names of projections for vLLM's quantization configuration.

A `quantization_config` has the checkpoint's names of projections. So each layer is created with its checkpoint name, or
with a name of `set_fused_parts` if it fuses several; vLLM's own names are used only for loading tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from transformers.quantizers.quantizers_utils import should_convert_module
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.student_shape import LayerMap

ACCEPTED_METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq")
"""Accepted quantization methods; vLLM's variants of them (`auto_awq`, `fp8_per_block`, ...) are accepted too."""
QKV, GATE_UP = "qkv_proj", "gate_up_proj"
DECODE_QKV_NAME = "qkv_proj_decode_swiftkv"
"""Fused projection of a leader whose deep tokens keep their own K and V."""
GROUP_KV_NAME = "kv_proj_swiftkv"
"""Fused projection of all groups; in names it replaces a layer's number."""
OPTIONAL_PARAMETERS = {"g_idx", "weight_g_idx", "weight_shape", "input_scale_ub"}
_IGNORE_FIELDS = ("ignored_layers", "ignore_list")
"""Fields of vLLM's configurations with whole names; those of transformers match parts of names."""


def is_accepted_quantization(method: str) -> bool:
    plain = method.removeprefix("auto_").removesuffix("_marlin")
    return plain in ACCEPTED_METHODS or plain.startswith("fp8_")


def set_fused_parts(quant_config: QuantizationConfig, layer_map: LayerMap) -> None:
    """Add the parts of fused projections to a configuration, and the whole names of unquantized projections."""
    quant_config.packed_modules_mapping = {
        QKV: ["q_proj", "k_proj", "v_proj"],
        GATE_UP: ["gate_proj", "up_proj"],
        DECODE_QKV_NAME: ["q_proj_swiftkv", "k_proj_decode_swiftkv", "v_proj_decode_swiftkv"],
        GROUP_KV_NAME: [f"{leader}.self_attn.{part}_proj_swiftkv" for part in "kv" for leader in layer_map.leaders],
    }
    for field in _IGNORE_FIELDS:
        if listed := getattr(quant_config, field, None):
            setattr(quant_config, field, [*listed, *_list_unquantized(listed, layer_map.num_hidden_layers)])


def check_scale_blocks(projection: Any) -> None:
    """Raise `ModelError` if a part of a fused projection begins inside a block with one scale."""
    block, sizes = getattr(projection, "weight_block_size", None), projection.output_partition_sizes
    if block and any(size % block[0] for size in sizes):
        raise ModelError(
            f"a rank has {sizes[0]} rows of each k_proj_swiftkv and v_proj_swiftkv, but their FP8 scales cover blocks "
            f"of {block[0]} rows; use a tensor_parallel_size that gives whole blocks, or one scale per row",
            field="tensor_parallel_size",
            value=projection.tp_size,
        )


def _list_unquantized(listed: Iterable[str], num_layers: int) -> Iterator[str]:
    """Return the whole names of the projections that `listed`, parts of names, matches in transformers."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    parts: list[str] = [f"self_attn.{name}{suffix}" for name in attention for suffix in ("", "_swiftkv")]
    parts += [f"self_attn.{part}_proj_decode_swiftkv" for part in "kv"]
    parts += [f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj", "gate", "experts")]
    parts += [f"block_sparse_moe.{part}" for part in ("gate", "experts")]
    names: list[Any] = [f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in parts]
    return (name for name in (*names, "lm_head") if not should_convert_module(name, list(listed)))
