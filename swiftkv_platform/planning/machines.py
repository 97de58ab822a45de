"""Memory and speed of known GPUs, and what PyTorch can use of this machine's CPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from swiftkv_platform.specs import JobSpec

DEVICE_MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "L40S": 48e9, "L4": 24e9, "T4": 16e9}
"""Memory of a GPU in bytes. The A100 is missing because it is sold in two sizes."""

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 FLOPs per second as published by the manufacturer."""

_ASSUMED_UTILIZATION = 0.4
"""Share of a GPU's peak that a step is taken to reach, while no job has been measured and no speed is configured."""


def assume_speed(spec: JobSpec) -> tuple[float, str] | None:
    """Return the FLOPs per second of a worker by its GPU's peak, and how they are assumed; None for unknown GPUs."""
    resources = spec.resources
    peak = resources.peak_flops_per_second
    if peak is None and resources.gpus_per_worker and spec.model.dtype == "bfloat16":
        peak = PEAK_FLOPS.get(resources.accelerator_type or "")
    if peak is None:
        return None
    return _ASSUMED_UTILIZATION * peak, f"assumed: {_ASSUMED_UTILIZATION:.0%} of a peak of {peak / 1e12:g} TFLOPs"


_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_CPU_INFO_FILE = Path("/proc/cpuinfo")


def has_fast_bfloat16(cpu_info: Path = _CPU_INFO_FILE) -> bool:
    """Whether PyTorch multiplies bfloat16 matrices on this machine's CPU with vector instructions.

    An x86 processor needs AVX-512 for it; without, a product in bfloat16 takes tens of times as long as in float32.
    True on other processors and systems, where this cannot be read.
    """
    flags = _read_flags(cpu_info)
    return flags is None or flags >= _AVX512_FLAGS


def describe_processor(cpu_info: Path = _CPU_INFO_FILE) -> tuple[str, str | None]:
    """Return the name of this machine's processor, and its widest vector or matrix instructions for PyTorch: "AMX",
    "AVX-512" or "AVX2"; None if it has none of these or they cannot be read."""
    info, flags = _read_cpu_info(cpu_info), _read_flags(cpu_info) or set()
    classes = {"AMX": {"amx_tile", "amx_bf16"}, "AVX-512": _AVX512_FLAGS, "AVX2": {"avx2"}}
    simd = next((name for name, needed in classes.items() if flags >= needed), None)
    return info.get("model name") or platform.processor() or platform.machine(), simd


def _read_flags(path: Path) -> set[str] | None:
    """Read the processor's flags, without those that ONEDNN_MAX_CPU_ISA keeps PyTorch's products from using."""
    flags = _read_cpu_info(path).get("flags")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    hidden = () if limit.startswith(("ALL", "DEFAULT", "AVX512", "AVX10")) else ("avx512", "amx")
    return None if flags is None else {flag for flag in flags.split() if not flag.startswith(hidden)}


def _read_cpu_info(path: Path) -> dict[str, str]:
    """Read the fields of the first processor; empty on systems without the file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}
