"""Jobs, their events and metrics, as frozen values, and the one table of transitions. Knows no I/O.

queued ──▶ starting ──▶ running ──▶ evaluating ──▶ succeeded
   ▲          │            │            │
   └──────────┴── retry ───┴────────────┘
starting, running ──▶ pausing ──▶ paused ──▶ queued; queued ──▶ paused
any live status ──▶ failed, or ──▶ cancelling ──▶ cancelled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from pydantic import ConfigDict

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.contract.events import Level, Pace, parse_phase
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.errors import IllegalTransitionError
from swiftkv_platform.specs import JobSpec


class JobStatus(StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    EVALUATING = "evaluating"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return not TRANSITIONS[self]

    @property
    def is_on_cluster(self) -> bool:
        """Whether an attempt may be on the cluster."""
        return self not in _STATUSES_OFF_CLUSTER


TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    source: frozenset(JobStatus(target) for target in targets.split())
    for source, targets in {
        JobStatus.QUEUED: "starting paused failed cancelling",
        JobStatus.STARTING: "running pausing queued failed cancelling",
        JobStatus.RUNNING: "evaluating succeeded pausing queued failed cancelling",
        JobStatus.EVALUATING: "succeeded queued failed cancelling",
        JobStatus.PAUSING: "paused succeeded failed cancelling",
        JobStatus.PAUSED: "queued failed cancelling",
        JobStatus.CANCELLING: "cancelled succeeded failed",
        JobStatus.SUCCEEDED: "",
        JobStatus.FAILED: "",
        JobStatus.CANCELLED: "",
    }.items()
}
"""Statuses that may follow each status. A retry, and a resume, goes back to `queued`; a job that finishes while
pausing or cancelling has succeeded."""

_STATUSES_OFF_CLUSTER = frozenset(
    {JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}
)
LIVE_STATUSES = [status.value for status in JobStatus if not status.is_terminal]
"""Statuses of jobs that have not ended, as stored in rows."""
WAITING_STATUSES = [JobStatus.QUEUED.value, JobStatus.PAUSED.value]
STATUSES_ON_CLUSTER = [status.value for status in JobStatus if status.is_on_cluster]


_RESPONSE_CONFIG = ConfigDict(use_attribute_docstrings=True, json_schema_serialization_defaults_required=True)
"""Configuration of models in responses: every field is required, and its docstring is its description."""


@dataclass(frozen=True)
class Reason:
    """Reason for a job's status."""

    __pydantic_config__ = _RESPONSE_CONFIG
    code: str
    """A `ReasonCode`, or the code of an error of `errors.py`."""
    message: str
    field: str | None = None
    """Dotted path of the spec's field that caused the problem."""
    value: float | None = None
    """Measured value of a failed quality gate."""


@dataclass(frozen=True)
class Failure:
    """The cause of an attempt's failure."""

    reason: Reason
    retryable: bool
    """Whether another attempt may succeed."""


@dataclass(frozen=True)
class Progress:
    __pydantic_config__ = _RESPONSE_CONFIG
    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    """Number of tokens trained on."""
    percent: float = 0.0
    seconds_remaining: int | None = None


@dataclass(frozen=True)
class PhaseProgress:
    """Progress of a part of a phase, as its worker last reported it; training's steps are `Progress`."""

    __pydantic_config__ = _RESPONSE_CONFIG
    part: str
    """Part of the phase: a worker's prompts, `sources` of the data, `layers` that calibrate, a task of the evaluation,
    `bytes` of the model."""
    done: int
    total: int
    seconds_remaining: int | None = None
    """Estimated seconds from the report until the part is done; null before the part's first step."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of a job, from which other jobs' time is estimated."""

    flops_per_second: float
    """FLOPs per second of one worker, counted as in `planning.plan_training`, checkpoints and waiting included."""
    startup_s: float
    """Seconds from submission to the first step."""
    finish_s: float
    """Seconds from the last step to the end: evaluation and publishing."""
    process_memory: int | None = None
    """Bytes of a worker's process beyond what was planned for its model; None with GPUs."""


