"""Schedule of a training run: steps of the learning-rate search, validation measurements and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.training import ValidationSpec

DEFAULT_MEASUREMENTS = 20
"""Default number of validation measurements per run."""
TRAINED_PER_MEASURED_ROW = 10
"""Min ratio of trained rows to measured rows between two measurements. A forward pass takes about half the time of a
training step over the same rows, so measurements take about 5% of a run."""
MIN_MEASURED_ROWS = 4
"""Min rows per measurement, by default. Packing sorts rows by the length of their samples, so a single row may have few
counted tokens, all of one kind, and would choose the model."""
SEARCH_STEPS_SHARE = 0.15
"""Share of a run's steps that the learning-rate search takes."""
MAX_TRIALS = 4
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 4, 40
"""Min and max steps per trial. Shorter runs have no learning-rate search."""


def compute_measurement_interval(spec: ValidationSpec, batch_size: int, total_steps: int) -> int:
    """Return the steps between measurements: a twentieth of the run, but at least the trained rows that
    `MIN_MEASURED_ROWS` need."""
    if spec.every_steps is not None:
        return spec.every_steps
    trained_rows = MIN_MEASURED_ROWS * TRAINED_PER_MEASURED_ROW
    return max(math.ceil(total_steps / DEFAULT_MEASUREMENTS), math.ceil(trained_rows / batch_size))


def count_measured_rows(spec: ValidationSpec, tokens_per_row: float, rows_between: int) -> int:
    """Return the rows per measurement, at least one: up to `max_tokens` tokens, and up to one row per
    `TRAINED_PER_MEASURED_ROW` rows trained between two measurements."""
    return max(min(int(spec.max_tokens / tokens_per_row), rows_between // TRAINED_PER_MEASURED_ROW), 1)


def compute_trial_steps(total_steps: int) -> int | None:
    """Return the steps per trial of the learning-rate search; None if the run is too short for a search."""
    steps = int(SEARCH_STEPS_SHARE * total_steps / MAX_TRIALS)
    return min(steps, MAX_TRIAL_STEPS) if steps >= MIN_TRIAL_STEPS else None


def has_rate_search(spec: JobSpec) -> bool:
    """Whether a run of `spec`, whose defaults are resolved, searches its learning rate if it is long enough."""
    steps = spec.training.max_steps
    long_enough = steps is None or compute_trial_steps(steps) is not None
    return bool(spec.optimizer.rate_search) and spec.training.validation is not None and long_enough


@dataclass(frozen=True)
class RunSchedule:
    """Steps at which a run is saved and measured."""

    total_steps: int
    every_steps: int
    """Steps between regular checkpoints."""
    measurement_interval: int | None
    """Steps between measurements; None: no measurements."""
    best_every: int
    """Min steps between checkpoints of the best state; a multiple of `measurement_interval`."""

    @classmethod
    def from_spec(cls, spec: JobSpec, total_steps: int, *, measures: bool) -> RunSchedule:
        """Make the schedule of a spec whose defaults are resolved. `measures`: whether the run has validation rows."""
        training, checkpoint = spec.training, spec.checkpoint
        if training.validation is None or not measures:
            return cls(total_steps, checkpoint.every_steps, None, 1)
        assert training.batch_size is not None, "set before training by specs.job.resolve_model_defaults"
        interval = compute_measurement_interval(training.validation, training.batch_size, total_steps)
        best_every = interval * -(-(checkpoint.best_every_steps or interval) // interval)
        return cls(total_steps, checkpoint.every_steps, interval, best_every)

    def is_measured(self, step: int) -> bool:
        return self.measurement_interval is not None and (
            step % self.measurement_interval == 0 or step == self.total_steps
        )

    def is_checkpoint_due(self, step: int) -> bool:
        """Whether the state after `step` is saved regardless of its validation KL."""
        return step % self.every_steps == 0 or step == self.total_steps

    def may_be_best(self, step: int) -> bool:
        """Whether the state after `step` may be saved as the best. This depends on the step alone, so that resumed runs
        equal uninterrupted ones."""
        return self.is_checkpoint_due(step) or step % self.best_every == 0
