"""GPUs, nodes and rates that a job's plan assumes: an operator's figures, else the defaults here."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import JobSpec, ResourcesSpec

DEVICE_MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "L40S": 48e9, "L4": 24e9, "T4": 16e9}
"""Bytes; an A100 is sold with two sizes."""

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 operations a second, as their maker states them."""


ASSUMED_UTILISATION = 0.4
"""Share of a GPU's peak that a step is taken to reach, while no job has been measured and no speed is configured."""


class Machines(FrozenModel):
    """Nodes of the cluster, and what an operator states of them."""

    node_gpus: int = 8
    """GPUs of a node."""
    node_cpus: float | None = None
    """CPUs of a node; None takes all workers without GPUs to be on one node."""
    node_disk_bytes: int | None = None
    """Bytes that a job may take on the disk of a node; None: not known."""
    hub_bytes_per_second: float = 100e6
    """Rate at which a node reads from the hub."""
    store_bytes_per_second: float = 500e6
    """Rate at which a node reads from the object store, or writes to it."""
    disk_bytes_per_second: float = 1e9
    """Rate at which a node reads its disk, or writes to it."""
    text_bytes_per_second: float = 0.5e6
    """Rate at which one process makes rows of text (docs/data.md)."""
    flops_per_second: float | None = None
    """FLOPs a second that one worker reaches; None: a share of its GPU's peak, where that is known."""
    flops_source: str = "configured"
    """Origin of `flops_per_second`."""

    def workers_per_node(self, resources: ResourcesSpec) -> int:
        room: float = resources.max_workers
        if resources.gpus_per_worker:
            room = self.node_gpus // resources.gpus_per_worker
        elif self.node_cpus is not None:
            room = self.node_cpus // resources.cpus_per_worker
        return max(1, min(int(room), resources.max_workers))

    def speed(self, spec: JobSpec) -> tuple[float, str] | None:
        """FLOPs a second of a worker and their origin; None where nothing tells them."""
        if self.flops_per_second is not None:
            return self.flops_per_second, self.flops_source
        resources = spec.resources
        peak = resources.peak_flops_per_second
        if peak is None and resources.gpus_per_worker and spec.model.dtype == "bfloat16":
            peak = PEAK_FLOPS.get(resources.accelerator_type or "")
        if peak is None:
            return None
        return ASSUMED_UTILISATION * peak, f"assumed: {ASSUMED_UTILISATION:.0%} of a peak of {peak / 1e12:g} TFLOPs"


_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_CPU_INFO = Path("/proc/cpuinfo")


def multiplies_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Whether PyTorch multiplies bfloat16 matrices on this machine's CPU with vector instructions.

    An x86 processor needs AVX-512 for it; below, a product in bfloat16 takes tens of times as long as in float32. True
    where nothing tells: on other processors and other systems.
    """
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines() if cpu_info.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), None)
    return flags is None or set(flags.split()) >= _AVX512
