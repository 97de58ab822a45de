"""Effects of an attempt on its job: events, time limits and the end of the attempt. No I/O except for manifests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from swiftkv_platform.contract.attempts import PROTOCOL, Manifest, describe_protocol_mismatch, is_from_protocol_1
from swiftkv_platform.contract.events import (
    ArtifactEvent,
    AttemptEvent,
    AttemptStatus,
    CheckpointEvent,
    ErrorData,
    ErrorEvent,
    MessageEvent,
    MetricsEvent,
    Pace,
    PlacementData,
    PlacementEvent,
    ProgressData,
    ProgressEvent,
    ReasonCode,
    StatusEvent,
    SteeringEvent,
    TrackingEvent,
    parse_phase,
)
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.jobs.estimates import measure_speed
from swiftkv_platform.control_plane.jobs.job import (
    Event,
    Failure,
    Job,
    JobStatus,
    MetricPoint,
    PhaseProgress,
    Progress,
    Reason,
    requeue,
    transition,
)
from swiftkv_platform.control_plane.models.repository import Model, find_exceeded_document_limit
from swiftkv_platform.control_plane.ray import Submission, SubmissionStatus
from swiftkv_platform.errors import ArtifactCorruptError, ProtocolError, QualityGateError, StorageError
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import hash_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore, StoredEvent

_PARALLEL_PHASES = ("write",)
"""Phases in which each worker has a part of the same work."""
_MAX_PARTS = 1000
_PHASES_AFTER_TRAINING = ("evaluate", "publish")


@dataclass
class AttemptUpdate:
    """A job with its attempt's events applied, and the rows to store with it."""

    job: Job
    now: int
    events: list[Event] = field(default_factory=list)
    points: list[MetricPoint] = field(default_factory=list)

    def change_status(self, status: JobStatus, reason: Reason | None = None) -> None:
        """Change the job's status, and add the event that reports the change."""
        self.job, event = transition(self.job, status, now=self.now, reason=reason)
        self.events.append(event)


def apply_events(job: Job, stored: Sequence[StoredEvent], *, now: int) -> AttemptUpdate:
    """Apply events of a job's present attempt. The job's cursor moves with them, so that each counts once."""
    update = AttemptUpdate(job, now)
    cursor = dict(job.attempt.cursor)
    for item in stored:
        _apply_event(update, item.event)
        cursor[item.writer] = item.sequence
    if stored:
        update.job = update.job.with_attempt(cursor=cursor)
    return update


def _apply_event(update: AttemptUpdate, event: AttemptEvent) -> None:
    match event:
        case StatusEvent():
            _apply_status(update, event.data["status"])
            return
        case PlacementEvent():
            _apply_placement(update, _make_storable(event.data))
            return
        case MetricsEvent():
            _restart_placement_timeout(update)
            _apply_metrics(update, event)
        case CheckpointEvent():
            _restart_placement_timeout(update)
        case ProgressEvent():
            _restart_placement_timeout(update)
            _apply_progress(update, _make_storable(event.data))
        case ErrorEvent():
            error: ErrorData = _make_storable(event.data)
            value = error.get("value") if error["code"] == QualityGateError.code else None
            reason = Reason(
                error["code"],
                _make_storable(event.message),
                error.get("field"),
                value if isinstance(value, int | float) else None,
            )
            failure = Failure(reason, error["retryable"])
            update.job = update.job.with_attempt(failure=failure)
        case TrackingEvent():
            update.job = replace(update.job, tracking=_make_storable(event.data))
        case MessageEvent() | ArtifactEvent() | SteeringEvent():
            pass
        case _:
            assert_never(event)
    update.events.append(
        Event(
            id=new_id("evt"),
            job_id=update.job.id,
            created_at=int(event.time),
            type=event.type if event.type in ("metrics", "checkpoint") else "message",
            message=_make_storable(event.message),
            level="error" if event.type == "error" else event.level,
            data=_make_storable(event.data),
        )
    )


def _apply_status(update: AttemptUpdate, status: AttemptStatus) -> None:
    """Follow the attempt from phase to phase; ignore reports of an attempt that is being stopped."""
    if status == "paused":
        update.job = update.job.with_attempt(paused=True)
        return
    if update.job.status is JobStatus.STARTING:
        update.change_status(JobStatus.RUNNING)
    if update.job.status is JobStatus.RUNNING and status == "evaluating":
        update.change_status(JobStatus.EVALUATING)


