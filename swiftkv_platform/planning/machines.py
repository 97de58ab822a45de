"""GPUs, nodes and rates that a job's plan assumes: the operator's figures, or the defaults here."""

from __future__ import annotations

import platform
from pathlib import Path

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import JobSpec, ResourcesSpec

DEVICE_MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "L40S": 48e9, "L4": 24e9, "T4": 16e9}
"""Memory of a GPU in bytes. The A100 is missing because it is sold in two sizes."""

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 FLOPs per second as published by the manufacturer."""


ASSUMED_UTILISATION = 0.4
"""Share of a GPU's peak that a step is taken to reach, while no job has been measured and no speed is configured."""


class Machines(FrozenModel):
    """Nodes of the cluster, as the operator describes them."""

    node_gpus: int = 8
    """GPUs of a node."""
    node_cpus: float | None = None
    """CPUs of a node; None: all workers without GPUs are assumed to be on one node."""
    node_disk_bytes: int | None = None
    """Disk space of a node that a job may use, in bytes; None: unknown."""
    hub_bytes_per_second: float = 100e6
    """Download rate of a node from the hub."""
    store_bytes_per_second: float = 500e6
    """Rate at which a node reads from or writes to the object store."""
    disk_bytes_per_second: float = 1e9
    """Rate at which a node reads from or writes to its disk."""
    text_bytes_per_second: float = 0.5e6
    """Rate at which one process turns text into rows (docs/data.md)."""
    flops_per_second: float | None = None
    """FLOPs per second that one worker reaches; None: a share of its GPU's peak, if that is known."""
    flops_source: str = "configured"
    """Source of `flops_per_second`."""

    def workers_per_node(self, resources: ResourcesSpec) -> int:
        room: float = resources.max_workers
        if resources.gpus_per_worker:
            room = self.node_gpus // resources.gpus_per_worker
        elif self.node_cpus is not None:
            room = self.node_cpus // resources.cpus_per_worker
        return max(1, min(int(room), resources.max_workers))

    def speed(self, spec: JobSpec) -> tuple[float, str] | None:
        """Return a worker's FLOPs per second and their source; None if unknown."""
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

    An x86 processor needs AVX-512 for it; without, a product in bfloat16 takes tens of times as long as in float32.
    True on other processors and systems, where this cannot be read.
    """
    flags = _read_cpu_info(cpu_info).get("flags")
    return flags is None or set(flags.split()) >= _AVX512


def describe_processor(cpu_info: Path = _CPU_INFO) -> tuple[str, str | None]:
    """Return the name of this machine's processor, and its widest vector or matrix instructions for PyTorch: "AMX",
    "AVX-512" or "AVX2"; None if it has none of these or they cannot be read."""
    info = _read_cpu_info(cpu_info)
    flags = set(info.get("flags", "").split())
    classes = {"AMX": {"amx_tile", "amx_bf16"}, "AVX-512": _AVX512, "AVX2": {"avx2"}}
    simd = next((name for name, needed in classes.items() if flags >= needed), None)
    return info.get("model name") or platform.processor() or platform.machine(), simd


def _read_cpu_info(path: Path) -> dict[str, str]:
    """Read the fields of the first processor; empty on systems without the file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}
