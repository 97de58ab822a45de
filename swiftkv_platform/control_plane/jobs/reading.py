"""Applies an attempt's events to its job: a pure function of job and events. Knows no store and no database."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from swiftkv_platform.contract.events import (
    ArtifactEvent,
    AttemptEvent,
    AttemptStatus,
    CheckpointEvent,
    CourseEvent,
    ErrorData,
    ErrorEvent,
    Level,
    MessageEvent,
    MetricsEvent,
    PlacementData,
    PlacementEvent,
    ProgressData,
    ProgressEvent,
    StatusEvent,
    TrackingEvent,
    phase_of,
)
from swiftkv_platform.contract.pace import Pace
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.jobs.job import (
    Event,
    EventType,
    Failure,
    Job,
    JobStatus,
    MetricPoint,
    PhaseProgress,
    Progress,
    Reason,
    transition,
)
from swiftkv_platform.storage.attempt_store import StoredEvent
from swiftkv_platform.traces import NO_SPANS, Spans

_SIDE_BY_SIDE = ("write",)
"""Phases in which each worker has a part of the same work."""
_MOST_PARTS = 1000
_AFTER_TRAINING = ("evaluate", "publish")


@dataclass
class Reading:
    """A job with its attempt's events applied, and the rows to store with it."""

    job: Job
    now: int
    events: list[Event] = field(default_factory=list)
    points: list[MetricPoint] = field(default_factory=list)

    def move(self, status: JobStatus, reason: Reason | None = None) -> None:
        """Change the status, and add the event that reports it."""
        self.job, event = transition(self.job, status, now=self.now, reason=reason)
        self.events.append(event)


def read(job: Job, stored: Sequence[StoredEvent], *, now: int) -> Reading:
    """Apply events of a job's present attempt. The job's cursor moves with them, so that each counts once."""
    reading = Reading(job, now)
    cursor = dict(job.attempt.cursor)
    for item in stored:
        _take(reading, item.event)
        cursor[item.writer] = item.sequence
    if stored:
        reading.job = replace(reading.job, attempt=replace(reading.job.attempt, cursor=cursor))
    return reading


def _take(reading: Reading, event: AttemptEvent) -> None:
    match event:
        case StatusEvent():
            _advance(reading, event.data["status"])
        case MetricsEvent():
            _measure(reading, event)
            _note_progress(reading)
            _record(reading, event, "metrics")
        case PlacementEvent():
            _place(reading, _plain(event.data))
        case CheckpointEvent():
            _note_progress(reading)
            _record(reading, event, "checkpoint")
        case ErrorEvent():
            error: ErrorData = _plain(event.data)
            failure = Failure(Reason(error["code"], _plain(event.message), error.get("field")), error["retryable"])
            reading.job = replace(reading.job, attempt=replace(reading.job.attempt, failure=failure))
            _record(reading, event, "message", level="error")
        case TrackingEvent():
            reading.job = replace(reading.job, tracking=_plain(event.data))
            _record(reading, event, "message")
        case ProgressEvent():
            _note_progress(reading)
            _part(reading, _plain(event.data))
            _record(reading, event, "message")
        case MessageEvent() | ArtifactEvent() | CourseEvent():
            _record(reading, event, "message")
        case _:
            assert_never(event)


def _advance(reading: Reading, status: AttemptStatus) -> None:
    """Follow the attempt from phase to phase; what it reports while it is being stopped changes nothing."""
    if status == "paused":
        reading.job = replace(reading.job, attempt=replace(reading.job.attempt, paused=True))
        return
    if reading.job.status is JobStatus.STARTING:
        reading.move(JobStatus.RUNNING)
    if reading.job.status is JobStatus.RUNNING and status == "evaluating":
        reading.move(JobStatus.EVALUATING)


def _place(reading: Reading, told: PlacementData) -> None:
    """Record which workers wait for a place. Driver and worker have their own clocks, so `placed` may be read first."""
    attempt, phase = reading.job.attempt, told["phase"]
    waiting = {name: needs for name, needs in attempt.waiting.items() if name != phase}
    if told["state"] == "placed":
        attempt = replace(attempt, placed=(*attempt.placed, phase), placed_at=reading.now)
    elif phase not in attempt.placed:
        waiting[phase] = told.get("needs", "")
    waited = 0.0 if attempt.waiting_since is None else reading.now - attempt.waiting_since
    since = reading.now if waiting else None
    attempt = replace(attempt, waiting=waiting, waiting_since=since, waited_s=attempt.waited_s + waited)
    reading.job = replace(reading.job, attempt=attempt)
    if told["state"] == "placed":
        _enter(reading, phase_of(phase))