def _apply_placement(update: AttemptUpdate, data: PlacementData) -> None:
    """Record which workers wait for placement. Clocks of driver and worker differ, so `placed` may be read first."""
    attempt, phase = update.job.attempt, data["phase"]
    waiting = {name: needs for name, needs in attempt.waiting.items() if name != phase}
    if data["state"] == "placed":
        attempt = replace(attempt, placed=(*attempt.placed, phase), placed_at=update.now)
    elif phase not in attempt.placed:
        waiting[phase] = data.get("needs", "")
    waited = 0.0 if attempt.waiting_since is None else update.now - attempt.waiting_since
    since = update.now if waiting else None
    attempt = replace(attempt, waiting=waiting, waiting_since=since, waited_s=attempt.waited_s + waited)
    update.job = replace(update.job, attempt=attempt)
    if data["state"] == "placed":
        _enter_phase(update, parse_phase(phase))


def _enter_phase(update: AttemptUpdate, phase: str) -> None:
    """Record the reported phase, and drop the parts of another one. Trials of a sweep alternate between phases."""
    attempt = update.job.attempt
    if phase != attempt.phase:
        update.job = update.job.with_attempt(phase=phase, parts={})


def _apply_progress(update: AttemptUpdate, data: ProgressData) -> None:
    """Record the progress of a part. Workers write answers in parallel, but evaluate one part after the other."""
    _enter_phase(update, data["phase"])
    attempt, left = update.job.attempt, data.get("eta_s")
    seconds = None if left is None else math.ceil(left)
    part = PhaseProgress(data["part"], data["done"], data["total"], seconds)
    parts = {**attempt.parts, part.part: part} if data["phase"] in _PARALLEL_PHASES else {part.part: part}
    if len(parts) <= _MAX_PARTS:
        update.job = update.job.with_attempt(parts=parts)


def _restart_placement_timeout(update: AttemptUpdate) -> None:
    """Restart the timeout of waiting for resources: a trial may wait as long as other trials make progress."""
    if update.job.attempt.waiting:
        update.job = update.job.with_attempt(waiting_since=update.now)


