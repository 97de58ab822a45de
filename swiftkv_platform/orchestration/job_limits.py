"""Limits on the size of a job, set by the operator and the same whoever asks. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs import JobSpec


@dataclass(frozen=True)
class JobLimits:
    """Most that the operator lets one job ask for; None is no limit."""

    max_workers: int | None = None
    """Workers at a time, over all trials of a sweep."""
    max_batch_size: int | None = None
    """Rows of a step, and of one worker's pass."""
    max_runtime_s: int | None = None
    """Seconds of an attempt."""

    def check(self, spec: JobSpec) -> None:
        """Raises `InvalidInputError`, with field, value and limit."""
        trials = 1 if spec.sweep is None else min(spec.sweep.max_concurrent, spec.sweep.num_trials)
        training = spec.training
        asked = (
            ("resources.num_workers", spec.resources.max_workers * trials, self.max_workers),
            ("training.batch_size", training.batch_size, self.max_batch_size),
            ("training.micro_batch_size", training.micro_batch_size, self.max_batch_size),
            ("limits.max_runtime_s", spec.limits.max_runtime_s, self.max_runtime_s),
        )
        for field, value, most in asked:
            if value is not None and most is not None and value > most:
                raise InvalidInputError(
                    f"{field} comes to {value}, and the operator's limit is {most}; {most} or less would do",
                    field=field,
                    value=value,
                )


UNLIMITED = JobLimits()
