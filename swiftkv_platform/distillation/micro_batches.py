"""A worker's share of some rows as micro batches, and the held-out KL over them. Knows no model and no optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swiftkv_platform.data.packing import PackedRows, rank_rows
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.model.packed_attention import TOKENS_STEP, to_tensors
from swiftkv_platform.planning.steering import num_measured_rows
from swiftkv_platform.specs import TrainingSpec, ValidationSpec

MicroBatch = tuple[dict[str, Tensor], tuple[int, ...]]
"""Tensors of samples end to end, and the lengths of the samples."""


def micro_batches(
    parallel: Parallel, rows: PackedRows, batch: Sequence[int], training: TrainingSpec
) -> list[MicroBatch]:
    """This worker's samples of the rows `batch`, of `micro_batch_size` rows at a time. Every worker has equally many
    micro batches: one whose share is shorter fills it up with a row that no loss counts."""
    mine = rank_rows(batch, parallel.data_rank, parallel.data_size)
    places = [*mine, *batch[: -(-len(batch) // parallel.data_size) - len(mine)]]
    if training.compile:  # compiled layers take batches of one size
        places += [batch[0]] * (-len(places) % training.micro_batch_size)
    made = []
    for start in range(0, len(places), training.micro_batch_size):
        chosen = places[start : start + training.micro_batch_size]
        step = math.lcm(parallel.sequence_parallel_size, TOKENS_STEP)
        multiple = len(chosen) * rows.max_length if training.compile else step
        num_counted = max(len(mine) - start, 0)
        arrays, lengths = rows.end_to_end(chosen, multiple=multiple, num_counted=num_counted)
        tensors = to_tensors(arrays)
        tensors["loss_mask"] = parallel.own_positions(tensors["loss_mask"])
        made.append((tensors, lengths))
    return made


class HeldOut:
    """The measurements of a run over `rows`, which are held out to steer it.

    Args:
        every_steps: steps between two measurements.
    """

    def __init__(self, parallel: Parallel, rows: PackedRows, training: TrainingSpec, *, every_steps: int) -> None:
        assert training.validation is not None, "nothing is measured without"
        assert training.batch_size is not None, "settled before training, see specs.defaults"
        self._parallel, self._rows, self._training = parallel, rows, training
        self.chosen = measured_rows(rows, training.validation, training.batch_size * every_steps)

    def measure(self) -> float:
        """Mean KL(teacher || student) at temperature 1 over the positions that count, in nats; with `objective: lm` the
        loss on the next token. Collective."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch, lengths in micro_batches(self._parallel, self._rows, self.chosen, self._training):
            counted = batch["loss_mask"].sum()
            measured = self._parallel.measure(batch, lengths)
            sums += torch.stack([measured.detach().double().cpu(), counted.double().cpu()])
        total, num_counted = self._parallel.sum(sums).tolist()
        return total / num_counted if num_counted else math.nan


def measured_rows(rows: PackedRows, spec: ValidationSpec, rows_between: int) -> list[int]:
    """Evenly spaced rows, since packing sorts them by the length of their samples."""
    number = min(num_measured_rows(spec, rows.num_tokens / len(rows), rows_between), len(rows))
    return [int(i) for i in np.linspace(0, len(rows) - 1, number).round()]