@dataclass(frozen=True)
class Attempt:
    """One try of a job; each new attempt starts with these defaults."""

    number: int = 1
    submission_id: str | None = None
    """Id of the submission in Ray. Stored before submitting, so that a restarted control plane finds the submission."""
    submitted_at: float | None = None
    """Unix seconds at which Ray was first known to have the submission."""
    resume_from: str | None = None
    """Key of the checkpoint that the attempt continues from."""
    cursor: Mapping[str, int] = field(default_factory=dict)
    """Last sequence number read, by event writer."""
    pace: Pace | None = None
    failure: Failure | None = None
    """Latest failure that the attempt itself reported."""
    pause_requested: bool = False
    """Whether the attempt has been asked to pause."""
    peak_memory: int = 0
    """Most bytes that any worker has reported to hold."""
    phase: str | None = None
    """Phase that was reported last."""
    parts: Mapping[str, PhaseProgress] = field(default_factory=dict)
    """Progress of that phase, by part: each worker's part if all do the same work, else only the part reported last."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Resource needs of workers that have not been placed yet, by phase."""
    waiting_since: float | None = None
    """Unix seconds, by the control plane's clock, at which workers began to wait, or others last made progress."""
    placed: tuple[str, ...] = ()
    """Phases whose workers have been placed."""
    placed_at: float | None = None
    """Unix seconds at which the last of these placements was read."""
    waited_s: float = 0.0
    """Seconds that the attempt's workers have waited for resources, excluding a current wait."""
    paused: bool = False
    """Whether the attempt has reported that it paused: its checkpoint is complete."""
    stopping: Reason | None = None
    """Reason for which the control plane ends the attempt; the job then fails, or is queued again if the reason allows
    it."""

    yields: Reason | None = None
    """Reason for which the attempt was asked to checkpoint and end; the job is then queued again."""
    yields_at: float = 0.0
    """Unix seconds of the request."""

    @property
    def has_trained(self) -> bool:
        """Whether workers of this attempt have begun to train."""
        return self.pace is not None or "train" in map(parse_phase, self.placed)


@dataclass(frozen=True)
class Job:
    """A distillation job. Times are Unix seconds."""

    id: str
    tenant: str
    created_by: str
    spec: JobSpec
    created_at: int
    status: JobStatus = JobStatus.QUEUED
    status_reason: Reason | None = None
    started_at: int | None = None
    """Unix seconds at which the first attempt began to run."""
    finished_at: int | None = None
    estimated_finish: int | None = None
    progress: Progress = Progress()
    attempt: Attempt = Attempt()
    flops_per_step: float | None = None
    """FLOPs of a step over all workers; None if the teacher's configuration was not available."""
    planned_memory: int | None = None
    """`JobEstimate.memory_per_worker`."""
    earlier_seconds: float = 0.0
    """Seconds on the cluster of earlier attempts, or of all attempts if the job is off the cluster."""
    speed: Speed | None = None
    """Measured speed, once the job has succeeded."""
    retries: int = 0
    """Attempts that count against `fault_tolerance.max_retries`."""
    resumptions: int = 0
    """Number of times that the job was resumed after a pause."""
    not_before: float = 0.0
    """Unix seconds before which a queued retry does not start."""
    waiting_since: int | None = None
    """Unix seconds since which a queued job waits for resources of the cluster."""
    tracking: Mapping[str, Any] | None = None
    artifact_uri: str | None = None
    distilled_model: str | None = None
    result: Mapping[str, Any] | None = None
    error: Reason | None = None
    traceparent: str | None = None
    """W3C context of the trace in which the job was submitted."""
    version: int = 0
    """Increases with every update; an update of an older version is refused."""

    def with_attempt(self, **changes: Any) -> Job:
        """Return the job with changed fields of its current attempt."""
        return replace(self, attempt=replace(self.attempt, **changes))

    @property
    def attempt_id(self) -> AttemptId:
        """Id of the present attempt."""
        return AttemptId(self.id, self.attempt.number)

    @property
    def phase(self) -> str | None:
        """Phase that the present attempt reported last; None off the cluster."""
        return self.attempt.phase if self.status.is_on_cluster else None

    @property
    def phase_progress(self) -> PhaseProgress | None:
        """Progress of that phase, summed over all workers that report theirs."""
        parts = [*self.attempt.parts.values()] if self.status.is_on_cluster else []
        if len(parts) < 2:
            return parts[0] if parts else None
        left = [part.seconds_remaining for part in parts if part.done < part.total]
        seconds = None if None in left else max((each for each in left if each is not None), default=0)
        total = sum(part.total for part in parts)
        return PhaseProgress(f"{len(parts)} parts", sum(part.done for part in parts), total, seconds)

    def compute_seconds_on_cluster(self, now: float) -> float:
        """Seconds on the cluster over all attempts, the present one included."""
        since = self.attempt.submitted_at
        running = now - since if since is not None and self.status.is_on_cluster else 0.0
        return self.earlier_seconds + max(running, 0.0)


