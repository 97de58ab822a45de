"""Limits on the time that an attempt may wait for a place, and run. A function of jobs and the clock; stops nothing."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv_platform.contract.reasons import ReasonCode
from swiftkv_platform.orchestration.job import Job, JobStatus, Reason


@dataclass(frozen=True)
class AttemptLimits:
    """Time that the operator grants every attempt."""

    placement_s: float = 1800.0
    """Seconds that an attempt may hold a slot while none of its workers has found a place."""
    max_runtime_s: int | None = None
    """Seconds that it may run, whatever its spec says; None leaves it to the spec."""

    def exceeded(self, job: Job, now: float) -> Reason | None:
        """Why the job's attempt must end; None if it may go on."""
        return self._not_placed(job, now) or self._overdue(job, now)

    def _overdue(self, job: Job, now: float) -> Reason | None:
        since, own = job.attempt.submitted_at, job.spec.limits.max_runtime_s
        limits = [limit for limit in (own, self.max_runtime_s) if limit is not None]
        if since is None or not limits or now - since <= min(limits):
            return None
        whose = "limits.max_runtime_s" if own == min(limits) else "the operator's maximum"
        message = f"attempt {job.attempt.number} ran longer than {whose}, {min(limits)} s"
        return Reason(ReasonCode.MAX_RUNTIME_EXCEEDED, message, field="limits.max_runtime_s")

    def _not_placed(self, job: Job, now: float) -> Reason | None:
        """Another try would ask for the same again, so this ends the job."""
        attempt = job.attempt
        if attempt.waiting:
            since, needs = attempt.waiting_since, "; ".join(attempt.waiting.values())
        elif job.status is JobStatus.STARTING and not attempt.placed:
            since, needs = (
                attempt.submitted_at,
                "the attempt itself, of which nothing has been heard since it was submitted",
            )
        else:
            return None
        if since is None or now - since <= self.placement_s:
            return None
        message = (
            f"attempt {attempt.number} has found no place on the cluster for {self.placement_s:g} s: {needs}; "
            "fewer or smaller resources.num_workers, or a larger cluster, would do"
        )
        return Reason(ReasonCode.NOT_PLACED, message, field="resources")


DEFAULT_LIMITS = AttemptLimits()
