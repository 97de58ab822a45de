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
from swiftkv_platform.specs import TrainingSpec, ValidationSpec

MEASUREMENTS = 20
"""Measurements of a run whose spec does not say how many."""
SHARE = 10
"""Rows that are trained on between two measurements, at least, for each row that is measured. A forward pass takes
about half the time of a step over the same rows, so measuring takes some 5% of a run's."""


class HeldOut:
    """The measurements of a run over `rows`, which are all that is held out.

    Args:
        total_steps: of the run.
    """

    def __init__(self, parallel: Parallel, rows: PackedRows, training: TrainingSpec, *, total_steps: int) -> None:
        assert training.validation is not None, "nothing is measured without"
        assert training.batch_size is not None, "settled before training, see specs.defaults"
        self._parallel, self._rows, self._training = parallel, rows, training
        self.every_steps = measuring_interval(training.validation, training.batch_size, total_steps)
        self.chosen = measured_rows(rows, training.validation, training.batch_size * self.every_steps)
        self._total_steps = total_steps

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is measured."""
        return step % self.every_steps == 0 or step == self._total_steps

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


def measuring_interval(spec: ValidationSpec, batch_size: int, total_steps: int) -> int:
    """Steps between measurements: a twentieth of the run, where a row fits between two of them."""
    if spec.every_steps is not None:
        return spec.every_steps
    return max(math.ceil(total_steps / MEASUREMENTS), math.ceil(SHARE / batch_size))


def measured_rows(rows: PackedRows, spec: ValidationSpec, rows_between: int) -> list[int]:
    """Evenly spaced rows, since packing sorts them by the length of their samples: of `max_tokens` tokens together, and
    one for each ten that are trained on between two measurements, but one at least."""
    of_tokens = int(spec.max_tokens / (rows.num_tokens / len(rows)))
    number = min(max(min(of_tokens, rows_between // SHARE), 1), len(rows))
    return [int(i) for i in np.linspace(0, len(rows) - 1, number).round()]
