"""Multi-head latent attention (MLA, DeepSeek-V2) of layers >= l.

    norm_swiftkv(x) -> kv_a_proj_with_mqa -> latent -> norm -> kv_b_proj -> keys (part without RoPE) and values, by head
                                          -> key part with RoPE, one for all heads

The cache holds the normalised latent and the key part with RoPE: kv_lora_rank + qk_rope_head_dim numbers per token and
layer. Keys and values are expanded from them once per group. Source: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from swiftkv_platform.model.attention import KeyValue, Rotation, SwiftKVAttentionMixin


class LatentAttentionMixin(SwiftKVAttentionMixin):
    """Queries from a full projection (`q_lora_rank` null) or a low-rank one; keys and values from a shared latent."""

    key_value_modules = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    decode_modules = ("kv_a_proj_with_mqa",)
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    kv_a_proj_with_mqa_swiftkv: nn.Linear
    kv_a_layernorm_swiftkv: nn.Module
    kv_b_proj_swiftkv: nn.Linear

    @classmethod
    def query_modules(cls, config: Any, /) -> tuple[str, ...]:
        return ("q_proj",) if config.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")

    @property
    def input_projections(self) -> Sequence[nn.Linear]:
        return (self.kv_a_proj_with_mqa_swiftkv,)

    def shape_key_value(self, projected: Sequence[torch.Tensor], rotation: Rotation) -> KeyValue:
        """Return the normalised latent [batch, 1, num_tokens, kv_lora_rank] and the keys' RoPE part [.., rope_dim]."""
        latent, rotary_key = projected[0].unsqueeze(1).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm_swiftkv(latent), rotate_pairs(rotary_key, rotation)

    def expand_key_value(self, stored: KeyValue) -> KeyValue:
        """Return keys [batch, num_heads, context_len, qk_head_dim] and values [.., v_head_dim] of a stored latent."""
        latent, rotary_key = stored
        by_head = self.kv_b_proj_swiftkv(latent.squeeze(1)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        keys, values = by_head.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat((keys, rotary_key.expand(-1, keys.shape[1], -1, -1)), dim=-1), values

    def expanding_modules(self) -> list[nn.Module]:
        return [self.kv_b_proj_swiftkv]

    def project_query(self, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        projected = hidden_states
        for name in self.query_modules(self.config):
            projected = getattr(self, f"{name}_swiftkv")(projected)
        query = projected.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        plain, rotary = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return torch.cat((plain, rotate_pairs(rotary, rotation)), dim=-1)


def rotate_pairs(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply RoPE to `x` [batch, num_heads, num_tokens, rope_dim]; dimension 2j pairs with 2j + 1.

    `rotation` is complex, [batch, num_tokens, rope_dim / 2].
    """
    assert isinstance(rotation, torch.Tensor)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation.unsqueeze(1)).flatten(-2).to(x.dtype)
