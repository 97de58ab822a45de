"""What the driver hands to the phases of an attempt and gets back. It loads no torch, so that a driver starts at once;
the phases import what they need where they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from swiftkv_platform.attempts import AttemptRequest, Manifest
from swiftkv_platform.errors import TrainingError
from swiftkv_platform.logs import configure_logging

if TYPE_CHECKING:
    from jobs.prepare import Prepared


@dataclass(frozen=True)
class Plan:
    """What the driver needs to know about the run ahead."""

    total_steps: int
    num_trained_parameters: int
    statistics: dict[str, Any]
    """Of the data, see `DataStatistics`."""


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver hands to every worker."""

    request: AttemptRequest
    store_uri: str
    total_steps: int
    prepared: ray.ObjectRef
    """A `Prepared`, read from Ray's object store without a copy."""


@dataclass(frozen=True)
class Outcome:
    """How the training run ended."""

    checkpoint: str | None
    """Key of the newest complete checkpoint."""
    error: TrainingError | None = None
    """Set when going on is pointless. It is returned: Ray Train would answer an exception by starting over."""


def prepare(request: AttemptRequest) -> tuple[Plan, Prepared]:
    """The task before training, see `jobs.prepare`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="prepare")
    from jobs.prepare import prepare as run

    return run(request.spec)


def evaluate(request: AttemptRequest, store_uri: str, checkpoint: str, prepared: Prepared) -> Manifest:
    """The task after training, see `jobs.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="evaluate")
    from jobs.evaluate import evaluate_and_publish

    return evaluate_and_publish(request, store_uri, checkpoint, prepared)
