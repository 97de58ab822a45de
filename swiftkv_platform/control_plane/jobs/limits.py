"""Limits on what a job may ask for, and on the time of its attempts."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import to_json

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason
from swiftkv_platform.control_plane.jobs.ports import Submission, SubmissionStatus
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.limits import MAX_SPEC_BYTES


@dataclass(frozen=True)
class JobLimits:
    """The operator's limits of one job; None is no limit."""

    max_workers: int | None = None
    """Workers at a time, over all trials of a sweep."""
    max_batch_size: int | None = None
    """Rows of a step, and of one worker's pass."""
    max_runtime_s: int | None = None
    """Seconds of an attempt."""

    def check(self, spec: JobSpec) -> None:
        """Raise `InvalidInputError`, with field, value and limit, for a spec above a limit."""
        training = spec.training
        asked = (
            ("resources.num_workers", spec.most_workers, self.max_workers),
            ("training.batch_size", training.batch_size, self.max_batch_size),
            ("training.micro_batch_size", training.micro_batch_size, self.max_batch_size),
            ("limits.max_runtime_s", spec.limits.max_runtime_s, self.max_runtime_s),
        )
        for field, value, most in asked:
            if value is not None and most is not None and value > most:
                message = f"{field} comes to {value}, and the operator's limit is {most}; use {most} or less"
                raise InvalidInputError(message, field=field, value=value)


def check_spec_bytes(spec: JobSpec) -> None:
    """Raise `InvalidInputError` for a spec that is too long to be stored, read and listed with others."""
    parts = {name: len(to_json(value)) for name, value in spec.model_dump(mode="json").items()}
    size = sum(parts.values())
    if size > MAX_SPEC_BYTES:
        longest = max(parts, key=lambda name: parts[name])
        raise InvalidInputError(
            f"the spec has {size:,} bytes as JSON, of which {longest} has {parts[longest]:,}; {MAX_SPEC_BYTES:,} are "
            "accepted; name data by directories and prefixes instead of single files",
            field=longest,
        )


UNLIMITED = JobLimits()


@dataclass(frozen=True)
class AttemptLimits:
    """The operator's time limits of every attempt."""

    placement_s: float = 1800.0
    """Seconds that an attempt that has not trained may hold a slot while its workers are not placed."""
    max_runtime_s: int | None = None
    """Seconds that an attempt may run, without waits for places, whatever its spec says; None leaves it to the spec."""

    turn_s: float | None = None
    """Seconds that an attempt may hold a slot for which another tenant's job waits; None is no limit."""

    def has_had_its_turn(self, job: Job, now: float) -> bool:
        """Whether the job's attempt should make room for others. Work other than training starts over after that, so
        each further attempt gets twice the time for it, up to 16 times."""
        attempt = job.attempt
        if self.turn_s is None or attempt.submitted_at is None:
            return False
        trains = job.status is JobStatus.RUNNING and attempt.has_trained
        longer = 1.0 if trains else 2.0 ** min(attempt.number - 1, 4)
        return now - attempt.submitted_at > self.turn_s * longer

    def exceeded(self, job: Job, now: float, submission: Submission | None = None) -> Reason | None:
        """Why the job's attempt must end; None if it may go on."""
        attempt = job.attempt
        if attempt.yields is not None and now - attempt.yields_at > self.placement_s:
            return attempt.yields  # it was asked to end and has not
        return self._not_placed(job, now, submission) or self._overdue(job, now)

    def _overdue(self, job: Job, now: float) -> Reason | None:
        attempt, own = job.attempt, job.spec.limits.max_runtime_s
        limits = [limit for limit in (own, self.max_runtime_s) if limit is not None]
        if attempt.submitted_at is None or not limits:
            return None
        waited = attempt.waited_s + (0.0 if attempt.waiting_since is None else now - attempt.waiting_since)
        if now - attempt.submitted_at - waited <= min(limits):
            return None
        whose = "limits.max_runtime_s" if own == min(limits) else "the operator's maximum"
        message = f"attempt {job.attempt.number} ran longer than {whose}, {min(limits)} s"
        return Reason(ReasonCode.MAX_RUNTIME_EXCEEDED, message, field="limits.max_runtime_s")

    def _not_placed(self, job: Job, now: float, submission: Submission | None) -> Reason | None:
        """Return the reason to end an attempt that is not placed in time. An attempt that has trained may wait without
        limit."""
        attempt, code = job.attempt, ReasonCode.NOT_PLACED
        waiting = f"has found no place on the cluster for {self.placement_s:g} s"
        if attempt.has_trained or job.status is JobStatus.EVALUATING:
            return None
        if attempt.waiting:
            since, what = attempt.waiting_since, f"{waiting}: {'; '.join(attempt.waiting.values())}"
        elif job.status is not JobStatus.STARTING or attempt.placed:
            return None
        elif submission is not None and submission.status is SubmissionStatus.PENDING:
            since, what = attempt.submitted_at, f"{waiting}: its own process waits"
        else:
            since, what = attempt.submitted_at, f"has reported nothing in {self.placement_s:g} s since it was submitted"
            code = ReasonCode.WORKER_LOST
        if since is None or now - since <= self.placement_s:
            return None
        return Reason(code, f"attempt {attempt.number} {what}", field="resources")


DEFAULT_LIMITS = AttemptLimits()
