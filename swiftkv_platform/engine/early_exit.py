"""Choice of next tokens at layer l. Knows no queue; the source is the paper, appendix E.

A token at layer l has the KV of every later layer, so leaving there costs later tokens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swiftkv_platform.engine.batch import Batch
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.transfers import take


@dataclass(frozen=True)
class Exits:
    """The sequences of a step whose next token the exit head chooses."""

    at: dict[int, int]
    """Row of `logits` by index into the schedule."""
    logits: torch.Tensor
    """[num_exits, vocab_size], float32."""


def exiting(model: Any, x: torch.Tensor, scheduled: Sequence[ScheduledSequence], batch: Batch) -> Exits:
    """Sequences in mode `threshold` whose exit head is sure enough: its largest probability, at temperature 1 and
    before any sampling parameter, reaches the request's threshold.

    Args:
        x: hidden states after layer l - 1, [1, num_tokens, hidden_size].
    """
    thresholds = {
        index: scheduled[index].sequence.params.early_exit.threshold
        for index in batch.next_token_rows
        if scheduled[index].sequence.params.early_exit.mode == "threshold"
    }
    if not thresholds:
        return Exits({}, x.new_empty(0))
    rows = [batch.next_token_rows[index][0] for index in thresholds]
    logits = model.exit_logits(take(x[0], rows)).float()
    confidence = logits.softmax(dim=-1).amax(dim=-1).tolist()
    sure = [(row, index) for row, (index, threshold) in enumerate(thresholds.items()) if confidence[row] >= threshold]
    return Exits({index: at for at, (_, index) in enumerate(sure)}, take(logits, [row for row, _ in sure]))
