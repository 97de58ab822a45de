"""Attention heads on one tensor-parallel rank, and what happens to them head by head: norms, RoPE, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
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
    """Head size in the KV cache; larger than `head_dim` where the attention backend has no kernel for that."""
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
        """Fill heads up with zeros: [..., num * head_dim] -> [..., num * stored_dim]. Scores stay as they are."""
        if self.stored_dim == self.head_dim:
            return x
        by_head = x.unflatten(-1, (-1, self.head_dim))
        padded: torch.Tensor = F.pad(by_head, (0, self.stored_dim - self.head_dim)).flatten(-2)
        return padded

    def trim(self, x: torch.Tensor) -> torch.Tensor:
        """Drop what `pad` filled in: [..., num * stored_dim] -> [..., num * head_dim]."""
        if self.stored_dim == self.head_dim:
            return x
        by_head = x.unflatten(-1, (-1, self.stored_dim))
        trimmed: torch.Tensor = by_head[..., : self.head_dim].flatten(-2)
        return trimmed


def _stored_dim(head_dim: int) -> int:
    if not current_platform.is_cpu():
        return head_dim  # vLLM picks an attention backend that has the size
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    larger = [size for size in sizes if size >= head_dim]
    if not larger:
        raise ModelError(
            f"heads of {head_dim} dimensions are more than vLLM's CPU attention takes; up to {max(sizes)} are accepted",
            field="head_dim",
            value=head_dim,
        )
    return min(larger)


class HeadNorm(RMSNorm):
    """RMSNorm of each head by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads * head_dim], normalised."""
        normalised: torch.Tensor = super().forward(x.unflatten(-1, (-1, self.hidden_size)).contiguous())
        return normalised.flatten(-2)


def head_norm(family: Family, config: Any, heads: Heads) -> nn.Module:
    """The norm on query or key heads of a family that has one."""
    return HeadNorm(heads.head_dim, eps=config.rms_norm_eps) if family.head_norms else nn.Identity()


def rotary_embedding(config: Any, heads: Heads) -> nn.Module:
    """RoPE over whole heads; vLLM makes one module for all layers."""
    rotary: nn.Module = get_rope(
        heads.head_dim, max_position=config.max_position_embeddings, rope_parameters=config.rope_parameters
    )
    return rotary


def rotate(rotary: nn.Module, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """RoPE on queries or keys alone, [num_tokens, num_heads * head_dim].

    In PyTorch's operations: a pass of vLLM's compiler for GPUs takes its own operator to have both.
    """
    rotated: torch.Tensor = rotary.forward_native(positions, x)[0]  # type: ignore[operator]
    return rotated
