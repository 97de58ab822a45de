"""The KV cache that `generate()` uses: `num_kv_cache_layers` layers, not one a model layer. It knows no attention."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from swiftkv_platform.model.masks import FULL, layer_types


def make_cache(config: Any, *, swiftkv: bool = True) -> DynamicCache:
    """An empty cache for a student (l + ceil((L - l) / g) layers) or, with `swiftkv=False`, its teacher (L layers).

    A group's cache layer keeps the longest window of its layers.
    """
    cache = DynamicCache(config=config)
    if swiftkv:
        layer_map, types = config.layer_map, layer_types(config)
        widest = [
            next((i for i in layer_map.group(leader) if types[i] == FULL), leader) for leader in layer_map.leaders
        ]
        cache.layers[:] = cache.layers[: layer_map.num_key_value_layers] + [cache.layers[i] for i in widest]
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values that a cache holds."""
    tensors = [tensor for keys, values, *_ in cache for tensor in (keys, values) if tensor is not None]
    return sum(int(tensor.nbytes) for tensor in tensors)
