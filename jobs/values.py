"""Values passed between driver, tasks and workers of an attempt. Imports neither ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.errors import TrainingError
from swiftkv_platform.specs import JobSpec

if TYPE_CHECKING:
    from ray import ObjectRef

StopReason = Literal[ReasonCode.PREEMPTED, ReasonCode.PAUSED]


@dataclass(frozen=True)
class RunPlan:
    """Plan of the training run."""

    spec: JobSpec
    """Spec with resolved defaults that depend on model and data, see `specs.job`."""
    total_steps: int
    num_trained_parameters: int
    statistics: dict[str, Any]
    """Statistics of the data, see `DataStatistics`."""
    flops_per_token: float | None = None
    """FLOPs of training per counted position, see `compute_flops_per_token`."""
    messages: tuple[tuple[str, bool], ...] = ()
    """Messages about data and spec as (message, is_warning)."""


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration that the driver passes to every worker."""

    request: AttemptRequest
    store_uri: str
    total_steps: int
    prepared: ObjectRef
    """Reference to a `StoredInputs`."""
    flops_per_token: float | None = None
    """See `RunPlan`."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of the training run."""

    checkpoint: str | None
    """Key of the checkpoint that becomes the model; after a stop request, of the newest checkpoint."""
    error: TrainingError | None = None
    """Error that a restart would repeat. It is returned, because Ray Train restarts workers that raise."""
    stopped: StopReason | None = None
    """Reason why the run ended before its last step. The newest checkpoint has the run's progress."""


@dataclass(frozen=True)
class GroupMember:
    """Rank of a worker in its group, and the group's address."""

    rank: int
    size: int
    address: str
    """Host and port of the process group's rendezvous."""


STOP_REASONS: dict[StopRequest, StopReason] = {
    StopRequest.STOP: ReasonCode.PREEMPTED,
    StopRequest.PAUSE: ReasonCode.PAUSED,
}
"""Reason why an attempt ends, by its stop request."""


class StoppedError(Exception):
    """The attempt ended early on request. The newest checkpoint has the progress."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason
