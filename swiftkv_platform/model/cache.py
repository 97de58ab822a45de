"""The KV cache of `generate()`: `num_kv_cache_layers` layers instead of one per model layer, optionally in 8 bits.

It is a transformers `Cache` of transformers' own layers, so it grows, slides, crops and reorders as they do.

In a quantized cache, each row (d elements of K or V of a head and token, or a latent) has one scale in bfloat16. A
bfloat16 scale has the range of float32, so it cannot overflow and needs no calibration. It is rounded up before the row
is quantized, so that the largest element never saturates. FP8 scales are not powers of two: the largest element lands
at the top of the payload's range, where relative steps are smallest. A row takes d + 2 bytes, 2d / (d + 2) times less
than in bfloat16: 1.94 at d = 64, 1.97 at d = 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.context import FULL, TokenSelection, get_layer_types
from swiftkv_platform.student_shape import LayerMap

SCALE_DTYPE = torch.bfloat16
PAYLOAD_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Dtypes of quantized caches by `kv_cache_dtype`; `auto` stores the model's own dtype instead."""
_MAX_PAYLOAD = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
_FP8_SHIFT = 2.0**120
"""Ratio of an e4m3 number to the bfloat16 with its shifted bits: the exponent biases are 127 and 7."""


def get_payload_dtype(kv_cache_dtype: Any) -> torch.dtype | None:
    """Return the dtype that a cache stores for `kv_cache_dtype`; None for `auto`, the model's own dtype. Raises
    `InvalidInputError` with the accepted values for an unknown one."""
    if kv_cache_dtype in (None, "auto"):
        return None
    if kv_cache_dtype not in PAYLOAD_DTYPES:
        raise InvalidInputError.for_field(
            "kv_cache_dtype", kv_cache_dtype, f"; it must be auto, {' or '.join(PAYLOAD_DTYPES)}"
        )
    return PAYLOAD_DTYPES[kv_cache_dtype]


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of `x` [..., d]. Returns the payload of `dtype` [..., d] and bfloat16 scales [...].

    A row with NaN or infinity gets the scale NaN, so that overflows stay visible. Elements within 1/16 of the maximum
    of `x`'s dtype are clamped, since rounding the scale up would overflow.
    """
    wide = x.float()
    limit = torch.finfo(x.dtype).max * (1 - 1 / 16)
    largest = wide.abs().amax(-1, keepdim=True)
    scale = _round_up_to_bfloat16((largest.clamp(max=limit) / _MAX_PAYLOAD[dtype]).clamp(min=_SMALLEST_SCALE))
    scaled = wide.clamp(-limit, limit) / scale
    payload = scaled.to(dtype) if dtype.is_floating_point else scaled.nan_to_num().round().to(dtype)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return payload, scale.squeeze(-1).to(SCALE_DTYPE)


def dequantize(payload: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantize`, with a result in `dtype`: payload [..., d], scales [...] -> [..., d]."""
    # The scales exceed float16's range, so multiply in float32.
    through = torch.float32 if dtype == torch.float16 else dtype
    scale = scale.unsqueeze(-1).to(through)
    if payload.dtype == torch.float8_e4m3fn and payload.device.type == "cpu":
        # On a CPU, converting float8 elements is about 15 times slower than shifting their bits into a bfloat16. The
        # payload has no NaN (0x7f), since rows that are not finite have a NaN scale.
        bits = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x8000 | 0x07F0)
        elements = bits.view(torch.bfloat16).to(through).mul_(_FP8_SHIFT)
    else:
        elements = payload.to(through)
    return elements.mul_(scale).to(dtype)


def quantize_to_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize to bytes: [..., d] -> uint8 [..., d + 2], each row's payload followed by its scale."""
    payload, scale = quantize(x, dtype)
    return torch.cat((payload.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)), dim=-1)


def dequantize_from_bytes(packed: torch.Tensor, dtype: torch.dtype, output_dtype: torch.dtype) -> torch.Tensor:
    """Dequantize the result of `quantize_to_bytes(x, dtype)`: uint8 [..., d + 2] -> `output_dtype` [..., d]."""
    size = packed.shape[-1] - SCALE_DTYPE.itemsize
    scale = packed[..., size:].contiguous().view(SCALE_DTYPE).squeeze(-1)
    return dequantize(packed[..., :size].view(dtype), scale, output_dtype)


