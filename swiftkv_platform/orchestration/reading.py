"""An attempt's events, folded into its job: a pure function of job and events. Knows no store and no database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftkv_platform.contract.attempts import AttemptEvent
from swiftkv_platform.orchestration.job import (
    Event,
    EventType,
    Failure,
    Job,
    JobStatus,
    Level,
    MetricPoint,
    Pace,
    Progress,
    Reason,
    new_id,
    transition,
)
from swiftkv_platform.orchestration.ports import StoredEvent


class _Status(BaseModel):
    status: JobStatus


class _Point(BaseModel):
    model_config = ConfigDict(extra="allow")

    step: Annotated[int, Field(ge=0)]
    tokens: int | None = None
    memory_bytes: Annotated[float, Field(ge=0)] = 0


class _Metrics(BaseModel):
    points: list[_Point]
    total_steps: Annotated[int, Field(ge=1)] | None = None


class _Placement(BaseModel):
    phase: Annotated[str, Field(max_length=200)]
    state: Literal["waiting", "placed"]
    needs: Annotated[str, Field(max_length=2000)] = ""


class _Error(BaseModel):
    code: str
    field: str | None = None
    retryable: bool


@dataclass
class Reading:
    """A job brought up to date, and the rows that go with it."""

    job: Job
    now: int
    events: list[Event] = field(default_factory=list)
    points: list[MetricPoint] = field(default_factory=list)

    def move(self, status: JobStatus, reason: Reason | None = None) -> None:
        """Change the status; the event that says so joins the others."""
        self.job, event = transition(self.job, status, now=self.now, reason=reason)
        self.events.append(event)


def read(job: Job, stored: Sequence[StoredEvent], *, now: int) -> Reading:
    """The job after these events of its present attempt, each counted once: the job's cursor moves with them.

    An event whose data does not fit its type becomes a warning; it cannot stop the job.
    """
    reading = Reading(job, now)
    cursor = dict(job.attempt.cursor)
    for item in stored:
        try:
            _take(reading, item.event)
        except ValidationError as error:
            message = f"event {item.sequence} of {item.writer} cannot be understood: {error}"
            _record(reading, item.event, "message", message=message, level="warn")
        cursor[item.writer] = item.sequence
    if stored:
        reading.job = replace(reading.job, attempt=replace(reading.job.attempt, cursor=cursor))
    return reading


def _take(reading: Reading, event: AttemptEvent) -> None:
    match event.type:
        case "status":
            _advance(reading, _Status.model_validate(event.data).status)
        case "metrics":
            _measure(reading, event, _Metrics.model_validate(event.data))
            _note_progress(reading)
            _record(reading, event, "metrics")
        case "placement":
            _place(reading, _Placement.model_validate(event.data))
        case "checkpoint":
            _note_progress(reading)
            _record(reading, event, "checkpoint")
        case "error":
            error = _Error.model_validate(event.data)
            failure = Failure(Reason(error.code, _plain(event.message), error.field), error.retryable)
            reading.job = replace(reading.job, attempt=replace(reading.job.attempt, failure=failure))
            _record(reading, event, "message", level="error")
        case "tracking":
            reading.job = replace(reading.job, tracking=_plain(event.data))
            _record(reading, event, "message")
        case "message" | "artifact":
            _record(reading, event, "message")


def _advance(reading: Reading, status: JobStatus) -> None:
    """Follow the attempt from phase to phase; what it says while it is being stopped changes nothing."""
    if status is JobStatus.PAUSED:
        reading.job = replace(reading.job, attempt=replace(reading.job.attempt, paused=True))
        return
    if reading.job.status is JobStatus.STARTING and status in (JobStatus.RUNNING, JobStatus.EVALUATING):
        reading.move(JobStatus.RUNNING)
    if reading.job.status is JobStatus.RUNNING and status is JobStatus.EVALUATING:
        reading.move(JobStatus.EVALUATING)


def _place(reading: Reading, told: _Placement) -> None:
    """Note who waits for a place. Driver and worker have clocks of their own, so `placed` may be read first."""
    attempt = reading.job.attempt
    waiting = {phase: needs for phase, needs in attempt.waiting.items() if phase != told.phase}
    if told.state == "placed":
        attempt = replace(attempt, placed=(*attempt.placed, told.phase))
    elif told.phase not in attempt.placed:
        waiting[told.phase] = _plain(told.needs)
    attempt = replace(attempt, waiting=waiting, waiting_since=reading.now if waiting else None)
    reading.job = replace(reading.job, attempt=attempt)


def _note_progress(reading: Reading) -> None:
    """Restart the wait for a place: of several trials, one may wait as long as others get on."""
    if reading.job.attempt.waiting:
        reading.job = replace(reading.job, attempt=replace(reading.job.attempt, waiting_since=reading.now))


def _measure(reading: Reading, event: AttemptEvent, metrics: _Metrics) -> None:
    if not metrics.points:
        return
    job = reading.job
    for point in metrics.points:
        values = {name: value for name, value in _plain(point.model_dump(exclude_unset=True)).items() if name != "step"}
        reading.points.append(MetricPoint(point.step, job.attempt.number, event.time, values))
    last, most = metrics.points[-1], int(max(point.memory_bytes for point in metrics.points))
    total = metrics.total_steps or job.progress.total_steps
    pace = job.attempt.pace
    if pace is None or last.step <= job.progress.step:
        pace = Pace(last.step, event.time)  # a fresh start, or steps repeated from a checkpoint
    pace = replace(pace, last_time=event.time)
    remaining = _seconds_remaining(pace, last.step, event.time, total)
    reading.job = replace(
        job,
        attempt=replace(job.attempt, pace=pace, peak_memory=max(most, job.attempt.peak_memory)),
        progress=Progress(
            step=last.step,
            total_steps=total,
            tokens=job.progress.tokens if last.tokens is None else last.tokens,
            percent=round(min(100.0 * last.step / total, 100.0), 2) if total else 0.0,
            seconds_remaining=remaining,
        ),
        estimated_finish=None if remaining is None else int(event.time) + remaining,
    )


def _seconds_remaining(pace: Pace, step: int, time: float, total: int | None) -> int | None:
    """Estimate from the measured steps per second; None until two points are apart."""
    if total is None or step <= pace.step or time <= pace.time:
        return None
    return math.ceil(max(total - step, 0) * (time - pace.time) / (step - pace.step))


def _record(
    reading: Reading, event: AttemptEvent, kind: EventType, *, message: str | None = None, level: Level | None = None
) -> None:
    reading.events.append(
        Event(
            id=new_id("evt"),
            job_id=reading.job.id,
            created_at=int(event.time),
            type=kind,
            message=_plain(event.message if message is None else message),
            level=level or event.level,
            data=_plain(event.data),
        )
    )


def _plain(value: Any) -> Any:
    """The value in a form every database takes: numbers that are not finite become None, NUL characters vanish."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
