"""Run all tests and benchmarks that require one NVIDIA GPU: `make gpu`.

    python -m benchmarks.gpu.everything [--vllm-python PATH] [--limit-s SECONDS]

Each part is a separate command. The most valuable ones come first, so that a short time on a GPU gives results: text of
vLLM with CUDA graphs, and its speed; then the engine and training; then what else vLLM serves. A failure does not stop
the others; a part with missing requirements is skipped, and they are named. After `--limit-s` seconds the running part
is stopped, and the rest is skipped; what a part has printed and written until then stays. The last lines are a summary.
The status is 1 if a part fails or is stopped, or PyTorch finds no GPU. `--vllm-python` is an interpreter with a GPU
build of vLLM and the plugin; default: this one.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
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
    plain = ["-v", "--rootdir", ".", "--import-mode=importlib"]
    own = ["-c", "pyproject.toml", "--override-ini", "addopts="]  # whose options deselect these tests

    def make_vllm_part(name: str, *selection: str) -> Part:
        command = [str(vllm_python), "-m", "pytest", "--noconftest", "-c", os.devnull, *plain, *selection]
        # FlashInfer's sampler compiles with nvcc, which few machines have.
        return Part(name, [*command, *VLLM_TESTS], {"VLLM_USE_FLASHINFER_SAMPLER": "0"}, missing)

    return [
        make_vllm_part("tests of vLLM with CUDA graphs", "-k", "with_graphs"),
        Part(
            "speed of vLLM by weight dtype",
            [*ours, "benchmarks.gpu.weights", "--vllm-python", str(vllm_python)],
            missing=missing,
        ),
        Part("agreement and speed", [*ours, "benchmarks.gpu", "--short"]),
        Part(
            "tests of engine and training",
            [*ours, "pytest", *own, *plain, *(f"--ignore={one}" for one in VLLM_TESTS), TESTS],
        ),
        make_vllm_part("other tests of vLLM", "-k", "not with_graphs"),
    ]


def find_missing_vllm_requirement(python: Path) -> str:
    """Return an interpreter's missing requirement for vLLM with the plugin on a GPU; empty if it has all."""
    try:
        found = subprocess.run([python, "-c", _PROBE_SCRIPT], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python}: {error.strerror}"
    lines = (found.stdout if found.returncode == 0 else found.stderr).strip().splitlines()
    return f"{python}: {lines[-1]}" if lines else ""


def run_parts(parts: Sequence[Part], limit_s: float = math.inf) -> int:
    """Run the parts in turn for at most `limit_s` seconds and print a summary; returns 1 if one failed or was
    stopped."""
    lines, status, deadline = [], 0, time.monotonic() + limit_s
    for part in parts:
        began = time.monotonic()
        if part.missing or began >= deadline:
            lines.append(f"skipped  {part.name}: {part.missing or 'no time was left'}")
            continue
        print(f"-- {part.name}: {shlex.join(part.command)}", flush=True)
        code = _run_part(part, deadline - began)
        outcome = "passed  " if code == 0 else "STOPPED " if code is None else "FAILED  "
        lines.append(
            f"{outcome} {part.name}" + (f": status {code}" if code else "") + f", {time.monotonic() - began:.0f} s"
        )
        status = max(status, int(code != 0))
    print("\n".join(["-- summary", *lines]), flush=True)
    return status


def _run_part(part: Part, limit_s: float) -> int | None:
    """Return the command's status; None if it was stopped, with all its processes, after `limit_s` seconds."""
    environment = {**os.environ, **part.environment}
    with subprocess.Popen(part.command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(None if limit_s == math.inf else limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.everything",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), metavar="PATH")
    parser.add_argument("--limit-s", type=float, default=math.inf, metavar="SECONDS")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no GPU; nothing was run")
    return run_parts(list_parts(args.vllm_python), args.limit_s)


if __name__ == "__main__":
    sys.exit(main())
