"""Check of the C++ compiler, which compiles the engine's CPU kernels on first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings

_PROGRAM = "#include <omp.h>\n#include <span>\nint swiftkv(std::span<int> x) { return omp_get_max_threads() + x[0]; }\n"
_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fopenmp")
"""Flags of the kernels that an older compiler, or one without OpenMP, does not have."""
_PACKAGES = "apt-get install g++, dnf install gcc-c++, or CXX=/path/to/g++"
_CPU_INFO = Path("/proc/cpuinfo")
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_SLOWER = "the engine then runs on PyTorch's operators, slower"


def examine_compiler(surroundings: Surroundings) -> Finding:
    """Compile a small library with the kernels' flags."""
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        message = f"There is no C++ compiler {wanted!r} on PATH for the CPU kernels; {_SLOWER}."
        return Finding("warning", message, _PACKAGES)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="ascii")
        command = [compiler, *_FLAGS, str(source), "-o", str(source.with_suffix(".so"))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=surroundings.timeout_s, check=False)
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"exit status {run.returncode}")
        message = f"{compiler} cannot compile C++20 with OpenMP ({reason.strip()}); {_SLOWER}."
        return Finding("warning", message, f"a newer one would do: {_PACKAGES}")
    if not _has_avx512():
        return Finding("ok", f"{compiler} works; this processor has no AVX-512, so that PyTorch's operators are used.")
    return Finding("ok", f"{compiler} compiles C++20 with OpenMP.")


def _has_avx512() -> bool:
    if not _CPU_INFO.is_file():
        return False
    lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= _AVX512
