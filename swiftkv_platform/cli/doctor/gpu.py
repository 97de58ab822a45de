"""Check of GPU, driver and the build of torch. torch is imported in a process of its own, and only beside a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line

_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_ASK_TORCH = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Vendor, and the beginning of the class of display controllers, on the PCI bus."""
_CUDA_TORCH = "install the CUDA build of torch: https://pytorch.org/get-started/locally"


def examine_gpu(surroundings: Surroundings) -> Finding:
    """Compare what the bus, the driver and torch say."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return Finding("ok", "torch is not installed; only jobs and replicas need it.")
    cuda, smi = _cuda_of_torch(), shutil.which("nvidia-smi")
    build = f"torch {torch} ({f'CUDA {cuda}' if cuda else 'a CPU build'})"
    if smi is None:
        if _is_on_bus():
            message = "There is an NVIDIA GPU on the bus, and no nvidia-smi: the driver is not installed."
            return Finding("failed", message, "install NVIDIA's driver; in a container, run it with --gpus all")
        return Finding("ok", f"No NVIDIA GPU here; {build} computes on the CPU.")
    run = subprocess.run([smi, *_QUERY], capture_output=True, text=True, timeout=surroundings.timeout_s, check=False)
    if run.returncode or not run.stdout.strip():
        reason = one_line(run.stdout + run.stderr) or "it lists no GPU"
        return Finding("failed", f"nvidia-smi: {reason}.", "restart the machine, or install the driver again")
    names, drivers = zip(*(line.rsplit(", ", 1) for line in run.stdout.strip().splitlines()), strict=True)
    found = f"{len(names)} x {names[0]}, driver {drivers[0]}"
    if cuda is None:
        return Finding("failed", f"{found}, and {build} does not use it.", _CUDA_TORCH)
    return _asked(found, build, len(names), surroundings.timeout_s)


def _asked(found: str, build: str, num_gpus: int, timeout_s: float) -> Finding:
    command = [sys.executable, "-c", _ASK_TORCH]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if run.returncode:
        reason = (
            one_line(run.stderr.strip().splitlines()[-1]) if run.stderr.strip() else f"exit status {run.returncode}"
        )
        advice = f"install a driver for this CUDA version, or {_CUDA_TORCH} for this driver"
        return Finding("failed", f"{found}: {build} cannot use it: {reason}.", advice)
    if int(run.stdout) < num_gpus:
        message = f"{found}: {build} sees {int(run.stdout)} of {num_gpus}."
        return Finding("warning", message, "look at CUDA_VISIBLE_DEVICES")
    return Finding("ok", f"{found}; {build} uses it.")


def _cuda_of_torch() -> str | None:
    """CUDA version that torch was built with, as its file says; None for another build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    match = re.search(r"^cuda\b[^=]*= *['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _is_on_bus() -> bool:
    return any(
        _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY)
        for device in (_PCI.iterdir() if _PCI.is_dir() else ())
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
