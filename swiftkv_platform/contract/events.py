"""Events that a running attempt reports: one frozen model per kind, written by driver and workers and read by the
control plane. Events are stored: new fields must be optional, and readers keep keys of `data` that they do not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from swiftkv_platform.frozen import FrozenBaseModel


class ReasonCode(StrEnum):
    """`status_reason.code` of a job, besides the codes of errors in `errors.py`. Codes that end a job have an entry in
    `cures.CURES`."""

    WORKER_LOST = "worker_lost"
    """A process or machine of the attempt died."""
    PREEMPTED = "preempted"
    """The attempt was stopped from outside, e.g. with its machine."""
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    NOT_PLACED = "not_placed"
    """The cluster had no free resources for the attempt's workers; the job is queued again."""
    WAITING_FOR_RESOURCES = "waiting_for_resources"
    """The job is queued until the cluster has free resources for its workers."""
    WAITING_FOR_TURN = "waiting_for_turn"
    """The job is queued for a slot, for its tenant's quota, or until its next attempt may start."""
    MAX_RUNTIME_EXCEEDED = "max_runtime_exceeded"
    """The attempt reached `limits.max_runtime_s` or the operator's limit."""
    INTERNAL = "internal"
    """The control plane failed to handle the job."""
    COST_CAP = "cost_cap"
    """The job reached `limits.cost_cap` and pauses."""
    PAUSED = "paused"
    """A caller paused the job."""
    RESUMED = "resumed"
    CANCELLED = "cancelled"


class SteeringReason(StrEnum):
    """Reason for a steering decision, see `SteeringEvent`."""

    RATE_SEARCHED = "rate_searched"
    """A search found the learning rate."""
    RATE_BOUNDED = "rate_bounded"
    """The run is too short for a search, so the learning rate is the highest stable one for the trained matrices."""
    HELD_OUT_KL_ABOVE_START = "held_out_kl_above_start"
    HELD_OUT_KL_DIVERGED = "held_out_kl_diverged"
    """Held-out KL is far above its lowest value."""
    LOSS_NOT_FINITE = "loss_not_finite"
    EARLY_STOPPING = "early_stopping"
    """Held-out KL has stopped falling."""
    ROLLBACKS_EXHAUSTED = "rollbacks_exhausted"
    """Held-out KL has risen again after `guard.max_rollbacks` rollbacks."""
    LAST_STEP = "last_step"


Level = Literal["info", "warn", "error"]
AttemptStatus = Literal["running", "evaluating", "paused"]
"""`running` and `evaluating` at the start of that phase; `paused` when an attempt has saved its checkpoint for a pause
and ends."""

_MAX_TIME = 253_402_300_800
_MAX_CAUSE_LENGTH = 500
_EventTime = Annotated[float, Field(ge=0, lt=_MAX_TIME)]
_TrainingStep = Annotated[int, Field(ge=0, lt=2**63)]
_KEEP_UNKNOWN_KEYS = ConfigDict(extra="allow")
"""Keeps unknown keys of `data`, which newer versions may write."""


@with_config(_KEEP_UNKNOWN_KEYS)
class StatusData(TypedDict):
    status: AttemptStatus


@with_config(_KEEP_UNKNOWN_KEYS)
class _KnownMeasurements(TypedDict):
    step: _TrainingStep
    tokens: NotRequired[_TrainingStep | None]
    """Trained tokens so far."""
    memory_bytes: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


_KNOWN_MEASUREMENTS = TypeAdapter(_KnownMeasurements)


def _validate_point(point: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {**_KNOWN_MEASUREMENTS.validate_python(point)}
    return {name: checked[name] for name in point}


MetricsPoint = Annotated[dict[str, Any], AfterValidator(_validate_point)]
"""Metrics of one optimizer step by name: `step`, and `tokens`, `memory_bytes`, `loss`, `logits_loss`, `lr`,
`grad_norm`, `tokens_per_second`, ... if known."""


@with_config(_KEEP_UNKNOWN_KEYS)
class MetricsData(TypedDict):
    points: list[MetricsPoint]
    """Metrics of one or more steps."""
    total_steps: NotRequired[Annotated[int, Field(ge=1, lt=2**63)]]


@with_config(_KEEP_UNKNOWN_KEYS)
class CheckpointData(TypedDict):
    step: _TrainingStep
    key: str
    """Key of the checkpoint's directory."""
    size: int
    """Total bytes of the files in the directory."""
    sha256: str
    """SHA-256 digest of the manifest."""


@with_config(_KEEP_UNKNOWN_KEYS)
class ArtifactData(TypedDict):
    key: str
    sha256: str
    """Digest of the artifact's manifest."""
    size: int
    """Total bytes of the files in the directory."""
    metrics: dict[str, Any]
    """Evaluation report of the model."""


@with_config(_KEEP_UNKNOWN_KEYS)
class TrackingData(TypedDict):
    provider: str
    run_id: str
    mode: str
    url: str | None
    """URL of the run's page; None offline."""


@with_config(_KEEP_UNKNOWN_KEYS)
class PlacementData(TypedDict):
    phase: Annotated[str, Field(max_length=200)]
    state: Literal["waiting", "placed"]
    """`waiting`: reported by the driver before it requests workers; `placed`: reported by a worker once it runs."""
    needs: NotRequired[Annotated[str, Field(max_length=2000)]]
    """Requested and available resources, in words, while waiting."""


def name_phase(phase: str, spec_name: str) -> str:
    """Return the name of a phase in `PlacementData`: `train of NAME`. A sweep's trials differ by the spec's name."""
    return f"{phase} of {spec_name}"


def parse_phase(name: str) -> str:
    """Return the phase in a name from `name_phase`: `write`, `prepare`, `train`, `evaluate` or `publish`, or
    `calibrate` for training workers that still calibrate."""
    return name.partition(" of ")[0]


@with_config(_KEEP_UNKNOWN_KEYS)
class ProgressData(TypedDict):
    phase: Annotated[str, Field(max_length=200)]
    part: Annotated[str, Field(max_length=200)]
    """Part of the phase, e.g. one task of an evaluation."""
    done: _TrainingStep
    """Completed units of the part, of `total`."""
    total: _TrainingStep
    eta_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None]
    """Estimated seconds until the part is complete."""


class TriedRate(TypedDict):
    learning_rate: float
    held_out_kl: Annotated[float, Field(ge=0)] | None
    """Held-out KL after the trial; None if it is not finite."""


@with_config(_KEEP_UNKNOWN_KEYS)
class SteeringData(TypedDict):
    action: Literal["rate", "rollback", "end"]
    """`rate`: set the learning rate; `rollback`: return to the best state; `end`: end training."""
    code: SteeringReason
    step: _TrainingStep
    """Optimizer steps done."""
    held_out_kl: NotRequired[float | None]
    """Measured held-out KL in nats; None if it is not finite."""
    start_kl: NotRequired[float | None]
    best_kl: NotRequired[float | None]
    best_step: NotRequired[_TrainingStep | None]
    chosen_step: NotRequired[_TrainingStep | None]
    """For `end`: the step whose state becomes the model."""
    learning_rate: NotRequired[float | None]
    """Peak learning rate from this step on."""
    tried: NotRequired[list[TriedRate]]
    """For `rate`: the learning rates tried by the search."""


@with_config(_KEEP_UNKNOWN_KEYS)
class ErrorData(TypedDict):
    code: str
    """A `ReasonCode`, or the code of an error in `errors.py`."""
    field: NotRequired[str | None]
    value: NotRequired[Any]
    retryable: bool


class _Event(FrozenBaseModel):
    time: _EventTime
    """Unix seconds."""
    level: Level = "info"
    type: str
    message: str


class MessageEvent(_Event):
    """Message to users."""

    type: Literal["message"] = "message"
    data: dict[str, Any] = {}


