"""Attention of layers >= l: their own query, keys and values that come from the hidden state after layer l - 1.

One class a kind of attention: `HeadAttentionMixin` (keys and values by head: MHA, GQA, MQA) here, and
`LatentAttentionMixin` (MLA) in `latent_attention.py`. They know projections, RoPE and transformers' attention
interface; which tokens are computed is the decoder's business. Source: paper, section 3.1 (SingleInputKV) and 3.2
(AcrossKV).
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
"""Two tensors [batch, num_heads, num_tokens, dim] of one cache layer or one attention: keys with RoPE and values, or
what stands for them in the cache."""

MakeKeyValue = Callable[["SwiftKVAttentionMixin", torch.Tensor, Rotation], KeyValue]
"""Function that gives a layer its group's keys and values by head, by the layer's normalised input [batch, num_tokens,
hidden_size] and rotation."""


def attention_input(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Input of a layer's attention, from that of the layer: normalised where the family does so."""
    norm = getattr(layer, "input_layernorm", None)
    return hidden if norm is None else norm(hidden)


class SwiftKVAttentionMixin(nn.Module):
    """Mixed into a family's attention module for layers >= l; a kind of attention is a subclass.

    Without `shared_key_value` it is the family's own attention (the teacher); with it, the student's.

    What a cache layer stores is two tensors [batch, num_heads, num_tokens, dim], handed over by
    `past_key_values.update(first, second, cache_layer)`, which returns both over the whole context: keys with RoPE and
    values, or for MLA the latent and the key part that carries RoPE, one head each. That holds below layer l and in
    teacher mode too. A leader turns what the cache returns into the keys and values of its group.
    """

    key_value_modules: ClassVar[tuple[str, ...]]
    """The teacher's modules that group leaders have a twin of, `{name}_swiftkv`."""
    decode_modules: ClassVar[tuple[str, ...]]
    """Those of them of which leaders have a second twin, `{name}_decode_swiftkv`, where deep tokens keep K and V of
    their own."""
    shared_heads: nn.Module | None
    """Stands for this module in attention functions where the student's key-value heads are not the teacher's."""
    # What the family's own attention brings.
    config: Any
    scaling: float
    attention_dropout: float
    o_proj: nn.Module
    o_proj_swiftkv: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # the family's own projections
        self.shared_heads = None
        twins = {f"{name}_swiftkv": name for name in self.own_modules(config)}
        if layer_idx in config.layer_map.leaders:
            twins |= {f"{name}_swiftkv": name for name in self.key_value_modules}
            if config.decodes_own:
                twins |= {f"{name}_decode_swiftkv": name for name in self.decode_modules}
        for twin, name in twins.items():
            setattr(self, twin, copy.deepcopy(self.of_teacher(name)))
        if not config.swiftkv_teacher_weights:
            self.drop_teacher()

    @classmethod
    def query_modules(cls, config: Any, /) -> tuple[str, ...]:
        """The teacher's modules that make queries, in the order the hidden state runs through."""
        raise NotImplementedError

    @classmethod
    def own_modules(cls, config: Any, /) -> tuple[str, ...]:
        """The teacher's modules that every layer >= l has a twin of."""
        return cls.query_modules(config) + (("o_proj",) if config.own_output_projection else ())

    @classmethod
    def rows_of_teacher(cls, _config: Any, name: str, /) -> tuple[str, slice | None]:
        """The teacher's module that makes what `name` does, and its rows that do; None: all."""
        return name, None

    @classmethod
    def teacher_modules(cls, config: Any, /) -> tuple[str, ...]:
        """Names of the modules that only the teacher has a use for."""
        names = cls.own_modules(config) + cls.key_value_modules
        return tuple(dict.fromkeys(cls.rows_of_teacher(config, name)[0] for name in names))

    def of_teacher(self, name: str) -> Any:
        """The teacher's module `name`; of one that fuses several, its part as a linear map over the same memory."""
        module, rows = self.rows_of_teacher(self.config, name)
        whole = getattr(self, module)
        if rows is None:
            return whole
        part = nn.Linear(whole.in_features, rows.stop - rows.start, bias=False, device="meta")
        part.weight = nn.Parameter(whole.weight.detach()[rows])
        return part

    @property
    def output_projection(self) -> nn.Module:
        """Projection that the student's heads leave through."""
        return self.o_proj_swiftkv if self.config.own_output_projection else self.o_proj

    @property
    def input_projections(self) -> Sequence[nn.Linear]:
        """Projections of a leader that norm_swiftkv(x) enters. Inference makes one matrix product of all."""
        raise NotImplementedError

    @property
    def decode_projections(self) -> Sequence[nn.Linear]:
        """Projections of a leader that a deep token's normalised input enters; they put out what `input_projections`
        do."""
        return [getattr(self, f"{name}_decode_swiftkv") for name in self.decode_modules]

    def shape_key_value(self, projected: Sequence[torch.Tensor], rotation: Rotation) -> KeyValue:
        """Return what the cache stores of a leader's group.

        Args:
            projected: outputs of `input_projections` or `decode_projections`, each [batch, num_tokens, out_features].
            rotation: of these tokens.
        """
        raise NotImplementedError

    def own_key_value(self, hidden_states: torch.Tensor, rotation: Rotation) -> KeyValue:
        """Return what the cache stores of deep tokens, by this leader's normalised input [batch, num_tokens,
        hidden_size]."""
        return self.shape_key_value([projection(hidden_states) for projection in self.decode_projections], rotation)

    def expand_key_value(self, stored: KeyValue) -> KeyValue:
        """Keys and values by head of a leader's group, from what its cache layer holds."""
        return stored

    def project_query(self, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Queries with RoPE [batch, num_heads, num_tokens, dim] from this layer's normalised input."""
        raise NotImplementedError

    def projecting_modules(self) -> list[nn.Module]:
        """A leader's modules that make what the cache stores of its whole group."""
        expanding = self.expanding_modules()
        modules = [getattr(self, f"{name}_swiftkv") for name in self.key_value_modules]
        return [module for module in modules if module not in expanding]

    def expanding_modules(self) -> list[nn.Module]:
        """A leader's modules that turn it into keys and values, when the first layer of the group attends."""
        return []

    def shared_norms(self) -> list[nn.Module]:
        """A leader's norms that the keys of its whole group go through, and the teacher's in this layer."""
        return []

    def idle_modules(self) -> tuple[str, ...]:
        """Names of the modules that the student does not run."""
        return self.teacher_modules(self.config)

    def drop_teacher(self) -> None:
        for name in self.teacher_modules(self.config):
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
        """Attention output [batch, num_tokens, hidden_size] and weights (None unless the backend returns them).

        Args:
            hidden_states: normalised input of this layer, [batch, num_tokens, hidden_size].
            position_embeddings: rotation of these tokens.
            shared_key_value: the group's keys and values by head over the whole context, or what makes them of this
                layer's input; None runs the teacher's attention.
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


class _SharedHeads(nn.Module):
    """Attributes that transformers' attention functions read of a module, for students whose key-value heads are not
    the teacher's (paper, appendix C)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads_swiftkv
        self.is_causal = True


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply RoPE to `x` [batch, num_heads, num_tokens, head_dim]; dimension j pairs with j + head_dim / 2. Where there
    are factors for fewer dimensions, these are the first, and the others stay."""
    size = rotation[0].shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rotation), x[..., size:]), dim=-1)
    cos, sin = (part.unsqueeze(1) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated.to(x.dtype)  # OLMo's factors are float32


def split_heads(
    projected: torch.Tensor, head_dim: int, norm: nn.Module | None = None, *, of_all: bool = False
) -> torch.Tensor:
    """[batch, num_tokens, num_heads * head_dim] -> [batch, num_heads, num_tokens, head_dim], normalised by `norm`, each
    head by itself or, with `of_all`, all together."""
    if norm is not None and of_all:
        projected = norm(projected)
    heads: torch.Tensor = projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    return heads if norm is None or of_all else norm(heads)


class HeadAttentionMixin(SwiftKVAttentionMixin):
    """Keys and values by head (MHA, GQA, MQA), RoPE over the head or its first dimensions, norms on heads where the
    family has them."""

    key_value_modules = decode_modules = ("k_proj", "v_proj")
    rotate: Callable[[torch.Tensor, Rotation], torch.Tensor] = staticmethod(rotate)
    """An instance may be given a faster one."""
    head_dim: int
    q_proj_swiftkv: nn.Linear
    k_proj_swiftkv: nn.Linear
    v_proj_swiftkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.rotates = True
        if config.family.has_unrotated_layers:  # queries and keys of a group meet: all are rotated, or none
            self.rotates = bool(config.no_rope_layers[config.layer_map.leader(layer_idx)])
        self.normalises_heads = config.family.query_key_norms is not None
        if not self.normalises_heads:
            self.q_norm = self.k_norm = nn.Identity()
        self.normalises_all_heads = config.family.query_key_norms == "all heads"
        if config.num_key_value_heads_swiftkv is not None:
            self._share_heads(config, layer_idx)

    def _share_heads(self, config: Any, layer_idx: int) -> None:
        self.shared_heads = _SharedHeads(config, layer_idx)
        if layer_idx in config.layer_map.leaders:
            size = config.num_key_value_heads_swiftkv * self.head_dim
            kinds = ("swiftkv", "decode_swiftkv") if config.decodes_own else ("swiftkv",)
            for name in (f"{module}_{kind}" for module in self.key_value_modules for kind in kinds):
                twin = getattr(self, name)
                setattr(self, name, nn.Linear(twin.in_features, size, bias=twin.bias is not None))

    @classmethod
    def query_modules(cls, _config: Any, /) -> tuple[str, ...]:
        return ("q_proj",)

    @classmethod
    def rows_of_teacher(cls, config: Any, name: str, /) -> tuple[str, slice | None]:
        if not config.family.fuses_projections or name not in ("q_proj", "k_proj", "v_proj"):
            return name, None
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        first = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[name]
        return "qkv_proj", slice(first, first + (queries if name == "q_proj" else keys))

    @property
    def input_projections(self) -> Sequence[nn.Linear]:
        return self.k_proj_swiftkv, self.v_proj_swiftkv

    def shape_key_value(self, projected: Sequence[torch.Tensor], rotation: Rotation) -> KeyValue:
        keys, values = projected
        keys = split_heads(keys, self.head_dim, self.k_norm, of_all=self.normalises_all_heads)
        return self._place(keys, rotation), split_heads(values, self.head_dim)

    def shared_norms(self) -> list[nn.Module]:
        return [self.k_norm] if self.normalises_heads else []

    def idle_modules(self) -> tuple[str, ...]:
        follows = self.normalises_heads and not hasattr(self, "k_proj_swiftkv")
        return (*super().idle_modules(), *(["k_norm"] if follows else []))

    def project_query(self, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        projected = self.q_proj_swiftkv(hidden_states)
        heads = split_heads(projected, self.head_dim, self.q_norm, of_all=self.normalises_all_heads)
        return self._place(heads, rotation)

    def _place(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return self.rotate(heads, rotation) if self.rotates else heads
