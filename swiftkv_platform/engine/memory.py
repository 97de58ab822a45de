"""Size of a model's KV cache: layers and shapes from its configuration, blocks from a budget. Knows no request."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.kv_cache import KVCache, LayerShape, StorageFormat, TensorShape, bytes_per_block
from swiftkv_platform.engine.loading import LoadedModel
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.quantization import PAYLOAD_DTYPES
from swiftkv_platform.specs.engine import EngineConfig

FREE_MEMORY_SHARE = 4
"""Divisor of the free memory: without `kv_cache_bytes` the cache takes at most one such part."""


def layer_shapes(config: Any, num_ranks: int = 1) -> list[LayerShape]:
    """Return the shapes of a token in each of the `num_kv_cache_layers` layers, on each rank that shares its heads."""
    layers = range(config.layer_map.num_kv_cache_layers)
    if _is_latent(config):
        return [(TensorShape(1, config.kv_lora_rank), TensorShape(1, config.qk_rope_head_dim)) for _ in layers]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(TensorShape(config.cache_num_key_value_heads(i) // num_ranks, dim),) * 2 for i in layers]


def make_cache(loaded: LoadedModel, config: EngineConfig, num_blocks: int | None = None) -> KVCache:
    """The KV cache of an engine, or of one of its ranks; `num_blocks` is given where rank 0 has decided.

    Raises:
        InvalidInputError: `kv_cache_bytes` holds not even one block.
    """
    device, format_ = torch.device(loaded.model.device), storage_format(config.kv_cache_dtype, loaded.model.dtype)
    shapes = layer_shapes(loaded.model.config, config.tensor_parallel_size)
    block_bytes = bytes_per_block(shapes, config.block_size, format_)
    return KVCache(
        shapes,
        num_blocks=num_blocks or _num_blocks(loaded, config, block_bytes, device),
        block_size=config.block_size,
        format_=format_,
        device=device,
        expanded=_is_latent(loaded.model.config),
        native=config.native_kernels
        and not _is_latent(loaded.model.config)
        and not format_.converts
        and all(tensor.dim % kernels.HEAD_DIM_MULTIPLE == 0 for layer in shapes for tensor in layer)
        and kernels.serve(loaded.model),
    )


def storage_format(kv_cache_dtype: str, computed: torch.dtype) -> StorageFormat:
    """Return the format in which the cache stores what a model computes in `computed`."""
    if kv_cache_dtype in PAYLOAD_DTYPES:
        return StorageFormat(computed, torch.uint8, PAYLOAD_DTYPES[kv_cache_dtype])
    return StorageFormat(computed, computed if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype))


def _is_latent(config: Any) -> bool:
    """MLA: what is cached is the latent and the rope key, one head each."""
    return getattr(config, "kv_lora_rank", None) is not None


def _num_blocks(loaded: LoadedModel, config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    if config.kv_cache_bytes is None:
        wanted = config.max_num_seqs * -(-loaded.context_length // config.block_size)
        sharing = config.tensor_parallel_size if device.type == "cpu" else 1
        return max(min(wanted, _free_memory(device) // FREE_MEMORY_SHARE // sharing // block_bytes), 1)
    if config.kv_cache_bytes < block_bytes:
        raise InvalidInputError(
            f"kv_cache_bytes is {config.kv_cache_bytes}; one block of {config.block_size} tokens takes {block_bytes} "
            "bytes of this model's KV: give that or more",
            field="kv_cache_bytes",
            value=config.kv_cache_bytes,
        )
    return config.kv_cache_bytes // block_bytes


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    return available
