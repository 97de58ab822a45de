"""Capacity of a GPU that serves a model: weights, KV blocks, sequences. As in the engine's paged cache, windows do not
shorten contexts.
"""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.planning.architecture import (
    Architecture,
    AttentionShape,
    count_served_parameters,
    count_student_parameters,
    read_architecture,
)
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.prefill import (
    DTYPE_BYTES,
    QUANTIZED_CACHE_DTYPES,
    SCALE_BYTES,
    check_kv_cache_dtype,
    list_cache_layers,
    resolve_layer_map,
)
from swiftkv_platform.student_shape import LayerMap, StudentShape


@dataclass(frozen=True)
class ServingSetup:
    """Settings of one replica."""

    memory_bytes: int
    """Memory of one GPU."""
    sequence_length: int
    """Tokens per sequence, prompt and completion."""
    weights_dtype: str = "bfloat16"
    """Dtype of the weights. With fp8 and int8, embeddings and heads stay in 16 bits."""
    kv_cache_dtype: str = "bfloat16"
    block_size: int = 16
    tensor_parallel_size: int = 1
    """GPUs that share weights and KV heads."""
    num_adapters: int = 0
    """Further students of the same base and shape in the same replica."""
    reserved: float = 0.1
    """Share of the memory for activations, kernels and the allocator."""


class Capacity(FrozenBaseModel):
    """Capacity of one GPU, in bytes, blocks, tokens and sequences."""

    weights_bytes: int
    """Bytes of the model and its adapters."""
    kv_block_bytes: int
    """Bytes of a block of `block_size` tokens in all cache layers, including scales."""
    num_blocks: int
    num_tokens: int
    """Tokens that fit into the cache."""
    num_sequences: int
    """Concurrent sequences of `sequence_length` tokens."""


class ServingPlan(FrozenBaseModel):
    """Capacity for a student exported without its teacher's projections, and for its teacher."""

    num_key_value_layers: int
    key_value_group_size: int
    dense: Capacity
    swiftkv: Capacity


def plan_serving(config: ConfigSource, setup: ServingSetup, shape: StudentShape | None = None) -> ServingPlan:
    """Compute the capacity for the student and the teacher of a `config.json`, with caches of the same dtype. Raises
    `InvalidInputError` for an invalid dtype, size or shape, `ModelError` for an unreadable configuration or an unknown
    family. `shape`: see `resolve_layer_map`."""
    _check_setup(setup)
    model = read_architecture(config, shape)
    layer_map = resolve_layer_map(model)
    return ServingPlan(
        num_key_value_layers=layer_map.num_key_value_layers,
        key_value_group_size=layer_map.key_value_group_size,
        dense=_compute_capacity(model, LayerMap.dense(len(model.layers)), setup),
        swiftkv=_compute_capacity(model, layer_map, setup),
    )


def _check_setup(setup: ServingSetup) -> None:
    check_kv_cache_dtype(setup.kv_cache_dtype)
    check_kv_cache_dtype(setup.weights_dtype, field="weights_dtype")
    if setup.num_adapters < 0:
        raise InvalidInputError.for_field("num_adapters", setup.num_adapters, "; 0 or more is accepted")
    for name in ("memory_bytes", "sequence_length", "block_size", "tensor_parallel_size"):
        value = getattr(setup, name)
        if value < 1:
            raise InvalidInputError(f"{name} is {value}; 1 or more is accepted", field=name, value=value)
    if not 0 <= setup.reserved < 1:
        raise InvalidInputError.for_field("reserved", setup.reserved, "; a share from 0 up to 1 is accepted")


def _compute_capacity(model: Architecture, layer_map: LayerMap, setup: ServingSetup) -> Capacity:
    num_ranks = setup.tensor_parallel_size
    weights = compute_weight_bytes(model, layer_map, setup.weights_dtype)
    if layer_map.leaders:  # a teacher has no adapters
        own = count_student_parameters(model, layer_map).trained
        weights += setup.num_adapters * own * DTYPE_BYTES[setup.weights_dtype]
    weights = -(-weights // num_ranks)
    block = setup.block_size * sum(
        _compute_token_bytes(attention, setup.kv_cache_dtype, num_ranks)
        for attention, _ in list_cache_layers(model, layer_map)
    )
    free = int(setup.memory_bytes * (1 - setup.reserved)) - weights
    num_blocks = max(free // block, 0)
    return Capacity(
        weights_bytes=weights,
        kv_block_bytes=block,
        num_blocks=num_blocks,
        num_tokens=num_blocks * setup.block_size,
        num_sequences=num_blocks // -(-setup.sequence_length // setup.block_size),
    )


def compute_weight_bytes(model: Architecture, layer_map: LayerMap, dtype: str) -> int:
    """Return the bytes of a model's weights, exported without its teacher's projections."""
    layers, others = count_served_parameters(model, layer_map)
    return layers * DTYPE_BYTES[dtype] + others * max(DTYPE_BYTES[dtype], 2)


def _compute_token_bytes(attention: AttentionShape, dtype: str, num_ranks: int) -> int:
    """Return the bytes of one token in one cache layer on one of `num_ranks` GPUs. Heads that cannot be divided are
    replicated."""
    total = 0
    for entry in attention.entries:
        heads = -(-entry.heads // num_ranks)
        total += heads * (entry.size * DTYPE_BYTES[dtype] + SCALE_BYTES * (dtype in QUANTIZED_CACHE_DTYPES))
    return total