def _round_up_to_bfloat16(scale: torch.Tensor) -> torch.Tensor:
    """Round positive float32 numbers up to the next bfloat16, as float32: the low 16 bits become 0."""
    return ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def make_cache(
    config: Any, *, swiftkv: bool = True, kv_cache_dtype: str = "auto", max_cache_len: int | None = None
) -> Cache:
    """Make an empty cache for a student (l + ceil((L - l) / g) layers) or, with `swiftkv=False`, its teacher (L).

    A group's cache layer keeps the longest window of its layers.

    Args:
        kv_cache_dtype: `auto` stores the model's dtype; `fp8` and `int8` quantize.
        max_cache_len: number of tokens to preallocate (static cache); None grows as needed.

    Raises:
        InvalidInputError: an unknown `kv_cache_dtype`.
    """
    cache = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
    owners = list(range(len(cache.layers)))
    if swiftkv:
        layer_map, types = config.layer_map, get_layer_types(config)
        widest = [
            next((i for i in layer_map.get_group(leader) if types[i] == FULL), leader) for leader in layer_map.leaders
        ]
        owners[layer_map.num_key_value_layers :] = widest
    payload = get_payload_dtype(kv_cache_dtype)
    layers = [cache.layers[i] for i in owners]
    if payload is not None:
        arguments = get_layer_types_and_kwargs(config)[1]
        if max_cache_len is not None:
            arguments = [{**one, "max_cache_len": max_cache_len} for one in arguments]
        layers = [
            QUANTIZED_LAYERS[type(layer)](payload, **arguments[i]) for i, layer in zip(owners, layers, strict=True)
        ]
    cache.layers[:] = layers
    return cache


def check_cache_layers(cache: Any, layer_map: LayerMap, *, swiftkv: bool) -> None:
    """Raise `ModelError` if a transformers cache has the wrong number of layers. A cache without layers is accepted,
    since it adds layers on their first write."""
    if not isinstance(cache, Cache) or not cache.layers:
        return
    wanted = layer_map.num_kv_cache_layers if swiftkv else layer_map.num_hidden_layers
    if len(cache.layers) != wanted:
        mode = "student" if swiftkv else "teacher"
        raise ModelError(
            f"past_key_values has {len(cache.layers)} layers, but this model in {mode} mode needs {wanted}. Omit it, "
            f"pass the cache of a previous call, or pass make_cache(model.config, swiftkv={swiftkv})",
            field="past_key_values",
            value=len(cache.layers),
        )


def count_cache_bytes(cache: Cache) -> int:
    """Return the bytes of a cache's keys and values, including the scales of a quantized cache."""
    layers: list[Any] = cache.layers
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(int(tensor.nbytes) for tensor in tensors)


def get_stored_dtype(cache: Any) -> torch.dtype | None:
    """Return the dtype that a quantized cache of `make_cache` stores; None for other caches."""
    layers: Any = cache.layers if isinstance(cache, Cache) else ()
    return layers[0].payload if layers and isinstance(layers[0], _QuantizedLayerMixin) else None


@dataclass(frozen=True)
class StoredKeyValue:
    """Keys and values of a quantized cache layer. `read` dequantizes them."""

    keys: torch.Tensor
    """uint8 [batch, num_heads, num_tokens, dim + 2]."""
    values: torch.Tensor
    payload: torch.dtype
    dtype: torch.dtype

    def read(self) -> KeyValue:
        return dequantize_from_bytes(self.keys, self.payload, self.dtype), dequantize_from_bytes(
            self.values, self.payload, self.dtype
        )


class _QuantizedLayerMixin:
    """Mixin for a cache layer that stores each row as packed bytes (`quantize_to_bytes`).

    Attention reads the stored values even of new tokens, so that outputs do not depend on the chunks of a prompt or on
    its cached part.
    """

    def __init__(self, payload: torch.dtype, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.payload = payload

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> KeyValue:
        return self.store(key_states, value_states).read()

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> StoredKeyValue:
        """Append like `update`, but return the context quantized."""
        layer: Any = super()
        keys, values = layer.update(
            quantize_to_bytes(key_states, self.payload), quantize_to_bytes(value_states, self.payload)
        )
        return StoredKeyValue(keys, values, self.payload, key_states.dtype)


QUANTIZED_LAYERS: dict[type, Any] = {
    layer: type(f"Quantized{layer.__name__}", (_QuantizedLayerMixin, layer), {})
    for layer in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
}
"""Classes of 8-bit cache layers, by transformers' class."""


CacheContents = KeyValue | StoredKeyValue
"""Contents of a cache layer: quantized, or as `Cache.update` returns them."""


def append_key_value(cache: Any, keys: torch.Tensor, values: torch.Tensor, cache_layer: int) -> CacheContents:
    """Append keys and values to a cache layer. Returns those of the whole context, quantized if the layer is."""
    layer = cache.layers[cache_layer] if get_stored_dtype(cache) is not None else None
    if isinstance(layer, _QuantizedLayerMixin):
        return layer.store(keys, values)
    key_value: KeyValue = cache.update(keys, values, cache_layer)
    return key_value


def select_rows(stored: CacheContents, selection: TokenSelection) -> CacheContents:
    """Return keys and values of the selected rows of the batch; `stored` itself if all rows are selected."""
    if selection.rows is None:
        return stored
    if isinstance(stored, StoredKeyValue):
        return replace(stored, keys=selection.select_rows(stored.keys), values=selection.select_rows(stored.values))
    return selection.select_rows(stored[0]), selection.select_rows(stored[1])


def read_key_value(stored: CacheContents) -> KeyValue:
    return stored.read() if isinstance(stored, StoredKeyValue) else stored
