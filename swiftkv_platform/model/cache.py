"""The KV cache that `generate()` uses: `num_kv_cache_layers` layers, not one a model layer. It knows no attention."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache


def make_cache(config: Any, *, swiftkv: bool = True) -> DynamicCache:
    """An empty cache for a student (l + ceil((L - l) / g) layers) or, with `swiftkv=False`, its teacher (L layers)."""
    cache = DynamicCache(config=config)
    if swiftkv:
        del cache.layers[config.layer_map.num_kv_cache_layers :]
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values that a cache holds."""
    tensors = [tensor for keys, values, *_ in cache for tensor in (keys, values) if tensor is not None]
    return sum(int(tensor.nbytes) for tensor in tensors)