EventType = Literal["status", "message", "metrics", "checkpoint"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a job."""

    id: str
    job_id: str
    created_at: int
    type: EventType
    message: str
    level: Level = "info"
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricPoint:
    """The measurements of one optimizer step; a replayed step replaces the earlier one."""

    step: int
    attempt: int
    time: float
    values: Mapping[str, float | int | None]


def make_status_event(job: Job, *, now: int, previous: JobStatus | None = None) -> Event:
    """Return the event that reports a job's present status."""
    data: dict[str, Any] = {"status": job.status.value, "attempt": job.attempt.number}
    message = f"{job.status}, attempt {job.attempt.number}"
    if previous is not None:
        data["previous"] = previous.value
    if job.status_reason is not None:
        data["reason"] = {"code": job.status_reason.code, "field": job.status_reason.field}
        message = f"{message}: {job.status_reason.message}"
    level: Level = "info"
    if job.status is JobStatus.FAILED:
        level = "error"
    elif job.status is JobStatus.QUEUED and job.status_reason is not None and previous is not JobStatus.PAUSED:
        level = "warn"
    return Event(new_id("evt"), job.id, now, "status", message, level=level, data=data)


def transition(job: Job, status: JobStatus, *, now: int, reason: Reason | None = None) -> tuple[Job, Event]:
    """Return (job in another status, event that reports the status). No other code changes a job's status.

    Raises `IllegalTransitionError` if the table does not allow it.
    """
    if status not in TRANSITIONS[job.status]:
        allowed = ", ".join(sorted(TRANSITIONS[job.status])) or "none, since this status is final"
        message = f"job {job.id} is {job.status} and cannot become {status}; the statuses that can follow: {allowed}"
        raise IllegalTransitionError(message, field="status", value=job.status.value)
    changed = replace(job, status=status, status_reason=reason, waiting_since=None)
    if job.status.is_on_cluster and not status.is_on_cluster:
        changed = replace(changed, earlier_seconds=job.compute_seconds_on_cluster(now))
    if status is JobStatus.RUNNING and job.started_at is None:
        changed = replace(changed, started_at=now)
    if not status.is_on_cluster:
        changed = replace(changed, estimated_finish=None, progress=replace(job.progress, seconds_remaining=None))
    if status.is_terminal:
        changed = replace(changed, finished_at=now)
    if status is JobStatus.FAILED:
        changed = replace(changed, error=reason)
    return changed, make_status_event(changed, now=now, previous=job.status)


def start_attempt(job: Job, *, now: int, resume_from: str | None = None) -> tuple[Job, Event]:
    """Return (job in `starting` with a new submission id, event). After a crash, the id finds the submission in Ray."""
    name = job.attempt_id.submission_id
    attempt = replace(job.attempt, submission_id=name, resume_from=resume_from)
    return transition(replace(job, attempt=attempt), JobStatus.STARTING, now=now)


def set_wait_reason(job: Job, *, now: int, reason: Reason) -> tuple[Job, Event]:
    """Return (queued job with the reason why it waits, event that reports the reason)."""
    since = now if job.waiting_since is None else job.waiting_since
    event = Event(new_id("evt"), job.id, now, "message", reason.message, data={"code": str(reason.code)})
    return replace(job, status_reason=reason, waiting_since=since), event


def requeue(job: Job, *, now: int, reason: Reason, delay_s: float = 0.0, counts: bool = False) -> tuple[Job, Event]:
    """Return (job queued for its next attempt after `delay_s` seconds, event). `counts`: whether this uses up a retry.

    An attempt that was never started is reused.
    """
    queued, event = transition(job, JobStatus.QUEUED, now=now, reason=reason)
    retries = job.retries + 1 if counts else job.retries
    queued = replace(queued, retries=retries, not_before=now + delay_s)
    if job.attempt.submission_id is None:
        return queued, event
    queued = replace(queued, attempt=Attempt(number=job.attempt.number + 1))
    return queued, make_status_event(queued, now=now, previous=job.status)