def _enter(reading: Reading, phase: str) -> None:
    """Record the reported phase, and drop the parts of another one. Trials of a sweep alternate between phases."""
    attempt = reading.job.attempt
    if phase != attempt.phase:
        reading.job = replace(reading.job, attempt=replace(attempt, phase=phase, parts={}))


def _part(reading: Reading, told: ProgressData) -> None:
    """Record the progress of a part. Workers write answers in parallel, but evaluate one part after the other."""
    _enter(reading, told["phase"])
    attempt, left = reading.job.attempt, told.get("eta_s")
    seconds = None if left is None else math.ceil(left)
    part = PhaseProgress(told["part"], told["done"], told["total"], seconds)
    parts = {**attempt.parts, part.part: part} if told["phase"] in _SIDE_BY_SIDE else {part.part: part}
    if len(parts) <= _MOST_PARTS:
        reading.job = replace(reading.job, attempt=replace(attempt, parts=parts))


def _note_progress(reading: Reading) -> None:
    """Restart the wait for a place: one of several trials may wait as long as others make progress."""
    if reading.job.attempt.waiting:
        reading.job = replace(reading.job, attempt=replace(reading.job.attempt, waiting_since=reading.now))


def _measure(reading: Reading, event: MetricsEvent) -> None:
    points = event.data["points"]
    if not points:
        return
    job = reading.job
    if job.spec.sweep is not None or job.attempt.phase not in _AFTER_TRAINING:  # which another clock may date before
        _enter(reading, "train")
        job = reading.job
    for point in points:
        values = {name: value for name, value in _plain(point).items() if name != "step"}
        reading.points.append(MetricPoint(point["step"], job.attempt.number, event.time, values))
    step, tokens = points[-1]["step"], points[-1].get("tokens")
    most = int(max(point.get("memory_bytes", 0) for point in points))
    total = event.data.get("total_steps", job.progress.total_steps)
    pace = Pace.after(job.attempt.pace, step, event.time, last_step=job.progress.step)
    # Between the steps of two trials there are a calibration and an evaluation.
    remaining = None if job.spec.sweep is not None else pace.seconds_remaining(step, total)
    reading.job = replace(
        job,
        attempt=replace(job.attempt, pace=pace, peak_memory=max(most, job.attempt.peak_memory)),
        progress=Progress(
            step=step,
            total_steps=total,
            tokens=job.progress.tokens if tokens is None else tokens,
            percent=round(min(100.0 * step / total, 100.0), 2) if total else 0.0,
            seconds_remaining=remaining,
        ),
        estimated_finish=None if remaining is None else int(event.time) + remaining,
    )


def _record(reading: Reading, event: AttemptEvent, kind: EventType, *, level: Level | None = None) -> None:
    reading.events.append(
        Event(
            id=new_id("evt"),
            job_id=reading.job.id,
            created_at=int(event.time),
            type=kind,
            message=_plain(event.message),
            level=level or event.level,
            data=_plain(event.data),
        )
    )


def _plain(value: Any) -> Any:
    """Return the value in a form every database accepts: numbers that are not finite become None, NUL characters are
    removed."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


Observe = Callable[[float], None]
"""Function of a duration in seconds."""


def _ignore(*_seconds: float) -> None:
    pass


@dataclass(frozen=True)
class Instruments:
    """Listeners to the reconciler; the defaults do nothing."""

    queue_wait: Observe = _ignore
    """Seconds that an attempt was in the queue."""
    event_lag: Observe = _ignore
    """Seconds from an event's time, by its writer's clock, until it is read."""
    untracked: Callable[[], object] = _ignore
    """Called for each run that its tracker should have recorded, but did not, or not completely."""

    spans: Spans = NO_SPANS

    def started(self, job: Job, now: float) -> None:
        """Report an attempt that leaves the queue. A delay before a retry does not count as waiting."""
        since = max(job.created_at, job.not_before)
        self.queue_wait(max(0.0, now - since))
        named = {"job_id": job.id, "attempt": job.attempt.number}
        self.spans.record("queue wait", job.traceparent, min(since, now), now, **named)

    def read(self, events: Sequence[StoredEvent], now: float) -> None:
        """Report events that were read."""
        for item in events:
            self.event_lag(max(0.0, now - item.event.time))
            if isinstance(item.event, TrackingEvent) and item.event.level == "warn":
                self.untracked()


NO_INSTRUMENTS = Instruments()
