"""Bytes of a KV cache, scales included. Computed without tensors; `model.cache.cache_bytes` measures a real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.architecture import Architecture, AttentionShape
from swiftkv_platform.planning.layers import LayerMap

KVCacheDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = 2
"""Bytes of a scale. A quantised cache has one per token and head, for keys and for values each."""
QUANTIZED = frozenset({"fp8", "int8"})


@dataclass(frozen=True)
class KVBytes:
    """Bytes of one sequence's KV cache."""

    payload: int
    scales: int

    @property
    def total(self) -> int:
        return self.payload + self.scales


def check_kv_cache_dtype(name: str, *, field: str = "kv_cache_dtype") -> None:
    """Raise `InvalidInputError` for an unknown dtype; it names the accepted ones."""
    if name not in DTYPE_BYTES:
        raise InvalidInputError.of(field, name, f"; {', '.join(get_args(KVCacheDtype))} are accepted")


def kv_bytes(model: Architecture, layer_map: LayerMap, sequence_length: int, kv_cache_dtype: str) -> KVBytes:
    """The cache after `sequence_length` tokens of one sequence.

    A cache layer with a window keeps the tokens that the next token will see; a group keeps the longest window of its
    layers.
    """
    payload = scales = 0
    for attention, window in cache_layers(model, layer_map):
        num_tokens = sequence_length if window is None else min(sequence_length, window - 1)
        for entry in attention.entries:
            payload += num_tokens * entry.heads * entry.size * DTYPE_BYTES[kv_cache_dtype]
            scales += num_tokens * entry.heads * SCALE_BYTES * (kv_cache_dtype in QUANTIZED)
    return KVBytes(payload, scales)


def cache_layers(model: Architecture, layer_map: LayerMap) -> list[tuple[AttentionShape, int | None]]:
    """Return for each cache layer the attention whose entries it stores, and its window."""
    first = layer_map.num_key_value_layers
    layers = [(layer.attention, layer.window) for layer in model.layers[:first]]
    for leader in layer_map.leaders:
        windows = [model.layers[i].window for i in layer_map.group(leader)]
        longest = None if None in windows else max(window for window in windows if window is not None)
        layers.append((model.shared_attention, longest))
    return layers
