"""Pace of a training run, from the steps that its workers tell of: the one source of what remains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pace:
    """Starting point of a speed measurement: the first point of an uninterrupted stretch of steps."""

    step: int
    time: float
    """Unix seconds, by the clock of the worker that tells."""
    last_time: float = 0.0
    """Unix seconds of the newest point."""

    @classmethod
    def after(cls, pace: Pace | None, step: int, time: float, *, last_step: int) -> Pace:
        """The pace once `step` is told of at `time`; begun anew where it is not ahead of `last_step`, as after a
        restart, or steps that are repeated from a checkpoint."""
        if pace is None or step <= last_step:
            pace = cls(step, time)
        return replace(pace, last_time=time)

    def seconds_remaining(self, step: int, total_steps: int | None) -> int | None:
        """Seconds from `last_time` to the last step; None until two points are apart."""
        if total_steps is None or step <= self.step or self.last_time <= self.time:
            return None
        return math.ceil(max(total_steps - step, 0) * (self.last_time - self.time) / (step - self.step))
