"""Schedule of a run that its held-out KL steers: steps of the search for a rate, measurements, and checkpoints. The
trainer follows it and the planner counts it. Knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.training import ValidationSpec

MEASUREMENTS = 20
"""Measurements of a run whose spec does not say how many."""
SHARE = 10
"""Rows that are trained on between two measurements, at least, for each row that is measured. A forward pass takes
about half the time of a step over the same rows, so measuring takes some 5% of a run's."""
BUDGET = 0.15
"""Steps of the search for a rate, as a share of the run's."""
MAX_TRIALS = 4
FEWEST_STEPS, MOST_STEPS = 4, 40
"""Steps of a trial; a run too short for the fewest is not searched."""


def measuring_interval(spec: ValidationSpec, batch_size: int, total_steps: int) -> int:
    """Steps between measurements: a twentieth of the run, where a row fits between two of them."""
    if spec.every_steps is not None:
        return spec.every_steps
    return max(math.ceil(total_steps / MEASUREMENTS), math.ceil(SHARE / batch_size))


def num_measured_rows(spec: ValidationSpec, tokens_per_row: float, rows_between: int) -> int:
    """Rows of a measurement, where as many are held out: of `max_tokens` tokens together, and one for each ten that are
    trained on between two measurements, but one at least."""
    return max(min(int(spec.max_tokens / tokens_per_row), rows_between // SHARE), 1)


def steps_of_trial(total_steps: int) -> int | None:
    """Steps of every trial of a run's search; None where the run is too short for one."""
    steps = int(BUDGET * total_steps / MAX_TRIALS)
    return min(steps, MOST_STEPS) if steps >= FEWEST_STEPS else None


def searches_rate(spec: JobSpec) -> bool:
    """Whether a run, if it is long enough, searches its learning rate. Of a spec whose defaults are resolved."""
    steps = spec.training.max_steps
    long_enough = steps is None or steps_of_trial(steps) is not None
    return bool(spec.optimizer.rate_search) and spec.training.validation is not None and long_enough


@dataclass(frozen=True)
class RunSchedule:
    """Steps after which a run may be saved, measured or not."""

    total_steps: int
    every_steps: int
    """Checkpoints are written so often, whatever is measured."""
    measured_every: int | None
    """Steps between measurements; None: nothing is measured."""
    best_every: int
    """Fewest steps between checkpoints that are saved for their held-out KL; a multiple of `measured_every`."""

    @classmethod
    def of(cls, spec: JobSpec, total_steps: int, *, measures: bool = True) -> RunSchedule:
        """The schedule of a spec whose defaults are resolved; without `measures`, of a run with nothing held out."""
        training, checkpoint = spec.training, spec.checkpoint
        if training.validation is None or not measures:
            return cls(total_steps, checkpoint.every_steps, None, 1)
        assert training.batch_size is not None, "settled before training, see specs.defaults"
        interval = measuring_interval(training.validation, training.batch_size, total_steps)
        best_every = interval * -(-(checkpoint.best_every_steps or interval) // interval)
        return cls(total_steps, checkpoint.every_steps, interval, best_every)

    def is_measured(self, step: int) -> bool:
        return self.measured_every is not None and (step % self.measured_every == 0 or step == self.total_steps)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is saved, whatever its held-out KL."""
        return step % self.every_steps == 0 or step == self.total_steps

    def may_be_best(self, step: int) -> bool:
        """Whether the state after `step` is kept as the best if its held-out KL is the lowest. A function of the step
        alone, so that a run that is cut anywhere goes on as if it had not been."""
        return self.is_due(step) or step % self.best_every == 0

    @property
    def num_measurements(self) -> int:
        """Measurements of a run that never goes back: of the start, every so often, and of the end."""
        if self.measured_every is None or self.total_steps == 0:
            return 0
        return 1 + -(-self.total_steps // self.measured_every)

    @property
    def num_saves(self) -> int:
        """Most checkpoints that a run writes: of the start and of each measurement that may be the best, where there
        are any, every so often, and at the end."""
        total = self.total_steps
        if self.measured_every is None or total == 0:
            return -(-total // self.every_steps)
        both = math.lcm(self.every_steps, self.best_every)
        between = total // self.every_steps + total // self.best_every - total // both
        is_last_apart = total % self.every_steps != 0 and total % self.best_every != 0
        return 1 + between + is_last_apart
