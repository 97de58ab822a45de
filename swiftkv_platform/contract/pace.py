"""Pace of a training run, from the steps that its workers report. All estimates of the remaining time use it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pace:
    """Start of a speed measurement: the first point of an uninterrupted sequence of steps."""

    step: int
    time: float
    """Unix time in seconds, by the reporting worker's clock."""
    last_time: float = 0.0
    """Unix seconds of the newest point."""

    @classmethod
    def after(cls, pace: Pace | None, step: int, time: float, *, last_step: int) -> Pace:
        """Return the pace after `step` was reported at `time`. It starts anew if `step` is not beyond `last_step`, as
        after a restart or when steps are repeated from a checkpoint."""
        if pace is None or step <= last_step:
            pace = cls(step, time)
        return replace(pace, last_time=time)

    def seconds_remaining(self, step: int, total_steps: int | None) -> int | None:
        """Return the seconds from `last_time` to the last step; None as long as there is only one point."""
        if total_steps is None or step <= self.step or self.last_time <= self.time:
            return None
        return math.ceil(max(total_steps - step, 0) * (self.last_time - self.time) / (step - self.step))
