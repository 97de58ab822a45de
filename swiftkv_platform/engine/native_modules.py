"""Modules on the engine's kernels, in the place of a family's; for one row of tokens, on a CPU in bfloat16.

Layers of any shape are put together from them; those of the usual shape run several at once (`native_layers.py`). Knows
no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.arena import Arena
from swiftkv_platform.engine.integer_weights import common_weights
from swiftkv_platform.engine.kernels import packing
from swiftkv_platform.engine.kv_cache import PagedTensor
from swiftkv_platform.model.attention import HeadAttentionMixin, Rotation, rotate, split_heads
from swiftkv_platform.model.embeddings import ScaledEmbedding
from swiftkv_platform.model.weight_formats import IntegerWeight


def rotate_heads(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """`model.attention.rotate`; by the kernels where the factors are in their dtype, as most families' are."""
    size = rotation[0].shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate_heads(x[..., :size], rotation), x[..., size:]), dim=-1)
    return (kernels.rotate if rotation[0].dtype == x.dtype else rotate)(x, rotation)


class NativeLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, weight: torch.Tensor | IntegerWeight, bias: torch.Tensor | None, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = packing.pack(weight).moved_into(arena)
        self.bias = None if bias is None else packing.padded(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return kernels.linear(x, self.weight, self.bias, self.out_features)

    def rows(self, x: torch.Tensor, norm: NativeRMSNorm) -> torch.Tensor:
        """[num_tokens, in_features], before its norm -> [num_tokens, out_features]."""
        return kernels.linear_rows(x, self.weight, self.bias, self.out_features, norm=norm)


class NativeHead(NativeLinear):
    """Logits of a language model's head, in float32 as they are summed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return kernels.logits(x, self.weight, self.bias, self.out_features)


class NativeEmbedding(nn.Module):
    """Embeddings that are read out of a tied head's packed weight, so that there is one of both."""

    def __init__(self, embedding: nn.Embedding, head: NativeHead) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.numbers, requires_grad=False)
        self._scaled = embedding.scaled if isinstance(embedding, ScaledEmbedding) else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., hidden_size]."""
        pairs = self.weight.view(torch.int32).squeeze(-1)  # both at once: a quarter of the time
        embedded = pairs[input_ids // packing.COLUMNS, :, input_ids % packing.COLUMNS].view(self.weight.dtype)
        return embedded if self._scaled is None else self._scaled(embedded)


class NativeRMSNorm(nn.Module):
    """The families' RMSNorm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = packing.padded(norm.weight)
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]; in float32 inside."""
        return kernels.rms_norm(x, self.weight, self.variance_epsilon)


class NativeMLP(nn.Module):
    """The families' gated MLP with SiLU: gate, up and their product in one operator."""

    def __init__(self, mlp: Any, arena: Arena) -> None:
        super().__init__()
        fused = getattr(mlp, "gate_up_proj", None)
        separate = fused is None
        gate, up = common_weights([mlp.gate_proj, mlp.up_proj]) if separate else common_weights([fused])[0].chunk(2)
        self.gate_up = GatedLinear(gate, up, arena)
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        y: torch.Tensor = self.down_proj(self.gate_up(x))
        return y


class GatedLinear(nn.Module):
    """silu(x G^T) * x U^T."""

    def __init__(self, gate: torch.Tensor | IntegerWeight, up: torch.Tensor | IntegerWeight, arena: Arena) -> None:
        super().__init__()
        self.size, self.in_features = gate.shape
        self.out_features = 2 * self.size  # of its products
        self.weight = packing.pack_gated(gate, up).moved_into(arena)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., intermediate_size]."""
        return kernels.gated_linear(x, self.weight, self.size)


class NativeAttention(nn.Module):
    """A family's own attention by head; what is the kernels' is its RoPE."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    qkv_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._modules.update(attention._modules)
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.num_key_value_groups, self.is_causal = attention.num_key_value_groups, True
        self.sliding_window = getattr(attention, "sliding_window", getattr(self.config, "sliding_window", None))
        self.q_norm, self.k_norm = (attention._modules.get(name) for name in ("q_norm", "k_norm"))
        self.normalises_all_heads = self.config.family.query_key_norms == "all heads"
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
        query, key, value = (
            split_heads(part, self.head_dim, norm, of_all=self.normalises_all_heads)
            for part, norm in zip(self._project(hidden_states), (self.q_norm, self.k_norm, None), strict=True)
        )
        if self.rotates:
            query, key = rotate_heads(query, position_embeddings), rotate_heads(key, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs
        )
        return self.o_proj(output.flatten(-2)), weights

    def _project(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Queries, keys and values of all heads, each [1, num_tokens, num_heads * head_dim]."""
        if not hasattr(self, "qkv_proj"):
            return [projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        heads = (self.config.num_attention_heads, *[self.config.num_key_value_heads] * 2)
        parts: Sequence[torch.Tensor] = self.qkv_proj(hidden_states).split([n * self.head_dim for n in heads], dim=-1)
        return parts


class SharedKeyValues:
    """K and V of all groups from x, written in one operator for all of them: one each takes a fifteenth of a prompt's
    time in a student."""

    def __init__(self, decoder: Any, leaders: Sequence[HeadAttentionMixin], linear: NativeLinear) -> None:
        self._rotations, self._leaders = decoder.layer_rotations, decoder.layer_map.leaders
        self._first = decoder.layer_map.num_key_value_layers
        self._linear, self._norm = linear, decoder.norm_swiftkv
        self._head_norms = [leader.k_norm for leader in leaders if isinstance(leader.k_norm, NativeRMSNorm)]
        self._rotates = leaders[0].rotates

    @classmethod
    def of(cls, decoder: Any) -> Self | None:
        """None: the groups' projections are no product of ours, or make heads of several kinds."""
        leaders = [decoder.layers[i].self_attn for i in decoder.layer_map.leaders]
        if not leaders or not isinstance(decoder.norm_swiftkv, NativeRMSNorm):
            return None
        if any(not isinstance(leader, HeadAttentionMixin) or leader.normalises_all_heads for leader in leaders):
            return None
        kinds = {(type(leader.k_norm), leader.rotates) for leader in leaders}
        norm, _ = next(iter(kinds))
        linear = getattr(getattr(leaders[0].k_proj_swiftkv, "fused", None), "linear", None)
        if len(kinds) > 1 or not issubclass(norm, NativeRMSNorm | nn.Identity | None):
            return None
        return cls(decoder, leaders, linear) if isinstance(linear, NativeLinear) else None

    def write(self, x: torch.Tensor, rotation: Rotation, cache: Any) -> bool:
        """Write those of x [1, num_tokens, hidden_size] to a `StepCache` at its slots. False: this cannot."""
        rotations = [self._rotations.of(i, rotation) for i in self._leaders] if self._rotates else []
        layers = [cache.read(self._first + group) for group in range(len(self._leaders))]
        keys = layers[0][0]
        if not (isinstance(keys, PagedTensor) and keys.native):
            return False
        if any(one[0] is not rotations[0][0] or one[0].dtype != x.dtype for one in rotations):
            return False
        kernels.write_projected(
            self._linear.rows(x[0], self._norm),
            cache.slots,
            [(keys.rows, values.rows) for keys, values in layers],
            norms=self._head_norms,
            rotation=rotations[0] if rotations else None,
            payload=keys.payload,
        )
        return True
