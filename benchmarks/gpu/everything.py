"""Run all tests and benchmarks that require one NVIDIA GPU: `make gpu`.

    python -m benchmarks.gpu.everything [--vllm-python PATH]

Tests of the engine and of training, tests of vLLM with the plugin, agreement with PyTorch and speed, vLLM's speed in
bfloat16 and FP8. Each part is a separate command, and a failure does not stop the others; a part with
missing requirements is skipped, and they are named. The last lines are a summary. The status is 1 if a part fails or
PyTorch finds no GPU. `--vllm-python` is an interpreter with a GPU build of vLLM and the plugin; default: this one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TESTS = "tests/outside/gpu"
VLLM_TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / TESTS).glob("test_vllm*.py"))
_PROBE_SCRIPT = """
from importlib.metadata import entry_points
from importlib.util import find_spec
if find_spec("vllm") is None:
    print("it has no vLLM")
elif find_spec("pytest") is None:
    print("it has no pytest")
elif "swiftkv" not in entry_points(group="vllm.general_plugins").names:
    print("it has vLLM without this project's plugin")
else:
    import torch
    if not torch.cuda.is_available():
        print("its PyTorch finds no GPU")
"""


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    """Missing requirement; empty if the part can run."""


def list_parts(vllm_python: Path) -> list[Part]:
    """Return the parts, each with its missing requirement on this machine."""
    ours, missing = [sys.executable, "-m"], find_missing_vllm_requirement(vllm_python)
    plain = ["-ra", "--rootdir", ".", "--import-mode=importlib"]
    own = ["-c", "pyproject.toml", "--override-ini", "addopts="]  # whose options deselect these tests
    return [
        Part(
            "tests of engine and training",
            [*ours, "pytest", *own, *plain, *(f"--ignore={one}" for one in VLLM_TESTS), TESTS],
        ),
        Part(
            "tests of vLLM with the plugin",
            [str(vllm_python), "-m", "pytest", "--noconftest", "-c", os.devnull, *plain, *VLLM_TESTS],
            {"VLLM_USE_FLASHINFER_SAMPLER": "0"},  # it compiles with nvcc, which few machines have
            missing,
        ),
        Part("agreement and speed", [*ours, "benchmarks.gpu", "--short"]),
        Part(
            "speed of vLLM by weight dtype",
            [*ours, "benchmarks.gpu.weights", "--vllm-python", str(vllm_python)],
            missing=missing,
        ),
    ]


def find_missing_vllm_requirement(python: Path) -> str:
    """Return an interpreter's missing requirement for vLLM with the plugin on a GPU; empty if it has all."""
    try:
        found = subprocess.run([python, "-c", _PROBE_SCRIPT], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python}: {error.strerror}"
    lines = (found.stdout if found.returncode == 0 else found.stderr).strip().splitlines()
    return f"{python}: {lines[-1]}" if lines else ""


def run_parts(parts: Sequence[Part]) -> int:
    """Run the parts in turn and print a summary; returns 1 if one failed."""
    lines, status = [], 0
    for part in parts:
        if part.missing:
            lines.append(f"skipped  {part.name}: {part.missing}")
            continue
        print(f"-- {part.name}: {shlex.join(part.command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(part.command, cwd=ROOT, env={**os.environ, **part.environment}, check=False).returncode
        outcome = f"FAILED   {part.name}: status {code}" if code else f"passed   {part.name}"
        lines.append(f"{outcome}, {time.monotonic() - began:.0f} s")
        status = max(status, int(code != 0))
    print("\n".join(["-- summary", *lines]), flush=True)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.everything",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), metavar="PATH")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no GPU; nothing was run")
    return run_parts(list_parts(args.vllm_python))


if __name__ == "__main__":
    sys.exit(main())
