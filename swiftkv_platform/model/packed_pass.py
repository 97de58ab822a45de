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
