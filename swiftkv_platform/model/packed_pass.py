"""Forward passes over packed samples that are concatenated in one row, and their deep tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.context import DecoderContext
from swiftkv_platform.model.masks import Masks
from swiftkv_platform.model.packed_attention import (
    SAMPLES,
    AttentionImplementation,
    PackedSamples,
    choose_operator,
    sample_lengths,
)
from swiftkv_platform.model.selection import TokenSelection


def begin_packed(
    decoder: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    attention: AttentionImplementation = "auto",
    dtype: torch.dtype,
) -> DecoderContext:
    """Begin a pass over all rows, concatenated; each sample attends to itself.

    Args:
        input_ids: int64 [batch, num_tokens].
        position_ids: int64 [batch, num_tokens]; they restart with every sample.
        lengths: lengths of the samples; None: derived from the positions, which are then read on the host.
        attention: see `training.attn_implementation`.
        dtype: dtype in which the model computes.
    """
    config, device = decoder.config, input_ids.device
    lengths = sample_lengths(position_ids) if lengths is None else lengths
    operator = choose_operator(attention, config, device, dtype)
    samples = PackedSamples.create(config, lengths, device=device, dtype=dtype, operator=operator)
    masks = Masks((None,) * config.num_hidden_layers)
    flat, positions = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return cast("DecoderContext", decoder.begin(flat, position_ids=positions, masks=masks, **{SAMPLES: samples}))


def with_turns(context: DecoderContext, counts: Tensor) -> DecoderContext:
    """Return the context for layers >= l of a student whose deep tokens, marked by `counts` [num_tokens], keep their
    own K and V. Deep tokens are those that predict a token of an answer; each run of them is a turn. A turn reads
    everything before it, including earlier answers, as a prompt, as in serving."""
    samples: PackedSamples = context.layer_arguments[SAMPLES]
    return replace(context, layer_arguments={**context.layer_arguments, SAMPLES: samples.with_turns(counts)})


class _LayerKeyValues:
    """Cache stand-in that records the K and V of each layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KeyValue] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        self.by_layer[layer] = key, value
        return key, value


@dataclass(frozen=True)
class _TurnKeyValues:
    """Cache stand-in that returns a layer's K and V of all tokens as a prompt's, followed by the deep tokens' own."""

    prompt: _LayerKeyValues

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        keys, values = self.prompt.by_layer[layer]
        return torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)


def lower_turns(
    decoder: Any, context: DecoderContext, turns: DecoderContext, kept: TokenSelection | None
) -> tuple[Tensor, Tensor]:
    """Run layers < l of a student; returns x of all tokens as a prompt's, and of the `kept` ones (None: all) as deep.

    The two differ if prompts bypass layers. From the first of these layers on, deep tokens run separately, over the K
    and V before their turn and their own, as they do in layers >= l. `turns`: result of `with_turns(context)`.
    """
    layer_map = decoder.layer_map
    if not layer_map.gaps:
        x = decoder.lower(context)
        return x, x if kept is None else kept.take(x)
    prompt = _LayerKeyValues()
    reading = replace(context, past_key_values=cast("Any", prompt))
    first, x = layer_map.first_gap, context.hidden
    for i in range(first):
        x = decoder.run_layer(i, x, context)
    deep = x if kept is None else kept.take(x)
    writing = replace(
        turns if kept is None else turns.select(kept), past_key_values=cast("Any", _TurnKeyValues(prompt))
    )
    for i in range(first, layer_map.num_key_value_layers):
        output = decoder.run_layer(i, x, reading)
        x = x if i in layer_map.gaps else output
        deep = decoder.run_layer(i, deep, writing)
    return x, deep


@dataclass(frozen=True)
class DeepTurns:
    """A `DeepWriter` for `PackedSamples.with_turns`: returns K and V from x of all tokens, followed by the kept tokens'
    own."""

    shared: Sequence[KeyValue]

    def write(self, group: int, own: KeyValue) -> KeyValue:
        keys, values = (
            torch.cat((shared, part.to(shared.dtype)), dim=2)
            for shared, part in zip(self.shared[group], own, strict=True)
        )
        return keys, values

    def write_shared(self, group: int) -> None:
        """Do nothing: without a token in layers >= l, nothing attends."""
