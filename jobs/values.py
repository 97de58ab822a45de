"""Values passed between the driver, the tasks and the workers of an attempt. Imports neither ray nor torch."""

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
class Plan:
    """Facts about the run ahead that the driver needs."""

    spec: JobSpec
    """Spec with the defaults that depend on model and data, see `specs.job`."""
    total_steps: int
    num_trained_parameters: int
    statistics: dict[str, Any]
    """Statistics of the data, see `DataStatistics`."""
    flops_per_token: float | None = None
    """FLOPs of training per position that the loss counts, see `swiftkv_platform.jobs.worker.prepare`."""
    messages: tuple[tuple[str, bool], ...] = ()
    """Statistics as sentences, each with whether it is a warning."""


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration that the driver passes to every worker."""

    request: AttemptRequest
    store_uri: str
    total_steps: int
    prepared: ObjectRef
    """Reference to a `StoredPreparation`."""
    flops_per_token: float | None = None
    """See `Plan`."""


@dataclass(frozen=True)
class Outcome:
    """Result of the training run."""

    checkpoint: str | None
    """Key of the checkpoint that becomes the model; after a stop request, of the newest complete one."""
    error: TrainingError | None = None
    """Error that a restart would repeat. It is returned, not raised: Ray Train would restart the workers."""
    stopped: StopReason | None = None
    """Reason why the run ended before its last step, with a checkpoint of its progress."""


@dataclass(frozen=True)
class Member:
    """Place of a worker in its group."""

    rank: int
    size: int
    address: str
    """Host and port where the workers meet."""


STOPPED: dict[StopRequest, StopReason] = {StopRequest.STOP: ReasonCode.PREEMPTED, StopRequest.PAUSE: ReasonCode.PAUSED}
"""Reason why an attempt ends, by the stop request that ends it."""


class StoppedError(Exception):
    """The attempt ended early on request; a complete checkpoint has its progress."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason
