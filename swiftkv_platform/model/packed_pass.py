"""Forward passes over packed samples that lie end to end, and which of their tokens are deep. It knows decoders and
loss masks, no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.decoder import DecoderContext
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
    """Begin a pass over all rows end to end, whose samples attend by their lengths.

    Args:
        input_ids: int64 [batch, num_tokens].
        position_ids: of the same shape; they restart with every sample.
        lengths: of the samples; None: as the positions say, which the host then reads.
        attention: see `training.attn_implementation`.
        dtype: the model computes in it.
    """
    config, device = decoder.config, input_ids.device
    lengths = sample_lengths(position_ids) if lengths is None else lengths
    operator = choose_operator(attention, config, device, dtype)
    samples = PackedSamples.create(config, lengths, device=device, dtype=dtype, operator=operator)
    masks = Masks((None,) * config.num_hidden_layers)
    flat, positions = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return cast("DecoderContext", decoder.begin(flat, position_ids=positions, masks=masks, **{SAMPLES: samples}))


def with_turns(context: DecoderContext, counts: Tensor) -> DecoderContext:
    """The context of layers >= l of a student that keeps own K and V, where the tokens that `counts` [num_tokens] marks
    are deep: those whose next token an answer says, each run of them a turn. A turn reads what lies before it, earlier
    answers too, as a prompt; so it is when it is served."""
    samples: PackedSamples = context.layer_arguments[SAMPLES]
    return replace(context, layer_arguments={**context.layer_arguments, SAMPLES: samples.with_turns(counts)})


class _LayerKeyValues:
    """K and V by layer, where a family's attention puts those that it caches."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KeyValue] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        self.by_layer[layer] = key, value
        return key, value


@dataclass(frozen=True)
class _TurnKeyValues:
    """Of a layer, K and V of all tokens as a prompt's, and behind them the deep ones' own."""

    prompt: _LayerKeyValues

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        keys, values = self.prompt.by_layer[layer]
        return torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)


def lower_turns(
    decoder: Any, context: DecoderContext, turns: DecoderContext, kept: TokenSelection | None
) -> tuple[Tensor, Tensor]:
    """Layers < l of a student: x of all tokens as a prompt's, and hidden states of the `kept` ones (None: all) there.

    They differ where prompts bypass layers. From the first of these on deep tokens run once more, over K and V of
    what lies before their turn and their own, as they do in layers >= l. `turns`: what `with_turns(context)` gave.
    """
    layer_map = decoder.layer_map
    if not layer_map.bypassed:
        x = decoder.lower(context)
        return x, x if kept is None else kept.take(x)
    prompt = _LayerKeyValues()
    reading = replace(context, past_key_values=cast("Any", prompt))
    first, x = min(layer_map.bypassed), context.hidden
    for i in range(first):
        x = decoder.run_layer(i, x, context)
    deep = x if kept is None else kept.take(x)
    writing = replace(
        turns if kept is None else turns.select(kept), past_key_values=cast("Any", _TurnKeyValues(prompt))
    )
    for i in range(first, layer_map.num_key_value_layers):
        output = decoder.run_layer(i, x, reading)
        x = x if i in layer_map.bypassed else output
        deep = decoder.run_layer(i, deep, writing)
    return x, deep


@dataclass(frozen=True)
class DeepTurns:
    """Keys and values for `PackedSamples.with_turns`: from x those of all tokens, and behind them the kept ones' own. A
    `DeepWriter`."""

    shared: Sequence[KeyValue]

    def write(self, group: int, own: KeyValue) -> KeyValue:
        keys, values = (
            torch.cat((shared, part.to(shared.dtype)), dim=2)
            for shared, part in zip(self.shared[group], own, strict=True)
        )
        return keys, values

    def write_shared(self, group: int) -> None:
        """Nothing: without a token in layers >= l none attends."""
