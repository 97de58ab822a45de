"""Values that the driver, the tasks and the workers of an attempt hand each other. Loads neither ray nor torch."""

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
    """Spec with what the model and the data decide, see `specs.defaults`."""
    total_steps: int
    num_trained_parameters: int
    statistics: dict[str, Any]
    """Statistics of the data, see `DataStatistics`."""
    flops_per_token: float | None = None
    """FLOPs of training per position that the loss counts, see `swiftkv_platform.jobs.worker.prepare`."""
    messages: tuple[tuple[str, bool], ...] = ()
    """Statistics in sentences, and which of them are warnings."""


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration that the driver hands to every worker."""

    request: AttemptRequest
    store_uri: str
    total_steps: int
    prepared: ObjectRef
    """A `StoredPreparation`."""
    flops_per_token: float | None = None
    """See `Plan`."""


@dataclass(frozen=True)
class Outcome:
    """Result of the training run."""

    checkpoint: str | None
    """Key of the checkpoint that the model is made of; of a run that was stopped, of the newest complete one."""
    error: TrainingError | None = None
    """Set when going on is pointless. It is returned: Ray Train would answer an exception by starting over."""
    stopped: StopReason | None = None
    """Reason for which the run ended before its last step, with a checkpoint of where it was."""


@dataclass(frozen=True)
class Member:
    """One worker's place among those of its group."""

    rank: int
    size: int
    address: str
    """Host and port at which they meet."""


STOPPED: dict[StopRequest, StopReason] = {StopRequest.STOP: ReasonCode.PREEMPTED, StopRequest.PAUSE: ReasonCode.PAUSED}
"""Reason for which an attempt ends, by the stop request that ends it."""


class StoppedError(Exception):
    """The attempt has ended before its time, as it was asked to; of what was trained there is a complete checkpoint."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason
