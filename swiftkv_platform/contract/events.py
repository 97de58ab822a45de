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

from swiftkv_platform.frozen import FrozenModel


class ReasonCode(StrEnum):
    """`status_reason.code` of a job, unless that is the code of an error in `errors.py`. Codes that end a job have an
    entry in `cures.CURES`."""

    WORKER_LOST = "worker_lost"
    """A process or a machine of the attempt is lost."""
    PREEMPTED = "preempted"
    """The attempt was stopped from outside."""
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    NOT_PLACED = "not_placed"
    """The cluster had no place for the attempt's workers; the job is queued again."""
    WAITING_FOR_RESOURCES = "waiting_for_resources"
    """The job is in the queue until the cluster has places for its workers."""
    WAITING_FOR_TURN = "waiting_for_turn"
    """The job is queued behind others: for a slot, its tenant's quota, or its next attempt."""
    MAX_RUNTIME_EXCEEDED = "max_runtime_exceeded"
    """The attempt ran longer than it may."""
    INTERNAL = "internal"
    """The control plane failed to handle the job."""
    COST_CAP = "cost_cap"
    """The job has reached its cost cap and pauses."""
    PAUSED = "paused"
    """A caller asked for the pause."""
    RESUMED = "resumed"
    CANCELLED = "cancelled"


class CourseCode(StrEnum):
    """Reason for a turn of a training run, see `contract.events.CourseEvent`."""

    RATE_SEARCHED = "rate_searched"
    """The learning rate was found by a search."""
    RATE_BOUNDED = "rate_bounded"
    """The learning rate is as high as the size of the trained matrices allows; the run is too short for a search."""
    HELD_OUT_KL_ABOVE_START = "held_out_kl_above_start"
    HELD_OUT_KL_DIVERGED = "held_out_kl_diverged"
    """Held-out KL is far above its best."""
    LOSS_NOT_FINITE = "loss_not_finite"
    EARLY_STOPPING = "early_stopping"
    """Held-out KL no longer falls."""
    ROLLBACKS_EXHAUSTED = "rollbacks_exhausted"
    """Held-out KL has risen once more than a run may go back."""
    LAST_STEP = "last_step"


Level = Literal["info", "warn", "error"]
AttemptStatus = Literal["running", "evaluating", "paused"]
"""`running` and `evaluating` when that phase begins; `paused` when the attempt was asked to pause, its checkpoint is
complete, and it ends."""

_YEAR_10000 = 253_402_300_800
_MOST_CAUSE = 500
"""Most characters of the explanation why an event cannot be parsed."""
_Time = Annotated[float, Field(ge=0, lt=_YEAR_10000)]
_Step = Annotated[int, Field(ge=0, lt=2**63)]
_OPEN = ConfigDict(extra="allow")
"""Configuration of `data`: unknown keys from newer versions are kept."""


@with_config(_OPEN)
class StatusData(TypedDict):
    status: AttemptStatus


@with_config(_OPEN)
class _KnownMeasurements(TypedDict):
    step: _Step
    tokens: NotRequired[_Step | None]
    """Tokens trained on so far."""
    memory_bytes: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


_KNOWN_MEASUREMENTS = TypeAdapter(_KnownMeasurements)


def _checked_point(point: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {**_KNOWN_MEASUREMENTS.validate_python(point)}
    return {name: checked[name] for name in point}


Point = Annotated[dict[str, Any], AfterValidator(_checked_point)]
"""Measurements of one optimizer step by name: `step` and, if known, `tokens`, `memory_bytes`, `loss`, `logits_loss`,
`lr`, `grad_norm`, `tokens_per_second`, ..."""


@with_config(_OPEN)
class MetricsData(TypedDict):
    points: list[Point]
    """Measurements of one or more steps."""
    total_steps: NotRequired[Annotated[int, Field(ge=1, lt=2**63)]]


@with_config(_OPEN)
class CheckpointData(TypedDict):
    step: _Step
    key: str
    """Key of the checkpoint's directory."""
    size: int
    """Total bytes of its files."""
    sha256: str
    """Digest of its manifest."""


@with_config(_OPEN)
class ArtifactData(TypedDict):
    key: str
    sha256: str
    """Digest of the artifact's manifest."""
    size: int
    """Total bytes of its files."""
    metrics: dict[str, Any]
    """Evaluation report of the model."""


@with_config(_OPEN)
class TrackingData(TypedDict):
    provider: str
    run_id: str
    mode: str
    url: str | None
    """Page of the run; None offline."""


@with_config(_OPEN)
class PlacementData(TypedDict):
    phase: Annotated[str, Field(max_length=200)]
    state: Literal["waiting", "placed"]
    """`waiting` from the driver, before it asks the cluster for workers; `placed` from one of the workers."""
    needs: NotRequired[Annotated[str, Field(max_length=2000)]]
    """Description of what the waiting workers need and what is available."""


def phase_name(phase: str, spec_name: str) -> str:
    """Return the name of a phase in `PlacementData`; it includes the spec's name, to tell a sweep's trials apart."""
    return f"{phase} of {spec_name}"


def phase_of(name: str) -> str:
    """Return the phase in a name from `phase_name`: `write`, `prepare`, `train`, `evaluate` or `publish`. Workers that
    train report `calibrate` first, in the same place."""
    return name.partition(" of ")[0]


@with_config(_OPEN)
class ProgressData(TypedDict):
    phase: Annotated[str, Field(max_length=200)]
    part: Annotated[str, Field(max_length=200)]
    """Part of the phase, e.g. one task of an evaluation."""
    done: _Step
    """Pieces of the part's work that are done, of `total`."""
    total: _Step
    eta_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None]
    """Seconds until the part is done, at the pace so far."""


