"""Parts of a decoder, layer by layer: projections, attention windows, cache entries.

Descriptions only, independent of families and `config.json`; other modules compute FLOPs, bytes and memory from them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """Linear maps of equal size in one place. A mixture of experts has `copies` of them, `active` of which run for a
    token."""

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
        """Multiplications and additions for one token, without adding the bias."""
        return 2 * self.active * self.in_features * self.out_features


@dataclass(frozen=True)
class Entry:
    """Cache entry of one token in one layer under one name (keys or values): `heads` vectors of `size`."""

    heads: int
    size: int


@dataclass(frozen=True)
class AttentionShape:
    """Shape of an attention module."""

    query: tuple[Linear, ...]
    key_value: tuple[Linear, ...]
    """Projections that make the cache entries."""
    expansion: tuple[Linear, ...]
    """Projections from cache entries to keys and values at attention time (MLA); empty for others."""
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
    """Parameters of norms on keys before RoPE, shared in the same way."""
    query_norms: int = 0
    """Parameters of norms between query projections, which a student's layer has copies of (MLA)."""
    key_norms: int = 0
    """Parameters of norms between key and value projections, copied in the same way."""

    @property
    def flops_per_pair(self) -> int:
        """Multiplications and additions of score and weighted sum for one query and one key, over all heads."""
        return 2 * self.num_heads * (self.query_size + self.value_size)

    @property
    def query_parameters(self) -> int:
        return sum(linear.parameters for linear in self.query) + self.query_norms

    @property
    def key_value_parameters(self) -> int:
        return sum(linear.parameters for linear in (*self.key_value, *self.expansion)) + self.key_norms

    @property
    def decode_parameters(self) -> int:
        """Parameters of the projections with which deep tokens make their own cache entries."""
        return sum(linear.parameters for linear in self.key_value)

    @property
    def output_parameters(self) -> int:
        return sum(linear.parameters for linear in self.output)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: AttentionShape
    mlp: tuple[Linear, ...]
    """Router (if any), then gate, up and down projections, of routed and of shared experts."""
    window: int | None
    """Tokens a query sees, itself included; None: all before it."""


@dataclass(frozen=True)
class Architecture:
    """A teacher, and the student's settings in its configuration."""

    model_type: str
    """Model type of the teacher."""
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    normalises_inputs: bool
    """Whether the hidden states that attention reads are normalised, and x by norm_swiftkv."""
    num_norms: int
    """Norms of hidden states in a layer."""
    shared_attention: AttentionShape
    """Attention of the student's layers that own the KV projections of a group."""
    max_position_embeddings: int
    dtype: str
    num_key_value_layers: int | None
    """l of a student's configuration; None in a teacher's."""
    prefill_layers: tuple[int, ...] | None
    """Layers that a student's prompts run through, if its configuration lists them."""
    key_value_group_size: int
    early_exit: bool
    decodes_own: bool
    """Whether deep tokens of the student keep K and V of their own in layers >= l."""
