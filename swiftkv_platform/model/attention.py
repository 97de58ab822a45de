"""Attention of layers >= l: their own query, keys and values that come from the hidden state after layer l - 1.

It knows projections, RoPE and transformers' attention interface; which tokens are computed is the decoder's business.
Source: paper, section 3.1 (SingleInputKV) and 3.2 (AcrossKV).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from swiftkv_platform.model.config import SwiftKVConfigMixin

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [batch, num_tokens, head_dim]."""
KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [batch, num_key_value_heads, num_tokens, head_dim]; the keys carry RoPE."""


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply RoPE to `x` [batch, num_heads, num_tokens, head_dim]; dimension j pairs with j + head_dim / 2."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SwiftKVAttentionMixin(nn.Module):
    """Mixed into a family's attention module for layers >= l.

    Without `shared_key_value` it is the family's own attention (the teacher); with it, the student's.
    """

    # What the family's own attention brings.
    config: Any
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # the family's own projections
        self.normalises_heads = hasattr(self, "q_norm")  # Qwen3: norms on queries and keys before RoPE
        if not self.normalises_heads:
            self.q_norm = self.k_norm = nn.Identity()
        self._add_projections(config, layer_idx)
        if not config.swiftkv_teacher_weights:
            del self.q_proj, self.k_proj, self.v_proj

    def _add_projections(self, config: SwiftKVConfigMixin, layer_idx: int) -> None:
        def like(projection: nn.Linear) -> nn.Linear:
            return nn.Linear(projection.in_features, projection.out_features, bias=projection.bias is not None)

        self.q_proj_swiftkv = like(self.q_proj)
        if layer_idx in config.layer_map.leaders:
            self.k_proj_swiftkv = like(self.k_proj)
            self.v_proj_swiftkv = like(self.v_proj)

    def split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[batch, num_tokens, num_heads * head_dim] -> [batch, num_heads, num_tokens, head_dim]."""
        heads: torch.Tensor = projected.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def shape_key_value(self, keys: torch.Tensor, values: torch.Tensor, rotation: Rotation) -> KeyValue:
        """Heads and RoPE for projected keys and values, each [batch, num_tokens, num_key_value_heads * head_dim]."""
        return rotate(self.k_norm(self.split_heads(keys)), rotation), self.split_heads(values)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        shared_key_value: KeyValue | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output [batch, num_tokens, hidden_size] and weights (None unless the backend returns them).

        Args:
            hidden_states: normalised input of this layer, [batch, num_tokens, hidden_size].
            position_embeddings: rotation of these tokens.
            shared_key_value: the group's keys and values over the whole context; None runs the teacher's attention.
        """
        if shared_key_value is None:
            teacher: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return teacher
        query = rotate(self.q_norm(self.split_heads(self.q_proj_swiftkv(hidden_states))), position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            *shared_key_value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", getattr(self.config, "sliding_window", None)),
            **kwargs,
        )  # [batch, num_tokens, num_heads, head_dim]
        return self.o_proj(output.flatten(-2).contiguous()), weights
