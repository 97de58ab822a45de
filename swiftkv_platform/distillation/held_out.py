"""Held-out KL during training, over a few fixed rows, so that two measurements differ by the student alone. Knows no
schedule and no optimizer.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.distillation.micro_batches import micro_batches
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.planning.steering import num_measured_rows
from swiftkv_platform.specs import TrainingSpec, ValidationSpec


class HeldOut:
    """The measurements of a run over `rows`, which are all that is held out.

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
