"""Savings of SwiftKV on one prompt, against the teacher: FLOPs by component and KV bytes. Imports no torch.

Source: paper, table 1 and section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.flops import Convention, Flops, decode_flops, prefill_flops
from swiftkv_platform.planning.kv_cache import QUANTIZED, check_kv_cache_dtype, kv_bytes
from swiftkv_platform.planning.layers import LayerMap, refuse_bypassed_latents, student_layer_map
from swiftkv_platform.planning.reading import read_architecture


class Components(FrozenModel):
    """FLOPs of one token by component."""

    vocabulary: float
    """Embedding and head."""
    query: float
    key_value: float
    output: float
    mlp: float
    attention: float
    total: float

    @classmethod
    def of(cls, flops: Flops) -> Components:
        return cls(**vars(flops), total=flops.total)


class PrefillComparison(FrozenModel):
    """FLOPs per token of teacher and student."""

    dense: Components
    swiftkv: Components

    @property
    def ratio(self) -> float:
        return self.swiftkv.total / self.dense.total


class Plan(FrozenModel):
    """Cost of a student against its teacher on a prompt of `sequence_length` tokens."""

    model_type: str
    num_hidden_layers: int
    num_key_value_layers: int
    prefill_layers: tuple[int, ...]
    """Layers that prompts run through: all below l unless they bypass some."""
    key_value_group_size: int
    num_kv_cache_layers: int
    sequence_length: int
    kv_cache_dtype: str
    prefill_flops_ratio: float
    """SwiftKV over dense as the paper counts (table 1): the vocabulary, embedding and head, for every token."""
    executed_prefill_flops_ratio: float
    """SwiftKV over dense as executed: logits of the last token only, which alone enters layers >= l."""
    kv_bytes_per_token: float
    """Bytes in the student's cache, scales included, over the tokens of the prompt."""
    dense_kv_bytes_per_token: float
    """Bytes in the teacher's cache per token, not quantised: bfloat16 if the student's cache is, or else its dtype."""
    kv_bytes_ratio: float
    """`kv_bytes_per_token` over `dense_kv_bytes_per_token`."""
    kv_payload_ratio: float
    """The same without scales, as the paper counts (62.5% and 68.75% saved with FP8)."""
    prefill: dict[Convention, PrefillComparison]
    """FLOPs per prompt token by convention."""
    decode: PrefillComparison
    """FLOPs of the token that follows the prompt, as executed."""


def plan(
    config: ConfigSource,
    *,
    num_key_value_layers: int | None = None,
    key_value_group_size: int | None = None,
    prefill_layers: Sequence[int] | None = None,
    sequence_length: int | None = None,
    kv_cache_dtype: str = "bfloat16",
    num_key_value_heads_swiftkv: int | None = None,
) -> Plan:
    """Compute FLOPs and KV bytes of a student from its teacher's `config.json`. Raises `InvalidInputError` if l, g, a
    length or a dtype is out of range, `ModelError` if the configuration cannot be read or its family is unknown.

    Args:
        config: path of a `config.json`, its directory, or its content; a teacher's or a student's.
        num_key_value_layers: l; default: the student configuration's, or half of the layers.
        key_value_group_size: g; default: the student configuration's, or 1.
        prefill_layers: layers that prompts run through, ascending, in place of l; default: as for l.
        sequence_length: tokens of the prompt; default: the model's context.
        kv_cache_dtype: float32, bfloat16, float16, fp8 or int8.
        num_key_value_heads_swiftkv: KV heads of the student's groups (appendix C); default: the configuration's.
    """
    model = read_architecture(config, num_key_value_heads_swiftkv=num_key_value_heads_swiftkv)
    layer_map = resolve_layer_map(model, num_key_value_layers, key_value_group_size, prefill_layers)
    sequence_length = model.max_position_embeddings if sequence_length is None else sequence_length
    if sequence_length < 1:
        raise InvalidInputError.of("sequence_length", sequence_length, "; 1 or more is accepted")
    check_kv_cache_dtype(kv_cache_dtype)
    dense_map = dense_layer_map(model)
    prefill: dict[Convention, PrefillComparison] = {}
    for convention in ("paper", "executed"):
        dense, swiftkv = (
            Components.of(prefill_flops(model, layers, sequence_length, convention) / sequence_length)
            for layers in (dense_map, layer_map)
        )
        prefill[convention] = PrefillComparison(dense=dense, swiftkv=swiftkv)
    decode = {
        name: Components.of(decode_flops(model, layers, sequence_length + 1))
        for name, layers in (("dense", dense_map), ("swiftkv", layer_map))
    }
    return Plan(
        model_type=model.model_type,
        num_hidden_layers=layer_map.num_hidden_layers,
        num_key_value_layers=layer_map.num_key_value_layers,
        prefill_layers=layer_map.prefill_layers,
        key_value_group_size=layer_map.key_value_group_size,
        num_kv_cache_layers=layer_map.num_kv_cache_layers,
        sequence_length=sequence_length,
        kv_cache_dtype=kv_cache_dtype,
        prefill_flops_ratio=prefill["paper"].ratio,
        executed_prefill_flops_ratio=prefill["executed"].ratio,
        prefill=prefill,
        decode=PrefillComparison(**decode),
        **_kv(model, layer_map, sequence_length, kv_cache_dtype),
    )


def resolve_layer_map(
    model: Architecture,
    num_key_value_layers: int | None,
    group_size: int | None,
    prefill_layers: Sequence[int] | None = None,
) -> LayerMap:
    """Return the layer map given by the arguments or, without them, by a student's configuration; default: half of the
    layers.

    l = L is the teacher itself, the baseline of table 1.
    """
    if num_key_value_layers == len(model.layers) and group_size in (None, 1):
        return dense_layer_map(model)
    if num_key_value_layers is None and prefill_layers is None:
        num_key_value_layers, prefill_layers = model.num_key_value_layers, model.prefill_layers
    layer_map = student_layer_map(
        len(model.layers),
        num_key_value_layers=num_key_value_layers,
        prefill_reduction=None,
        key_value_group_size=model.key_value_group_size if group_size is None else group_size,
        prefill_layers=prefill_layers,
    )
    if layer_map.bypassed and model.shared_attention.expansion:
        refuse_bypassed_latents(list(layer_map.prefill_layers), model.model_type)
    return layer_map


def dense_layer_map(model: Architecture) -> LayerMap:
    """Return the teacher's layer map, in which every layer computes its own KV."""
    return LayerMap(len(model.layers), len(model.layers), 1)


def _kv(model: Architecture, layer_map: LayerMap, sequence_length: int, kv_cache_dtype: str) -> dict[str, Any]:
    plain = "bfloat16" if kv_cache_dtype in QUANTIZED else kv_cache_dtype
    dense = kv_bytes(model, dense_layer_map(model), sequence_length, plain)
    swiftkv = kv_bytes(model, layer_map, sequence_length, kv_cache_dtype)
    return {
        "kv_bytes_per_token": swiftkv.total / sequence_length,
        "dense_kv_bytes_per_token": dense.total / sequence_length,
        "kv_bytes_ratio": swiftkv.total / dense.total,
        "kv_payload_ratio": swiftkv.payload / dense.payload,
    }
