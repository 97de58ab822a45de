"""Size of a model's KV cache: shapes from its configuration, and the number of blocks from `kv_cache_bytes` or from the
memory that the largest step leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.kv_cache import (
    BlockManager,
    KVCache,
    KVCacheFormat,
    LayerShape,
    TokenShape,
    get_bytes_per_block,
)
from swiftkv_platform.engine.loading import LoadedModel
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.engine.varlen import choose_block_size, choose_operator
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.cache import PAYLOAD_DTYPES
from swiftkv_platform.model.packed_attention import get_attention_head_dim
from swiftkv_platform.planning.serving import ServingSetup
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams

FREE_MEMORY_DIVISOR = 4
"""Without `kv_cache_bytes`, the cache takes at most 1 / this of the host's free memory."""
DEFAULT_BLOCK_SIZE = 16
"""Tokens per block, unless the attention operator needs more."""


def get_layer_shapes(config: Any, num_ranks: int = 1) -> list[LayerShape]:
    """Return a token's shapes in each of the `num_kv_cache_layers` layers, on one of `num_ranks` ranks."""
    layers = range(config.layer_map.num_kv_cache_layers)
    if _is_latent(config):
        return [(TokenShape(1, config.kv_lora_rank), TokenShape(1, config.qk_rope_head_dim)) for _ in layers]
    dim = get_attention_head_dim(config)
    return [(TokenShape(config.get_cache_num_key_value_heads(i) // num_ranks, dim),) * 2 for i in layers]


def make_cache(
    loaded: LoadedModel, config: EngineConfig, num_blocks: int | None = None, *, reserved_bytes: int = 0
) -> KVCache:
    """Make the KV cache of an engine or a rank.

    Args:
        num_blocks: None computes it.
        reserved_bytes: free memory that adapters may still take.

    Raises:
        InvalidInputError: `kv_cache_bytes` is less than one block, or attention on a GPU does not support
            `kv_cache_dtype` or `block_size`.
    """
    device, format_ = torch.device(loaded.model.device), get_kv_cache_format(config.kv_cache_dtype, loaded.model.dtype)
    model_config = loaded.model.config
    if device.type == "cuda" and format_.storage_dtype != loaded.model.dtype:
        raise InvalidInputError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; attention on a GPU reads K and V in the model's own type, "
            f"{loaded.model.dtype}: leave kv_cache_dtype out, or give 'auto'",
            field="kv_cache_dtype",
            value=config.kv_cache_dtype,
        )
    operator = choose_operator(device, loaded.model.dtype, get_attention_head_dim(model_config))
    block_size = choose_block_size(operator, config.block_size, DEFAULT_BLOCK_SIZE)
    shapes = get_layer_shapes(model_config, config.tensor_parallel_size)
    block_bytes = get_bytes_per_block(shapes, block_size, format_)
    return KVCache(
        shapes,
        num_blocks=num_blocks or _choose_num_blocks(loaded, config, block_size, block_bytes, device, reserved_bytes),
        block_size=block_size,
        format_=format_,
        device=device,
        expands_contexts=_is_latent(model_config),
        uses_kernels=config.native_kernels
        and operator is None
        and not _is_latent(model_config)
        and not format_.has_other_dtype
        and all(tensor.dim % kernels.HEAD_DIM_MULTIPLE == 0 for layer in shapes for tensor in layer)
        and kernels.supports_model(loaded.model),
        operator=operator,
    )


def compute_cache_bytes(config: Any, dtype: torch.dtype, lengths: Iterable[int]) -> int:
    """Return the bytes of a cache for concurrent texts of `lengths`, in the model's dtype and with the default
    blocks."""
    block_bytes = get_bytes_per_block(get_layer_shapes(config), DEFAULT_BLOCK_SIZE, get_kv_cache_format("auto", dtype))
    return block_bytes * sum(-(-length // DEFAULT_BLOCK_SIZE) for length in lengths)


def get_kv_cache_format(kv_cache_dtype: str, model_dtype: torch.dtype) -> KVCacheFormat:
    """Return the cache's format for `kv_cache_dtype` and a model of the dtype `model_dtype`."""
    if kv_cache_dtype in PAYLOAD_DTYPES:
        return KVCacheFormat(model_dtype, torch.uint8, PAYLOAD_DTYPES[kv_cache_dtype])
    return KVCacheFormat(model_dtype, model_dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype))


def _is_latent(config: Any) -> bool:
    """Whether attention is MLA. Then the cache holds the latent and the RoPE key, one head each."""
    return getattr(config, "kv_lora_rank", None) is not None


def _choose_num_blocks(
    loaded: LoadedModel,
    config: EngineConfig,
    block_size: int,
    block_bytes: int,
    device: torch.device,
    reserved_bytes: int,
) -> int:
    if config.kv_cache_bytes is None:
        wanted = count_needed_blocks(loaded, config, block_size)
        if device.type == "cuda":
            # Enough for a step of `max_num_batched_tokens` tokens. `compute_num_blocks` chooses the final number.
            num_sequences = min(config.max_num_seqs, config.max_num_batched_tokens)
            return min(wanted, config.max_num_batched_tokens // block_size + num_sequences + 1)
        available: int = psutil.virtual_memory().available - reserved_bytes
        return max(min(wanted, available // FREE_MEMORY_DIVISOR // config.tensor_parallel_size // block_bytes), 1)
    if config.kv_cache_bytes < block_bytes:
        raise InvalidInputError.for_field(
            "kv_cache_bytes",
            config.kv_cache_bytes,
            f"; one block of {block_size} tokens takes {block_bytes} bytes of this model's KV: give that or more",
        )
    return config.kv_cache_bytes // block_bytes


def count_needed_blocks(loaded: LoadedModel, config: EngineConfig, block_size: int) -> int:
    """Return the number of blocks with which no sequence ever waits for blocks."""
    return config.max_num_seqs * -(-loaded.context_length // block_size)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU in bytes, before and at the peak of the largest step."""

    total: int
    free: int
    """Free memory before the step, after torch has released its reserve."""
    allocated: int
    peak: int

    @property
    def used_by_others(self) -> int:
        """Bytes of other processes and of this process's driver."""
        return self.total - self.free - self.allocated

    def compute_kv_cache_bytes(self, reserved: float) -> int:
        """Return the bytes left for the cache if the share `reserved` of all memory stays free, as in `swiftkv
        plan`."""
        return int(self.total * (1 - reserved)) - (self.total - self.free) - (self.peak - self.allocated)


def compute_num_blocks(
    loaded: LoadedModel, config: EngineConfig, cache: KVCache, memory: DeviceMemory, *, reserved_bytes: int = 0
) -> int:
    """Return the number of blocks that fit into a GPU's memory together with the largest step, which ran with `cache`.
    `reserved_bytes`: memory that adapters may still take. Raises `InvalidInputError`: no block fits."""
    shapes = get_layer_shapes(loaded.model.config, config.tensor_parallel_size)
    block_bytes = get_bytes_per_block(shapes, cache.block_size, cache.format)
    free_bytes = memory.compute_kv_cache_bytes(ServingSetup.reserved) - reserved_bytes
    num_fitting = free_bytes // block_bytes + cache.num_blocks
    if num_fitting < 1:
        raise InvalidInputError.for_field(
            "max_num_batched_tokens",
            config.max_num_batched_tokens,
            f"; of {memory.total} bytes of GPU memory, weights take {memory.allocated}, a step of that many tokens "
            f"takes {memory.peak - memory.allocated}, and other processes and the driver hold {memory.used_by_others}, "
            f"which leaves no memory for a KV block of {block_bytes} bytes: use a smaller number, a smaller model, "
            "more GPUs (tensor_parallel_size), or stop other processes on the GPU",
        )
    return min(num_fitting, count_needed_blocks(loaded, config, cache.block_size))


def measure_memory(step: Callable[[], object], device: torch.device) -> DeviceMemory:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return DeviceMemory(total, free, allocated, torch.cuda.max_memory_allocated(device))


def make_largest_step(loaded: LoadedModel, config: EngineConfig, cache: KVCache) -> list[ScheduledSequence]:
    """Make the schedule of the step with the highest memory use: `max_num_batched_tokens` tokens in the longest
    possible prompts, with log-probabilities, so that each token runs through all layers and has logits."""
    blocks = BlockManager(cache.num_blocks, cache.block_size, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, logprobs=1)
    scheduled: list[ScheduledSequence] = []
    left = min(config.max_num_batched_tokens, cache.num_blocks * cache.block_size)
    while left > 0 and len(scheduled) < config.max_num_seqs:
        size = min(left, loaded.context_length - 1)
        sequence = Sequence(
            f"worst-{len(scheduled)}",
            (0,) * size,
            params,
            seed=0,
            stop_token_ids=frozenset(),
            max_model_len=loaded.context_length,
            deep_tail=loaded.deep_tail,
        )
        blocks.allocate(sequence.block_table, [], size)
        scheduled.append(ScheduledSequence(sequence, size))
        left -= size
    return scheduled
