"""Reasons for the end of an attempt, for a job's status, that are no error of ours, and for turns of a training run."""

from __future__ import annotations

from enum import StrEnum


class ReasonCode(StrEnum):
    """`status_reason.code` of a job, where that is not the code of an error of `errors.py`."""

    WORKER_LOST = "worker_lost"
    """A process or a machine of the attempt is gone."""
    PREEMPTED = "preempted"
    """The attempt was stopped from outside."""
    OUT_OF_MEMORY = "out_of_memory"
    NOT_PLACED = "not_placed"
    """The attempt's workers found no place on the cluster."""
    MAX_RUNTIME_EXCEEDED = "max_runtime_exceeded"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    """Control plane and workers are of versions that do not fit."""
    INTERNAL = "internal"
    """The control plane failed to handle the job."""
    COST_CAP = "cost_cap"
    """The job has cost what it may, and pauses."""
    PAUSED = "paused"
    """A caller asked for the pause."""
    RESUMED = "resumed"
    CANCELLED = "cancelled"


class CourseCode(StrEnum):
    """Reason for a turn of a training run, see `contract.events.CourseEvent`."""

    RATE_SEARCHED = "rate_searched"
    """The learning rate is the outcome of a search."""
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
