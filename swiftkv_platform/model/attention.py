"""Attention of layers >= l: queries from the layer's input, keys and values from x, the hidden state after layer l - 1.

One class per kind of attention: `HeadAttentionMixin` (keys and values by head: MHA, GQA, MQA) and
`LatentAttentionMixin` (MLA). They implement projections, RoPE and transformers' attention interface. The decoder
selects the tokens. Source: paper, section 3.1 (SingleInputKV) and 3.2 (AcrossKV).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

Rotation = torch.Tensor | tuple[torch.Tensor, ...]
"""Output of a family's rotary embedding for a forward pass: tensors [batch, num_tokens, ...]."""
KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Two tensors [batch, num_heads, num_tokens, dim]: keys with RoPE and values, or what a cache layer stores for them."""

MakeKeyValue = Callable[["SwiftKVAttentionMixin", torch.Tensor, Rotation], KeyValue]
"""Function that makes keys and values by head from a layer's attention, its normalized input [batch, num_tokens,
hidden_size] and its rotation."""


def normalize_attention_input(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the norm before a layer's attention, if the family has one, to the layer's input."""
    norm = getattr(layer, "input_layernorm", None)
    return hidden if norm is None else norm(hidden)


class SwiftKVAttentionMixin(nn.Module):
    """Mixin for a family's attention module in layers >= l, with one subclass per kind of attention.

    Without `shared_key_value` it runs the teacher's attention, with it the student's.

    A cache layer stores two tensors [batch, num_heads, num_tokens, dim]: keys with RoPE and values, or for MLA the
    latent and the key part with RoPE, one head each. `past_key_values.update(first, second, cache_layer)` appends to
    both and returns them over the whole context, in all layers and modes. The first layer of a group, its leader,
    expands them to the group's keys and values.
    """

    key_value_modules: ClassVar[tuple[str, ...]]
    """Teacher modules that group leaders copy to `{name}_swiftkv`."""
    decode_modules: ClassVar[tuple[str, ...]]
    """Teacher modules that leaders also copy to `{name}_decode_swiftkv` if deep tokens have their own K and V."""
    shared_heads: nn.Module | None
    """Stand-in for this module in calls of attention functions if the student has another number of KV heads."""
    # Attributes of the family's own attention.
    config: Any
    scaling: float
    attention_dropout: float
    o_proj: nn.Module
    o_proj_swiftkv: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # the family's own projections
        self.shared_heads = None
        twins = {f"{name}_swiftkv": name for name in self.list_copied_modules(config)}
        if layer_idx in config.layer_map.leaders:
            twins |= {f"{name}_swiftkv": name for name in self.key_value_modules}
            if config.layer_map.deep_leaders:
                twins |= {f"{name}_decode_swiftkv": name for name in self.decode_modules}
        for twin, name in twins.items():
            setattr(self, twin, copy.deepcopy(self.get_teacher_module(name)))
        if not config.swiftkv_teacher_weights:
            self.drop_teacher()

    @classmethod
    def list_query_modules(cls, config: Any, /) -> tuple[str, ...]:
        """Return the names of the teacher's modules that make queries, in order of application."""
        raise NotImplementedError

    @classmethod
    def list_copied_modules(cls, config: Any, /) -> tuple[str, ...]:
        """Return the names of the teacher's modules that every layer >= l copies to `{name}_swiftkv`."""
        return cls.list_query_modules(config) + (("o_proj",) if config.own_output_projection else ())

    @classmethod
    def locate_teacher_rows(cls, _config: Any, name: str, /) -> tuple[str, slice | None]:
        """Return the teacher's module that contains the projection `name`, and the projection's rows; None: all
        rows."""
        return name, None

    @classmethod
    def list_teacher_modules(cls, config: Any, /) -> tuple[str, ...]:
        """Return the names of the modules that only the teacher uses."""
        names = cls.list_copied_modules(config) + cls.key_value_modules
        return tuple(dict.fromkeys(cls.locate_teacher_rows(config, name)[0] for name in names))

    def get_teacher_module(self, name: str) -> Any:
        """Return the teacher's module `name`. A part of a fused module is returned as a view."""
        module, rows = self.locate_teacher_rows(self.config, name)
        whole = getattr(self, module)
        if rows is None:
            return whole
        part = nn.Linear(whole.in_features, rows.stop - rows.start, bias=False, device="meta")
        part.weight = nn.Parameter(whole.weight.detach()[rows])
        return part

    @property
    def output_projection(self) -> nn.Module:
        """The student's output projection."""
        return self.o_proj_swiftkv if self.config.own_output_projection else self.o_proj

    @property
    def input_projections(self) -> Sequence[nn.Linear]:
        """Projections of norm_swiftkv(x) in a leader. Inference fuses them into one matrix product."""
        raise NotImplementedError

    @property
    def decode_projections(self) -> Sequence[nn.Linear]:
        """Projections of deep tokens' normalized input in a leader, with the same outputs as `input_projections`."""
        return [getattr(self, f"{name}_decode_swiftkv") for name in self.decode_modules]

    def make_cache_entry(self, projected: Sequence[torch.Tensor], rotation: Rotation) -> KeyValue:
        """Return the two tensors that the cache stores for a leader's group.

        Args:
            projected: outputs of `input_projections` or `decode_projections`, each [batch, num_tokens, out_features].
            rotation: rotation of these tokens.
        """
        raise NotImplementedError

    def project_own_key_value(self, hidden_states: torch.Tensor, rotation: Rotation) -> KeyValue:
        """Return the two tensors that the cache stores for deep tokens, from the leader's normalized input [batch,
        num_tokens, hidden_size]."""
        return self.make_cache_entry([projection(hidden_states) for projection in self.decode_projections], rotation)

    def expand_key_value(self, stored: KeyValue) -> KeyValue:
        """Return the keys and values by head of the leader's group from the two tensors of its cache layer."""
        return stored

    def project_query(self, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return the queries with RoPE [batch, num_heads, num_tokens, dim] for this layer's normalized input."""
        raise NotImplementedError

    def list_projecting_modules(self) -> list[nn.Module]:
        """Return a leader's modules that make the two tensors that the cache stores for its group."""
        expanding = self.list_expanding_modules()
        modules = [getattr(self, f"{name}_swiftkv") for name in self.key_value_modules]
        return [module for module in modules if module not in expanding]

    def list_expanding_modules(self) -> list[nn.Module]:
        """Return a leader's modules that expand the cached tensors to the group's keys and values."""
        return []

    def list_shared_norms(self) -> list[nn.Module]:
        """Return a leader's norms on its group's keys, which teacher and student share."""
        return []

    def list_teacher_only_modules(self) -> tuple[str, ...]:
        """Return the names of the modules that the student does not run."""
        return self.list_teacher_modules(self.config)

    def drop_teacher(self) -> None:
        for name in self.list_teacher_modules(self.config):
            delattr(self, name)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        shared_key_value: KeyValue | MakeKeyValue | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [batch, num_tokens, hidden_size] and the attention weights, if the backend returns any.

        Args:
            hidden_states: normalized input of this layer, [batch, num_tokens, hidden_size].
            position_embeddings: rotation of these tokens.
            shared_key_value: the group's keys and values by head over the whole context, or a function that makes them;
                None runs the teacher's attention.
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
        if callable(shared_key_value):
            shared_key_value = shared_key_value(self, hidden_states, position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self if self.shared_heads is None else self.shared_heads,
            self.project_query(hidden_states, position_embeddings),
            *shared_key_value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=getattr(self, "sliding_window", getattr(self.config, "sliding_window", None)),
            **kwargs,
        )  # [batch, num_tokens, num_heads, dim]
        output = self.output_projection(output.flatten(-2).contiguous())
        dropout = getattr(self, "residual_dropout", 0.0)  # Seed-OSS
        return nn.functional.dropout(output, p=dropout, training=self.training), weights


class _StudentHeads(nn.Module):
    """Module attributes for transformers' attention functions, for students with another number of key-value heads than
    the teacher (paper, appendix C)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads_swiftkv
        self.is_causal = True


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply RoPE to `x` [batch, num_heads, num_tokens, head_dim], or to the first dimensions if `rotation` has fewer.
    Dimension j pairs with j + dim / 2: x cos + (-x2, x1) sin."""
    size = rotation[0].shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rotation), x[..., size:]), dim=-1)
    cos, sin = (part.unsqueeze(1) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated.to(x.dtype)  # OLMo's factors are float32


def split_heads(
    projected: torch.Tensor, head_dim: int, norm: nn.Module | None = None, *, over_all_heads: bool = False
) -> torch.Tensor:
    """[batch, num_tokens, num_heads * head_dim] -> [batch, num_heads, num_tokens, head_dim]. `norm` applies to each
    head, or with `over_all_heads` to all heads together."""
    if norm is not None and over_all_heads:
        projected = norm(projected)
    heads: torch.Tensor = projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    return heads if norm is None or over_all_heads else norm(heads)


class HeadAttentionMixin(SwiftKVAttentionMixin):
    """Attention with keys and values by head (MHA, GQA, MQA), RoPE on all or the first dimensions of a head, and the
    family's head norms."""

    key_value_modules = decode_modules = ("k_proj", "v_proj")
    rotate: Callable[[torch.Tensor, Rotation], torch.Tensor] = staticmethod(rotate)
    """Function that applies RoPE. The engine replaces it by a faster one."""
    head_dim: int
    q_proj_swiftkv: nn.Linear
    k_proj_swiftkv: nn.Linear
    v_proj_swiftkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rotates = True
        if config.family.has_layers_without_rope:  # a group shares its keys, so all its layers rotate or none does
            self.rotates = bool(config.no_rope_layers[config.layer_map.get_leader(layer_idx)])
        self.has_head_norms = config.family.query_key_norms is not None
        if not self.has_head_norms:
            self.q_norm = self.k_norm = nn.Identity()
        self.has_joint_head_norm = config.family.query_key_norms == "all heads"
        if config.num_key_value_heads_swiftkv is not None:
            self._share_heads(config, layer_idx)

    def _share_heads(self, config: Any, layer_idx: int) -> None:
        self.shared_heads = _StudentHeads(config, layer_idx)
        if layer_idx in config.layer_map.leaders:
            size = config.num_key_value_heads_swiftkv * self.head_dim
            kinds = ("swiftkv", "decode_swiftkv") if config.layer_map.deep_leaders else ("swiftkv",)
            for name in (f"{module}_{kind}" for module in self.key_value_modules for kind in kinds):
                twin = getattr(self, name)
                setattr(self, name, nn.Linear(twin.in_features, size, bias=twin.bias is not None))

    @classmethod
    def list_query_modules(cls, _config: Any, /) -> tuple[str, ...]:
        return ("q_proj",)

    @classmethod
    def locate_teacher_rows(cls, config: Any, name: str, /) -> tuple[str, slice | None]:
        if not config.family.has_fused_projections or name not in ("q_proj", "k_proj", "v_proj"):
            return name, None
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        first = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[name]
        return "qkv_proj", slice(first, first + (queries if name == "q_proj" else keys))

    @property
    def input_projections(self) -> Sequence[nn.Linear]:
        return self.k_proj_swiftkv, self.v_proj_swiftkv

    def make_cache_entry(self, projected: Sequence[torch.Tensor], rotation: Rotation) -> KeyValue:
        keys, values = projected
        keys = split_heads(keys, self.head_dim, self.k_norm, over_all_heads=self.has_joint_head_norm)
        return self._apply_rope(keys, rotation), split_heads(values, self.head_dim)

    def list_shared_norms(self) -> list[nn.Module]:
        return [self.k_norm] if self.has_head_norms else []

    def list_teacher_only_modules(self) -> tuple[str, ...]:
        follows = self.has_head_norms and not hasattr(self, "k_proj_swiftkv")
        return (*super().list_teacher_only_modules(), *(["k_norm"] if follows else []))

    def project_query(self, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        projected = self.q_proj_swiftkv(hidden_states)
        heads = split_heads(projected, self.head_dim, self.q_norm, over_all_heads=self.has_joint_head_norm)
        return self._apply_rope(heads, rotation)

    def _apply_rope(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return self.rotate(heads, rotation) if self.rotates else heads


class LatentAttentionMixin(SwiftKVAttentionMixin):
    """Multi-head latent attention (MLA, DeepSeek-V2): queries from a full projection (`q_lora_rank` null) or a low-rank
    one; keys and values from a shared latent.

        norm_swiftkv(x) -> kv_a_proj_with_mqa -> latent -> norm -> kv_b_proj -> keys without RoPE and values, by head
                                              -> key part with RoPE, one for all heads

    The cache holds the normalized latent and the key part with RoPE: kv_lora_rank + qk_rope_head_dim numbers per token
    and layer. Keys and values are expanded from them once per group. Source: arXiv 2405.04434, section 2.1.
    """

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
    def list_query_modules(cls, config: Any, /) -> tuple[str, ...]:
        return ("q_proj",) if config.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")

    @property
    def input_projections(self) -> Sequence[nn.Linear]:
        return (self.kv_a_proj_with_mqa_swiftkv,)

    def make_cache_entry(self, projected: Sequence[torch.Tensor], rotation: Rotation) -> KeyValue:
        """Return the normalized latent [batch, 1, num_tokens, kv_lora_rank] and the keys' RoPE part [.., rope_dim]."""
        latent, rotary_key = projected[0].unsqueeze(1).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm_swiftkv(latent), rotate_pairs(rotary_key, rotation)

    def expand_key_value(self, stored: KeyValue) -> KeyValue:
        """Return keys [batch, num_heads, context_len, qk_head_dim] and values [.., v_head_dim] of a stored latent."""
        latent, rotary_key = stored
        by_head = self.kv_b_proj_swiftkv(latent.squeeze(1)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        keys, values = by_head.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return torch.cat((keys, rotary_key.expand(-1, keys.shape[1], -1, -1)), dim=-1), values

    def list_expanding_modules(self) -> list[nn.Module]:
        return [self.kv_b_proj_swiftkv]

    def project_query(self, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        projected = hidden_states
        for name in self.list_query_modules(self.config):
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
