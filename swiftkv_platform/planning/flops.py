"""Multiplications and additions of a forward pass by component, in closed form.

Two conventions:

- `executed`: what our forward pass runs. The embedding is a look-up; the head runs for the positions whose logits are
  asked for; of a prompt, only those positions run through layers >= l and those below that prompts bypass.
- `paper` (table 1): the vocabulary counts for every token, embedding and head, and no prompt token enters layers >= l.

Attention counts the pairs of query and key that the causal mask (and a window) lets through, as kernels that skip
masked blocks run them; `square` counts the whole rectangle, as plain matrix products do. Norms, activations, RoPE and
the softmax are left out, as in the paper.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from swiftkv_platform.planning.architecture import Architecture, Linear
from swiftkv_platform.planning.kv_cache import cache_layers
from swiftkv_platform.planning.layers import LayerMap

Convention = Literal["paper", "executed"]


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward pass; the sum over its tokens."""

    vocabulary: float = 0
    query: float = 0
    key_value: float = 0
    """Keys and values, or the latent they come from, and its expansion at attention time (MLA)."""
    output: float = 0
    mlp: float = 0
    """MLP; a mixture of experts counts the router and the active experts."""
    attention: float = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Flops:
        return Flops(*(factor * value for value in astuple(self)))

    def __truediv__(self, divisor: float) -> Flops:
        return Flops(*(value / divisor for value in astuple(self)))

    @property
    def total(self) -> float:
        total: float = sum(astuple(self))
        return total

    @property
    def linear(self) -> float:
        return self.total - self.attention


def forward_flops(
    model: Architecture,
    layer_map: LayerMap,
    *,
    num_tokens: int,
    num_kept: int,
    num_logits: int,
    past: int = 0,
    square: bool = False,
) -> Flops:
    """One forward pass of the student, `executed` convention; a dense map (l = L) gives the teacher.

    Args:
        num_tokens: new tokens of one sequence.
        num_kept: the last of these tokens, which run through layers >= l and through layers that the others bypass.
        num_logits: positions whose logits are computed.
        past: tokens in the cache before them.
        square: count attention as plain matrix products run it, over every key that the cache holds.
    """
    total = Flops(vocabulary=num_logits * Linear(model.hidden_size, model.vocab_size).flops)
    leaders, bypassed = frozenset(layer_map.leaders), frozenset(layer_map.bypassed)
    cache = cache_layers(model, layer_map)
    for i, layer in enumerate(model.layers):
        upper = i >= layer_map.num_key_value_layers
        deep_only = upper or i in bypassed
        attention, cache_window = cache[layer_map.cache_layer(i)]
        num_queries = num_kept if deep_only else num_tokens
        if square:
            cached = past if cache_window is None else min(past, cache_window - 1)
            pairs = num_queries * (cached + num_tokens)
        else:
            pairs = attention_pairs(num_queries, past + num_tokens - num_queries, layer.window)
        computes_kv = not upper or i in leaders
        num_attended = past + num_tokens if num_queries else 0
        total += Flops(
            query=num_queries * maps_flops(attention.query),
            key_value=computes_kv
            * (num_tokens * maps_flops(attention.key_value) + num_attended * maps_flops(attention.expansion)),
            output=num_queries * maps_flops(attention.output),
            mlp=num_queries * maps_flops(layer.mlp),
            attention=pairs * attention.flops_per_pair,
        )
    return total


def prefill_flops(
    model: Architecture, layer_map: LayerMap, sequence_length: int, convention: Convention, *, square: bool = False
) -> Flops:
    """Return the FLOPs of a whole prompt, up to the logits of its last token."""
    if convention == "executed":
        return forward_flops(model, layer_map, num_tokens=sequence_length, num_kept=1, num_logits=1, square=square)
    layers = forward_flops(model, layer_map, num_tokens=sequence_length, num_kept=0, num_logits=0, square=square)
    embedding_and_head = 2 * Linear(model.hidden_size, model.vocab_size).flops
    return layers + Flops(vocabulary=sequence_length * embedding_and_head)


def decode_flops(model: Architecture, layer_map: LayerMap, context: int) -> Flops:
    """Return the FLOPs of one decode step whose token sees `context` tokens, itself included."""
    return forward_flops(model, layer_map, num_tokens=1, num_kept=1, num_logits=1, past=context - 1)


def attention_pairs(num_queries: int, past: int, window: int | None) -> int:
    """Count the pairs of query and key for `num_queries` tokens after `past`: query t (1-based) sees min(past + t,
    window)."""
    window = window or past + num_queries
    growing = min(max(window - past, 0), num_queries)  # queries that see all tokens before them
    return growing * past + growing * (growing + 1) // 2 + (num_queries - growing) * window


def maps_flops(maps: tuple[Linear, ...]) -> int:
    return sum(linear.flops for linear in maps)