def _apply_metrics(update: AttemptUpdate, event: MetricsEvent) -> None:
    points = event.data["points"]
    if not points:
        return
    job = update.job
    if (
        job.spec.sweep is not None or job.attempt.phase not in _PHASES_AFTER_TRAINING
    ):  # which another clock may date before
        _enter_phase(update, "train")
        job = update.job
    for point in points:
        values = {name: value for name, value in _make_storable(point).items() if name != "step"}
        update.points.append(MetricPoint(point["step"], job.attempt.number, event.time, values))
    step, tokens = points[-1]["step"], points[-1].get("tokens")
    most = int(max(point.get("memory_bytes", 0) for point in points))
    total = event.data.get("total_steps", job.progress.total_steps)
    pace = Pace.extend(job.attempt.pace, step, event.time, last_step=job.progress.step)
    # Between the steps of two trials there are a calibration and an evaluation.
    remaining = None if job.spec.sweep is not None else pace.estimate_seconds_remaining(step, total)
    update.job = replace(
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


def _make_storable(value: Any) -> Any:
    """Return the value in a form every database accepts: numbers that are not finite become None, NUL characters are
    removed."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, dict):
        return {_make_storable(key): _make_storable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_make_storable(item) for item in value]
    return value


def has_used_time_slice(job: Job, now: float, settings: Settings) -> bool:
    """Whether the job's attempt has held its slot for `turn_s`, and should end for another tenant's job.

    Work other than training starts over after that, so each further attempt gets twice the time for it, up to 16 times.
    """
    attempt = job.attempt
    if settings.turn_s is None or attempt.submitted_at is None:
        return False
    trains = job.status is JobStatus.RUNNING and attempt.has_trained
    factor = 1.0 if trains else 2.0 ** min(attempt.number - 1, 4)
    return now - attempt.submitted_at > settings.turn_s * factor


def find_exceeded_limit(job: Job, now: float, submission: Submission | None, settings: Settings) -> Reason | None:
    """Return the reason why the job's attempt must end; None if the attempt may continue."""
    attempt = job.attempt
    if attempt.yields is not None and now - attempt.yields_at > settings.placement_timeout_s:
        return attempt.yields  # it was asked to end and has not
    return _find_placement_timeout(job, now, submission, settings.placement_timeout_s) or _find_exceeded_runtime(
        job, now, settings.max_runtime_s
    )


def _find_exceeded_runtime(job: Job, now: float, max_runtime_s: int | None) -> Reason | None:
    attempt, own = job.attempt, job.spec.limits.max_runtime_s
    limits = [limit for limit in (own, max_runtime_s) if limit is not None]
    if attempt.submitted_at is None or not limits:
        return None
    waited = attempt.waited_s + (0.0 if attempt.waiting_since is None else now - attempt.waiting_since)
    if now - attempt.submitted_at - waited <= min(limits):
        return None
    whose = "limits.max_runtime_s" if own == min(limits) else "the operator's limit"
    message = f"attempt {job.attempt.number} ran longer than {whose}, {min(limits)} s"
    return Reason(ReasonCode.MAX_RUNTIME_EXCEEDED, message, field="limits.max_runtime_s")


def _find_placement_timeout(job: Job, now: float, submission: Submission | None, timeout_s: float) -> Reason | None:
    """Return the reason to end an attempt that is not placed in time. An attempt that has trained may wait without
    limit."""
    attempt, code = job.attempt, ReasonCode.NOT_PLACED
    waiting = f"was not scheduled on the cluster for {timeout_s:g} s"
    if attempt.has_trained or job.status is JobStatus.EVALUATING:
        return None
    if attempt.waiting:
        since, what = attempt.waiting_since, f"{waiting}: {'; '.join(attempt.waiting.values())}"
    elif job.status is not JobStatus.STARTING or attempt.placed:
        return None
    elif submission is not None and submission.status is SubmissionStatus.PENDING:
        since, what = attempt.submitted_at, f"{waiting}: its driver is still pending"
    else:
        since, what = attempt.submitted_at, f"has reported no event in the {timeout_s:g} s since it was submitted"
        code = ReasonCode.WORKER_LOST
    if since is None or now - since <= timeout_s:
        return None
    return Reason(code, f"attempt {attempt.number} {what}", field="resources")


_MIN_RETRY_DELAY_S, _MAX_RETRY_DELAY_S = 1.0, 60.0
"""Seconds before the second attempt, and max seconds before a later one; they double with every attempt."""
_CLUSTER_CAUSED = (ReasonCode.PREEMPTED, ReasonCode.NOT_PLACED)
"""Reasons for an attempt's end that are caused by the cluster and use up no retry."""
_RETRYABLE_STOPS = (ReasonCode.NOT_PLACED, ReasonCode.PREEMPTED, ReasonCode.WORKER_LOST)
"""Reasons for which the control plane ends an attempt, but makes another one."""


def apply_attempt_end(update: AttemptUpdate, submission: Submission | None, store: AttemptStore) -> Model | None:
    """Change the status of the job of `update`; returns the model if the attempt has made one.

    `submission`: None means that Ray has forgotten it, as a restarted head does.
    """
    # 1. A job that only publishes has no artifact.
    job = update.job
    cancelling = job.status is JobStatus.CANCELLING
    ended_well = submission is not None and submission.status is SubmissionStatus.SUCCEEDED
    ended_well = ended_well and not job.attempt.paused
    if ended_well and job.spec.is_publish_only:
        _complete_publication(update)
        return None
    # 2. A complete artifact makes the job succeed.
    unexplained = job.attempt.stopping is None and job.attempt.failure is None
    damage: Failure | None = None
    if ended_well or (unexplained and not cancelling):
        # The manifest is written last: if it exists, the work is done, even if the process failed afterwards.
        try:
            manifest = store.read_artifact_manifest(job.attempt_id)
        except ArtifactCorruptError as error:
            damage = Failure(Reason(error.code, error.message), retryable=True)
        else:
            if manifest is not None:
                model = _make_model(update, manifest, store)
                fault = find_exceeded_document_limit(model)
                if fault is None:
                    return _complete_with_model(update, model)
                damage = Failure(Reason(ArtifactCorruptError.code, f"the model was not stored: {fault}"), False)
    # 3. Otherwise the job is cancelled, paused, retried or failed.
    if cancelling:
        update.change_status(JobStatus.CANCELLED, job.status_reason)
    elif job.status is JobStatus.PAUSING:
        _complete_pause(update, damage or job.attempt.failure)
    elif submission is None and unexplained and damage is None:
        # Ray no longer knows the attempt. The job did not cause that, so it uses up no retry.
        message = f"Ray no longer knows {job.attempt.submission_id}: Ray's head node was restarted"
        _requeue(update, Reason(ReasonCode.WORKER_LOST, message), counts=False)
    else:
        _retry_or_fail(update, damage or _find_failure(job, submission))
    return None


def _complete_publication(update: AttemptUpdate) -> None:
    """Mark a job that copied a model as succeeded; no model was made."""
    if update.job.status is JobStatus.STARTING:
        update.change_status(JobStatus.RUNNING)
    result = {"published": {"model": update.job.spec.training.from_, "to": update.job.spec.publish.to}}
    update.job = replace(update.job, result=result, progress=replace(update.job.progress, percent=100.0))
    update.change_status(JobStatus.SUCCEEDED)


def _complete_pause(update: AttemptUpdate, failure: Failure | None) -> None:
    """Mark the job as paused, even if its attempt ended for another cause; as failed if that cause is not
    retryable."""
    stopping = update.job.attempt.stopping
    if stopping is not None and stopping.code not in _RETRYABLE_STOPS:
        update.change_status(JobStatus.FAILED, stopping)
    elif failure is not None and not failure.retryable:
        update.change_status(JobStatus.FAILED, failure.reason)
    else:
        update.change_status(JobStatus.PAUSED, update.job.status_reason)


def _retry_or_fail(update: AttemptUpdate, failure: Failure) -> None:
    retries_left = update.job.retries < update.job.spec.fault_tolerance.max_retries
    counts = failure.reason.code not in _CLUSTER_CAUSED
    if failure.retryable and (retries_left or not counts):
        _requeue(update, failure.reason, counts=counts)
    else:
        update.change_status(JobStatus.FAILED, failure.reason)


def _requeue(update: AttemptUpdate, reason: Reason, *, counts: bool) -> None:
    job = update.job
    update.job, event = requeue(
        job,
        now=update.now,
        reason=reason,
        delay_s=min(_MIN_RETRY_DELAY_S * 2.0 ** min(job.attempt.number - 1, 16), _MAX_RETRY_DELAY_S),
        counts=counts,
    )
    update.events.append(event)


def _make_model(update: AttemptUpdate, manifest: Manifest, store: AttemptStore) -> Model:
    job = update.job
    return Model(
        id=new_id("mdl"),
        tenant=job.tenant,
        name=job.spec.name,
        job_id=job.id,
        attempt=job.attempt.number,
        created_at=update.now,
        artifact_uri=store.get_artifact_uri(job.attempt_id),
        manifest_digest=hash_manifest(manifest),
        size=manifest.size,
        lineage=dict(manifest.lineage),
        metrics=dict(manifest.metrics),
    )


def _complete_with_model(update: AttemptUpdate, model: Model) -> Model:
    """Make `model` the job's; the update that stores both is refused if the job has changed."""
    if update.job.status is JobStatus.STARTING:
        update.change_status(JobStatus.RUNNING)
    job = update.job
    update.job = replace(
        job,
        distilled_model=model.id,
        artifact_uri=model.artifact_uri,
        result=model.metrics,
        progress=replace(job.progress, percent=100.0),
        speed=measure_speed(job, update.now),
    )
    update.change_status(JobStatus.SUCCEEDED)
    return model


def _find_failure(job: Job, submission: Submission | None) -> Failure:
    """Return the failure: the control plane's decision, else the attempt's own last error, else what Ray reports."""
    if job.attempt.stopping is not None:
        return Failure(job.attempt.stopping, retryable=job.attempt.stopping.code in _RETRYABLE_STOPS)
    if job.attempt.yields is not None and (job.attempt.failure is None or job.attempt.failure.retryable):
        return Failure(job.attempt.yields, retryable=True)
    if job.attempt.failure is not None:
        return job.attempt.failure
    assert submission is not None, "a forgotten submission without a known failure is not a failure"
    name, is_silent = job.attempt.submission_id, not job.attempt.cursor
    if is_silent and is_from_protocol_1(submission.message):
        message = describe_protocol_mismatch(workers=1, control_plane=PROTOCOL)
        return Failure(Reason(ProtocolError.code, message), retryable=False)
    match submission.status:
        case SubmissionStatus.SUCCEEDED:
            message = f"{name} succeeded, but its artifact has no manifest, so it is not complete"
            return Failure(Reason(StorageError.code, message), retryable=False)
        case SubmissionStatus.STOPPED:
            message = f"{name} was stopped, but not by this control plane"
            return Failure(Reason(ReasonCode.PREEMPTED, message), retryable=True)
        case _:
            # Ray's message ends with the log's tail; the whole log is stored with the attempt.
            explanation = submission.message.partition("\n")[0].strip() or "no reason given"
            return Failure(
                Reason(ReasonCode.WORKER_LOST, f"{name} failed without an error event; Ray reports: {explanation}"),
                retryable=True,
            )