class StatusEvent(_Event):
    """Start of a phase, or pause, of the attempt; reported by the driver."""

    type: Literal["status"] = "status"
    data: StatusData


class MetricsEvent(_Event):
    """Metrics of optimizer steps."""

    type: Literal["metrics"] = "metrics"
    data: MetricsData


class CheckpointEvent(_Event):
    """A complete checkpoint."""

    type: Literal["checkpoint"] = "checkpoint"
    data: CheckpointData


class ArtifactEvent(_Event):
    """The attempt's model is stored; the attempt is complete."""

    type: Literal["artifact"] = "artifact"
    data: ArtifactData


class TrackingEvent(_Event):
    """The attempt's run in W&B."""

    type: Literal["tracking"] = "tracking"
    data: TrackingData


class PlacementEvent(_Event):
    """A phase's workers wait for resources of the cluster, or have been placed."""

    type: Literal["placement"] = "placement"
    data: PlacementData


class ProgressEvent(_Event):
    """Progress of a phase other than training, which reports `metrics`."""

    type: Literal["progress"] = "progress"
    data: ProgressData


class SteeringEvent(_Event):
    """Steering decision of a training run, based on held-out KL."""

    type: Literal["course"] = "course"
    data: SteeringData


class ErrorEvent(_Event):
    """Failure of the attempt."""

    type: Literal["error"] = "error"
    data: ErrorData


AttemptEvent = Annotated[
    MessageEvent
    | StatusEvent
    | MetricsEvent
    | CheckpointEvent
    | ArtifactEvent
    | TrackingEvent
    | PlacementEvent
    | ProgressEvent
    | SteeringEvent
    | ErrorEvent,
    Field(discriminator="type"),
]
"""Event reported by a worker or the driver."""

ATTEMPT_EVENT: TypeAdapter[AttemptEvent] = TypeAdapter(AttemptEvent)


class _Envelope(BaseModel):
    """Fields that every event has, even of an unknown kind."""

    time: _EventTime
    data: dict[str, Any] = {}


def parse_event(stored: bytes, *, name: str, now: float) -> AttemptEvent:
    """Parse an event. A malformed event, or one of an unknown kind, becomes a warning, so that a job with workers of
    another version can still be followed and cancelled.

    Args:
        name: name of the event in the warning.
        now: time of the warning if the event has none.
    """
    try:
        return ATTEMPT_EVENT.validate_json(stored)
    except ValidationError as error:
        message = f"event {name!r} is not valid: {_describe_first_error(error)}"
    try:
        envelope = _Envelope.model_validate_json(stored)
    except ValidationError:
        envelope = _Envelope(time=now)
    return MessageEvent(time=envelope.time, level="warn", message=message, data=envelope.data)


def _describe_first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}: {first['msg']}"[:_MAX_CAUSE_LENGTH] if path else first["msg"][:_MAX_CAUSE_LENGTH]


@dataclass(frozen=True)
class Pace:
    """Training speed, measured from the first step of an uninterrupted sequence to the newest step."""

    step: int
    time: float
    """Unix seconds of the first step, by the worker's clock."""
    last_time: float = 0.0
    """Unix seconds of the newest step."""

    @classmethod
    def extend(cls, pace: Pace | None, step: int, time: float, *, last_step: int) -> Pace:
        """Return the pace after `step` at `time`. Restart the measurement if `step` is not beyond `last_step`, as after
        resuming from a checkpoint."""
        if pace is None or step <= last_step:
            pace = cls(step, time)
        return replace(pace, last_time=time)

    def estimate_seconds_remaining(self, step: int, total_steps: int | None) -> int | None:
        """Return the seconds from `last_time` to the last step; None after only one step."""
        if total_steps is None or step <= self.step or self.last_time <= self.time:
            return None
        return math.ceil(max(total_steps - step, 0) * (self.last_time - self.time) / (step - self.step))