class TriedRate(TypedDict):
    learning_rate: float
    held_out_kl: Annotated[float, Field(ge=0)] | None
    """Held-out KL after the trial; None if it is not finite."""


@with_config(_OPEN)
class CourseData(TypedDict):
    action: Literal["rate", "rollback", "end"]
    """`rate`: the learning rate is found; `rollback`: training goes back to its best state; `end`: training ends."""
    code: CourseCode
    step: _Step
    """Optimizer steps done."""
    held_out_kl: NotRequired[float | None]
    """Measurement that caused the action, in nats; None if it is not finite."""
    start_kl: NotRequired[float | None]
    best_kl: NotRequired[float | None]
    best_step: NotRequired[_Step | None]
    chosen_step: NotRequired[_Step | None]
    """For `end`: the step whose state becomes the model."""
    learning_rate: NotRequired[float | None]
    """Peak rate from here on."""
    tried: NotRequired[list[TriedRate]]
    """`rate`: the search."""


@with_config(_OPEN)
class ErrorData(TypedDict):
    code: str
    """A `ReasonCode`, or the code of an error of `errors.py`."""
    field: NotRequired[str | None]
    value: NotRequired[Any]
    retryable: bool


class _Event(FrozenModel):
    time: _Time
    """Unix seconds."""
    level: Level = "info"
    type: str
    message: str


class MessageEvent(_Event):
    """Message for people to read."""

    type: Literal["message"] = "message"
    data: dict[str, Any] = {}


class StatusEvent(_Event):
    """Beginning of a phase of the attempt, or its pause; from the driver."""

    type: Literal["status"] = "status"
    data: StatusData


class MetricsEvent(_Event):
    """Measurements of optimizer steps."""

    type: Literal["metrics"] = "metrics"
    data: MetricsData


class CheckpointEvent(_Event):
    """A complete checkpoint."""

    type: Literal["checkpoint"] = "checkpoint"
    data: CheckpointData


class ArtifactEvent(_Event):
    """The published model: the attempt has done its work."""

    type: Literal["artifact"] = "artifact"
    data: ArtifactData


class TrackingEvent(_Event):
    """The attempt's run at a tracker."""

    type: Literal["tracking"] = "tracking"
    data: TrackingData


class PlacementEvent(_Event):
    """Workers of a phase that wait for a place on the cluster, or one that has found it."""

    type: Literal["placement"] = "placement"
    data: PlacementData


class ProgressEvent(_Event):
    """Progress of a phase other than training, which reports `metrics`."""

    type: Literal["progress"] = "progress"
    data: ProgressData


class CourseEvent(_Event):
    """Turn of the training run, decided by its held-out KL."""

    type: Literal["course"] = "course"
    data: CourseData


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
    | CourseEvent
    | ErrorEvent,
    Field(discriminator="type"),
]
"""Event that a worker or the driver reports."""

ATTEMPT_EVENT: TypeAdapter[AttemptEvent] = TypeAdapter(AttemptEvent)


class _Envelope(BaseModel):
    """Fields of an event that can be read even if its kind, or something in it, is unknown."""

    time: _Time
    data: dict[str, Any] = {}


def parse_event(stored: bytes, *, name: str, now: float) -> AttemptEvent:
    """Parse an event. A malformed event, or one of an unknown kind, becomes a warning: workers of another version must
    not keep their job from being tailed or cancelled. `name`: the event's name in the warning. `now`: time of the
    warning if the event has none."""
    try:
        return ATTEMPT_EVENT.validate_json(stored)
    except ValidationError as error:
        message = f"event {name!r} cannot be understood: {_cause(error)}"
    try:
        envelope = _Envelope.model_validate_json(stored)
    except ValidationError:
        envelope = _Envelope(time=now)
    return MessageEvent(time=envelope.time, level="warn", message=message, data=envelope.data)


def _cause(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}: {first['msg']}"[:_MOST_CAUSE] if path else first["msg"][:_MOST_CAUSE]


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
