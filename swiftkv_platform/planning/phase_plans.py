"""Figures of a job's plan, phase by phase, and what they assume. Computes none."""

from __future__ import annotations

from typing import Literal

from swiftkv_platform.frozen import FrozenModel

PhaseName = Literal["prepare", "calibrate", "train", "evaluate", "publish"]


class DiskUse(FrozenModel):
    """Bytes on a disk or in the store."""

    cache: int
    """The teacher as downloaded, prepared rows, the calibrated start, and activations that wait on disk."""
    checkpoints: int
    artifact: int
    total: int

    @classmethod
    def of(cls, *, cache: int, checkpoints: int = 0, artifact: int = 0) -> DiskUse:
        return cls(cache=cache, checkpoints=checkpoints, artifact=artifact, total=cache + checkpoints + artifact)


class PhaseSeconds(FrozenModel):
    """Seconds by what they go to, one after the other."""

    download: float
    read: float
    """Reading and writing a node's disk."""
    compute: float | None
    """Null where neither a speed nor the size of the data is known."""
    steering: float | None = 0.0
    """Computing that no step of a run is: of trials of the search for a learning rate, at most, and of measurements of
    held-out KL. Null as `compute` is."""
    upload: float
    """Uploads that the job waits for: the last one, and of checkpoints what takes longer than the steps beside it."""

    @property
    def total(self) -> float | None:
        """Seconds of all parts; None where one is not known."""
        if self.compute is None or self.steering is None:
            return None
        return self.download + self.read + self.compute + self.steering + self.upload


class PhasePlan(FrozenModel):
    """Needs of one phase. Bytes are those that are known; `left_out` names what comes on top."""

    phase: PhaseName
    num_workers: int
    device_bytes: int | None
    """On the device of the worker that holds most; null without GPUs."""
    host_bytes: int
    """In host memory of the worker that holds most, beside what its process takes without a model."""
    node_disk: DiskUse
    """On the disk of the node with most, at one time."""
    store: DiskUse
    """In the object store when the phase ends, with checkpoints that are kept and one on its way."""
    downloaded_bytes: int
    """From hub and store, by all nodes together."""
    uploaded_bytes: int
    seconds: float | None
    """Duration; null where a part of it is not known."""
    seconds_of: PhaseSeconds
    left_out: tuple[str, ...] = ()
    """Parts that no figure of this phase has."""


class Assumptions(FrozenModel):
    """Figures of the operator's, or defaults, that the plan takes for true."""

    num_nodes: int
    workers_per_node: int
    node_disk_bytes: int | None
    """Bytes that a job may take of a node's disk; null: not stated."""
    flops_per_second: float | None
    """FLOPs a second that a worker reaches; null: not known."""
    flops_source: str | None
    """Id of the job that was measured, `configured`, or the share of a GPU's peak that is assumed."""
    hub_bytes_per_second: float
    store_bytes_per_second: float
    disk_bytes_per_second: float
    text_bytes_per_second: float
    """Text that a process turns into rows."""
    bytes_per_token: int
    """Bytes of text that a token stands for."""


class JobPlan(FrozenModel):
    """All phases of a job, in their order."""

    phases: tuple[PhasePlan, ...]
    assumptions: Assumptions
