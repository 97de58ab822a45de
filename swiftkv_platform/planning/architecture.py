"""Parts of a decoder, layer by layer: projections, attention windows, cache entries.

It counts nothing: FLOPs, bytes and memory are computed from what stands here. It knows no family and no `config.json`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """Equal linear maps of one place; a mixture of experts has `copies` of them, and a token meets `active`."""

    in_features: int
    out_features: int
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * (self.in_features * self.out_features + self.bias * self.out_features)

    @property
    def flops(self) -> int:
        """Multiplications and additions for one token; adding the bias is not counted."""
        return 2 * self.active * self.in_features * self.out_features


@dataclass(frozen=True)
class Entry:
    """Cache entry of one token in one layer under one name (keys or values): `heads` vectors of `size`."""

    heads: int
    size: int


@dataclass(frozen=True)
class AttentionShape:
    """One attention module."""

    query: tuple[Linear, ...]
    key_value: tuple[Linear, ...]
    """Projections that the cache entries come from."""
    expansion: tuple[Linear, ...]
    """Projections from cache entries to keys and values whenever they are attended to (MLA); else none."""
    output: tuple[Linear, ...]
    num_heads: int
    """Query heads."""
    query_size: int
    """Size of a head's query and key."""
    value_size: int
    entries: tuple[Entry, ...]
    shared_query_norms: int = 0
    """Parameters of norms on queries before RoPE, which a student's layer shares with its teacher's (Qwen3)."""
    shared_key_norms: int = 0
    """Parameters of norms on keys before RoPE, likewise."""
    query_norms: int = 0
    """Parameters of norms between query projections, which a student's layer has copies of (MLA)."""
    key_norms: int = 0
    """Parameters of norms between key and value projections, likewise."""

    @property
    def flops_per_pair(self) -> int:
        """Scores and weighted sum for one query and one key, all heads."""
        return 2 * self.num_heads * (self.query_size + self.value_size)

    @property
    def query_parameters(self) -> int:
        return sum(linear.parameters for linear in self.query) + self.query_norms

    @property
    def key_value_parameters(self) -> int:
        return sum(linear.parameters for linear in (*self.key_value, *self.expansion)) + self.key_norms

    @property
    def decode_parameters(self) -> int:
        """Parameters of the projections by which deep tokens make cache entries of their own."""
        return sum(linear.parameters for linear in self.key_value)

    @property
    def output_parameters(self) -> int:
        return sum(linear.parameters for linear in self.output)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: AttentionShape
    mlp: tuple[Linear, ...]
    """Router, if there is one, then gate, up and down; of routed and of shared experts."""
    window: int | None
    """Tokens a query sees, itself included; None: all before it."""


@dataclass(frozen=True)
class Architecture:
    """A teacher, and what its configuration says of a student."""

    model_type: str
    """The teacher's."""
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    normalises_inputs: bool
    """Whether the hidden states that attention reads are normalised, and x by norm_swiftkv."""
    num_norms: int
    """Norms of hidden states in a layer."""
    shared_attention: AttentionShape
    """Attention of the layers that own a group's KV projections in the student."""
    max_position_embeddings: int
    dtype: str
    num_key_value_layers: int | None
    """l of a student's configuration; None in a teacher's."""
    prefill_layers: tuple[int, ...] | None
    """Layers that prompts of a student run through, where its configuration lists them."""
    key_value_group_size: int
    early_exit: bool
    decodes_own: bool
    """Whether deep tokens of the student keep K and V of their own in layers >= l."""
