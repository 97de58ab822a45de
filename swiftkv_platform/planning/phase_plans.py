"""Data classes of a job's plan, phase by phase, and of its assumptions."""

from __future__ import annotations

from typing import Literal

from swiftkv_platform.frozen import FrozenModel

PhaseName = Literal["prepare", "calibrate", "train", "evaluate", "publish"]


class DiskUse(FrozenModel):
    """Bytes on a disk or in the store, by purpose."""

    cache: int
    """The teacher as downloaded, prepared rows, the calibrated start, and activations that wait on disk."""
    checkpoints: int
    artifact: int
    total: int

    @classmethod
    def of(cls, *, cache: int, checkpoints: int = 0, artifact: int = 0) -> DiskUse:
        return cls(cache=cache, checkpoints=checkpoints, artifact=artifact, total=cache + checkpoints + artifact)


class PhaseSeconds(FrozenModel):
    """Seconds of a phase by activity; these run one after the other."""

    download: float
    read: float
    """Reading and writing a node's disk."""
    compute: float | None
    """Computation; null if neither a speed nor the size of the data is known."""
    steering: float | None = 0.0
    """Computation outside the run's steps: at most that of the trials of the learning rate search, and measurements of
    held-out KL. Null as `compute` is."""
    upload: float
    """Uploads that the job waits for: the last one, and the part of earlier checkpoints that takes longer than the
    steps."""

    @property
    def total(self) -> float | None:
        """Seconds of all activities; None if one is unknown."""
        if self.compute is None or self.steering is None:
            return None
        return self.download + self.read + self.compute + self.steering + self.upload


class PhasePlan(FrozenModel):
    """Resources of one phase. Bytes are the known ones; `left_out` names what is not included."""

    phase: PhaseName
    num_workers: int
    device_bytes: int | None
    """On the device of the worker that holds most; null without GPUs."""
    host_bytes: int
    """Host memory of the worker that holds most, in addition to a process without a model."""
    node_disk: DiskUse
    """Peak use of the fullest node's disk."""
    store: DiskUse
    """Use of the object store when the phase ends: kept checkpoints, and one being uploaded."""
    downloaded_bytes: int
    """From hub and store, by all nodes together."""
    uploaded_bytes: int
    seconds: float | None
    """Duration; null if a part of it is unknown."""
    seconds_of: PhaseSeconds
    left_out: tuple[str, ...] = ()
    """Names of costs that the phase's figures do not include."""


class Assumptions(FrozenModel):
    """Figures that the plan assumes: the operator's, or defaults."""

    num_nodes: int
    workers_per_node: int
    node_disk_bytes: int | None
    """Bytes of a node's disk that a job may use; null: not stated."""
    flops_per_second: float | None
    """FLOPs per second of a worker; null: unknown."""
    flops_source: str | None
    """Id of the job that was measured, `configured`, or the share of a GPU's peak that is assumed."""
    hub_bytes_per_second: float
    store_bytes_per_second: float
    disk_bytes_per_second: float
    text_bytes_per_second: float
    """Text that a process turns into rows."""
    bytes_per_token: int
    """Assumed bytes of text per token."""


class JobPlan(FrozenModel):
    """All phases of a job in order, and the assumptions."""

    phases: tuple[PhasePlan, ...]
    assumptions: Assumptions
