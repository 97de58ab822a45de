"""Modules of a decoder on the engine's kernels; `weights.py` puts them in the place of a family's own.

Each computes what the family's does, for one row of tokens on a CPU in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from swiftkv_platform.engine import kernels
from swiftkv_platform.model.attention import Rotation


class NativeLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = kernels.pack(weight)
        self.bias = None if bias is None else kernels.padded(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return kernels.linear(x, self.weight, self.bias, self.out_features)


class NativeRMSNorm(nn.Module):
    """The families' RMSNorm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = kernels.padded(norm.weight)
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]; in float32 inside."""
        return kernels.rms_norm(x, self.weight, self.variance_epsilon)


class NativeMLP(nn.Module):
    """The families' gated MLP with SiLU: gate, up and their product in one operator."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up = _GatedLinear(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        y: torch.Tensor = self.down_proj(self.gate_up(x))
        return y


class _GatedLinear(nn.Module):
    """silu(x G^T) * x U^T."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self._size, self.in_features = gate.shape
        self.out_features = 2 * self._size  # of its products
        self.weight = kernels.pack_gated(gate, up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., intermediate_size]."""
        return kernels.gated_linear(x, self.weight, self._size)


class NativeAttention(nn.Module):
    """A family's own attention by head; what is the kernels' is its RoPE."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._modules.update(attention._modules)
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.num_key_value_groups, self.is_causal = attention.num_key_value_groups, True
        self.sliding_window = getattr(attention, "sliding_window", getattr(self.config, "sliding_window", None))
        self.normalises_heads = hasattr(attention, "q_norm")
        self.rotates = getattr(attention, "use_rope", True)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as the family's module: output [1, num_tokens, hidden_size], and weights if the backend has them."""
        projected = (projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in projected)
        if self.normalises_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotates:
            query, key = kernels.rotate(query, position_embeddings), kernels.rotate(key, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs
        )
        return self.o_proj(output.flatten(-2)), weights
