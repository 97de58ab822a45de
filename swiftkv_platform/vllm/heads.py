"""Attention heads on one tensor-parallel rank, and the operations on each head: norms, RoPE, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import Family


@dataclass(frozen=True)
class Heads:
    """Counts and sizes of an attention layer's heads on one tensor-parallel rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    stored_dim: int
    """Head size in the KV cache; larger than `head_dim` if the attention backend has no kernel for `head_dim`."""
    tp_size: int
    total_num_heads: int
    total_num_kv_heads: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        total, total_kv = config.num_attention_heads, config.num_key_value_heads
        tp_size = get_tensor_model_parallel_world_size()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // total
        if total % tp_size or (total_kv % tp_size and tp_size % total_kv):
            raise ModelError(
                f"tensor_parallel_size is {tp_size}; it must divide the {total} query heads, and divide the {total_kv} "
                "key-value heads or be a multiple of them",
                field="tensor_parallel_size",
                value=tp_size,
            )
        return cls(
            num_heads=total // tp_size,
            num_kv_heads=max(1, total_kv // tp_size),
            head_dim=head_dim,
            stored_dim=_stored_dim(head_dim),
            tp_size=tp_size,
            total_num_heads=total,
            total_num_kv_heads=total_kv,
        )

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pad heads with zeros: [..., num * head_dim] -> [..., num * stored_dim]. Attention scores do not change."""
        if self.stored_dim == self.head_dim:
            return x
        by_head = x.unflatten(-1, (-1, self.head_dim))
        padded: torch.Tensor = F.pad(by_head, (0, self.stored_dim - self.head_dim)).flatten(-2)
        return padded

    def trim(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `pad`: [..., num * stored_dim] -> [..., num * head_dim]."""
        if self.stored_dim == self.head_dim:
            return x
        by_head = x.unflatten(-1, (-1, self.stored_dim))
        trimmed: torch.Tensor = by_head[..., : self.head_dim].flatten(-2)
        return trimmed


def _stored_dim(head_dim: int) -> int:
    if not current_platform.is_cpu():
        return head_dim  # vLLM picks an attention backend that supports the size
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    larger = [size for size in sizes if size >= head_dim]
    if not larger:
        raise ModelError(
            f"head_dim is {head_dim}, more than vLLM's CPU attention supports; up to {max(sizes)} is accepted",
            field="head_dim",
            value=head_dim,
        )
    return min(larger)


def norm_class(family: Family) -> Any:
    """Return the class of a family's norms on hidden states."""
    return GemmaRMSNorm if family.norm_offset else RMSNorm


class _ByHead(nn.Module):
    """Mixin that applies a norm to each head separately."""

    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each head of [num_tokens, num_heads * head_dim]."""
        normalised: torch.Tensor = super().forward(x.unflatten(-1, (-1, len(self.weight))).contiguous())
        return normalised.flatten(-2)


class HeadNorm(_ByHead, RMSNorm):
    """RMSNorm of each head separately."""


class OffsetHeadNorm(_ByHead, GemmaRMSNorm):
    """Gemma's RMSNorm of each head separately, which adds 1 to its weights."""


class AllHeadsNorm(RMSNorm):
    """RMSNorm over all heads together, of which each rank holds a part."""

    def __init__(self, heads: Heads, total: int, eps: float) -> None:
        self._rows = heads.head_dim * max(1, total // heads.tp_size)
        super().__init__(self._rows, eps=eps)
        self._first = heads.head_dim * (get_tensor_model_parallel_rank() * total // heads.tp_size)
        self._tp_size = heads.tp_size
        set_weight_attrs(self.weight, {"weight_loader": self._load})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise this rank's [num_tokens, num_heads * head_dim] by the mean square over all ranks."""
        if self._tp_size == 1:
            normalised: torch.Tensor = super().forward(x.contiguous())
            return normalised
        wide = x.float()  # if ranks hold copies of heads, each head has equally many
        mean = tensor_model_parallel_all_reduce(wide.square().mean(-1, keepdim=True)) / self._tp_size
        of_all: torch.Tensor = wide * torch.rsqrt(mean + self.variance_epsilon) * self.weight.float()
        return of_all.to(x.dtype)

    def _load(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        default_weight_loader(parameter, tensor[self._first : self._first + self._rows])


def head_norm(family: Family, config: Any, heads: Heads, total: int) -> nn.Module:
    """Return the family's norm on queries or keys, for `total` heads on all ranks; the identity if it has none."""
    if family.query_key_norms == "all heads":
        return AllHeadsNorm(heads, total, config.rms_norm_eps)
    of_head = OffsetHeadNorm if family.norm_offset else HeadNorm
    return of_head(heads.head_dim, eps=config.rms_norm_eps) if family.query_key_norms else nn.Identity()


def rotary_embedding(config: Any, heads: Heads, layer: int) -> nn.Module:
    """Return a layer's RoPE, over whole heads or their first dimensions; vLLM reuses a module with equal parameters."""
    parameters = config.rope_parameters
    if config.family.rotates_by_layer_type:
        parameters = parameters[config.layer_types[layer]]
    rotary: nn.Module = get_rope(
        heads.head_dim, max_position=config.max_position_embeddings, rope_parameters=parameters
    )
    return rotary


def rotate(rotary: nn.Module, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to queries or to keys alone, [num_tokens, num_heads * head_dim].

    It uses PyTorch's operations: a pass of vLLM's GPU compiler expects vLLM's own operator to get queries and keys.
    """
    # Phi-3's LongRoPE has only a forward of PyTorch's operations, which requires keys.
    alone: Any = getattr(rotary, "forward_native", None)
    rotated: torch.Tensor = rotary(positions, x, x)[0] if alone is None else alone(positions, x)[0]
    return rotated
