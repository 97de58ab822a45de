"""Checks of `swiftkv doctor` on this machine: disks, ports, limits, compiler and GPU."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from swiftkv_platform.cli.doctor.findings import (
    GIB,
    Finding,
    Surroundings,
    check,
    failed,
    installed_version,
    ok,
    one_line,
    warning,
    worst,
)
from swiftkv_platform.local.stack import StackOptions
from swiftkv_platform.local.state import PARTS, port_of
from swiftkv_platform.planning.machines import multiplies_bfloat16


@check("disk", "look for a file system that does not answer: df")
def disk(surroundings: Surroundings) -> Finding:
    """Check that directories for artifacts, caches and temporary files can be written and have free space."""
    settings, cache = surroundings.settings, Path.home() / ".cache"
    places = {"SWIFTKV_HOME": settings.home}
    if "://" not in settings.resolved_storage_uri:
        places["SWIFTKV_STORAGE_URI"] = Path(settings.resolved_storage_uri)
    places["SWIFTKV_KERNEL_CACHE"] = Path(os.environ.get("SWIFTKV_KERNEL_CACHE") or cache / "swiftkv" / "kernels")
    places["HF_HOME"] = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    places["TMPDIR"] = Path(tempfile.gettempdir())
    return worst([_room(variable, path, surroundings.min_free_bytes) for variable, path in places.items()])


def _room(variable: str, path: Path, min_free_bytes: int) -> Finding:
    directory = existing(path)
    if (reason := why_not_writable(directory)) is not None:
        message = f"{directory} is not writable ({reason}), and {variable} is {path}."
        return failed(message, f"set {variable} to a directory that you may write to")
    free = shutil.disk_usage(directory).free
    if free < min_free_bytes:
        asked = f"{min_free_bytes / GIB:.1f} GiB are required"
        message = f"{directory} ({variable}) has {free / GIB:.1f} GiB free, and {asked}."
        return failed(message, f"free some space, or set {variable} to a directory on a larger disk")
    return ok(f"{free / GIB:.1f} GiB free for {variable}")


def existing(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be created in an existing directory; None if one can. Leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


@check("ports", "look at what listens on this machine: ss -ltnp")
def ports(surroundings: Surroundings) -> Finding:
    """Check that each port of `swiftkv up` is free, or used by what it has started."""
    state, settings = surroundings.stack.state(), surroundings.settings
    if state is not None and any(state.alive(part) for part in PARTS):
        return ok(f"`swiftkv up` runs and holds them: {state.url}, {state.ray_dashboard_url}.")
    ports = {
        "SWIFTKV_PORT": settings.port,
        "SWIFTKV_SERVE_URL": port_of(settings.serve_url),
        "SWIFTKV_RAY_DASHBOARD_URL": port_of(settings.ray_dashboard_url),
    }
    return worst([_port(variable, port) for variable, port in ports.items() if port])


def _port(variable: str, port: int) -> Finding:
    with socket.socket() as listener:
        # With this, a port with lingering connections counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"Port {port} ({variable}) is taken{_holder(port)}: {error.strerror}."
            advice = f"`swiftkv up` would take another port; stop what holds it, or set {variable} to another port"
            return warning(message, advice)
    return ok(f"{port} is free")


def _holder(port: int) -> str:
    """Return the process that listens at a port as a phrase; "" if unknown to this user."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


_OPEN_FILES = 4096
"""Least limit on open files: Ray needs sockets for each worker, and replicas one for each caller."""
_MEMORY = 3 * GIB
"""Bytes that the local stack, a job of the built-in model and a replica need together."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)


@check("limits", "look at ulimit -a and at free -m")
def limits(_: Surroundings) -> Finding:
    """Compare open files, shared memory and memory with what the local stack needs."""
    return worst([_open_files(), _shared_memory(), _memory()])


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES:
        return ok("Any number of open files" if limit == resource.RLIM_INFINITY else f"{limit} open files")
    message = f"A process may have {limit} files open; Ray and a busy replica need {_OPEN_FILES} or more"
    return warning(message, "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit")


def _shared_memory() -> Finding:
    wanted = StackOptions().object_store_memory
    if not _SHARED_MEMORY.is_dir():
        return ok("no /dev/shm, so Ray keeps its objects in files")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free >= wanted:
        return ok(f"{free / GIB:.1f} GiB of shared memory free")
    message = f"{_SHARED_MEMORY} has {free >> 20} MiB free; `swiftkv up` gives Ray's object store {wanted >> 20}"
    return warning(message, "in a container: docker run --shm-size=1g; otherwise free some space there")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    if available >= _MEMORY:
        return ok(f"{available / GIB:.1f} GiB of memory available")
    wanted = f"the stack, a small job and a replica need {_MEMORY / GIB:.0f}"
    advice = "stop what uses the memory, or use a larger machine"
    return warning(f"{available / GIB:.1f} GiB of memory are available; {wanted}", advice)


_PROGRAM = "#include <omp.h>\n#include <span>\nint swiftkv(std::span<int> x) { return omp_get_max_threads() + x[0]; }\n"
_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fopenmp")
"""Flags of the CPU kernels that old compilers, or those without OpenMP, lack."""


@check("compiler", "try the compiler by hand: g++ --version")
def compiler(surroundings: Surroundings) -> Finding:
    """Compile a small library with the flags of the engine's CPU kernels, which are compiled at first use."""
    wanted = os.environ.get("CXX", "g++")
    slower = "the engine then runs on PyTorch's operators, slower"
    advice = "apt-get install g++, dnf install gcc-c++, or CXX=/path/to/g++"
    compiler = shutil.which(wanted)
    if compiler is None:
        return warning(f"There is no C++ compiler {wanted!r} on PATH for the CPU kernels; {slower}.", advice)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="ascii")
        run = _run(surroundings, compiler, *_FLAGS, str(source), "-o", str(source.with_suffix(".so")))
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"exit status {run.returncode}")
        message = f"{compiler} cannot compile C++20 with OpenMP ({reason.strip()}); {slower}."
        return warning(message, f"use a newer one: {advice}")
    if not multiplies_bfloat16():
        return ok(
            f"{compiler} works; this processor has no AVX-512, so PyTorch's operators are used, and float32 is much "
            "faster than bfloat16 (model.dtype of a job, engine.dtype of a deployment)."
        )
    return ok(f"{compiler} compiles C++20 with OpenMP.")


def _run(surroundings: Surroundings, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=surroundings.timeout_s, check=False)


_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_ASK_TORCH = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Vendor id, and the prefix of the class of display controllers, on the PCI bus."""
_CUDA_TORCH = "install the CUDA build of torch: https://pytorch.org/get-started/locally"


@check("gpu", "try the driver by hand: nvidia-smi")
def gpu(surroundings: Surroundings) -> Finding:
    """Compare bus, driver and torch. torch is imported only if there is a GPU, in another process."""
    torch, cuda, smi = installed_version("torch"), _cuda_of_torch(), shutil.which("nvidia-smi")
    if torch is None:
        return ok("torch is not installed; only jobs and replicas need it.")
    build = f"torch {torch} ({f'CUDA {cuda}' if cuda else 'a CPU build'})"
    if smi is None:
        if _is_on_bus():
            message = "There is an NVIDIA GPU on the bus, but no nvidia-smi: the driver is not installed."
            return failed(message, "install NVIDIA's driver; in a container, run it with --gpus all")
        return ok(f"No NVIDIA GPU here; {build} computes on the CPU.")
    run = _run(surroundings, smi, *_QUERY)
    if run.returncode or not run.stdout.strip():
        reason = one_line(run.stdout + run.stderr) or "it lists no GPU"
        return failed(f"nvidia-smi: {reason}.", "restart the machine, or install the driver again")
    names, drivers = zip(*(line.rsplit(", ", 1) for line in run.stdout.strip().splitlines()), strict=True)
    found = f"{len(names)} x {names[0]}, driver {drivers[0]}"
    if cuda is None:
        return failed(f"{found}, but {build} does not use it.", _CUDA_TORCH)
    run = _run(surroundings, sys.executable, "-c", _ASK_TORCH)
    if run.returncode:
        reason = one_line((run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1])
        advice = f"install a driver for this CUDA version, or {_CUDA_TORCH} for this driver"
        return failed(f"{found}: {build} cannot use it: {reason}.", advice)
    if int(run.stdout) < len(names):
        message = f"{found}: {build} sees {int(run.stdout)} of {len(names)}."
        return warning(message, "look at CUDA_VISIBLE_DEVICES")
    return ok(f"{found}; {build} uses it.")


def _cuda_of_torch() -> str | None:
    """Return the CUDA version of torch's build, read from its files without import; None for a build without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    match = re.search(r"^cuda\b[^=]*= *['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _is_on_bus() -> bool:
    def text(path: Path) -> str:
        return path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""

    devices = _PCI.iterdir() if _PCI.is_dir() else ()
    return any(text(each / "vendor") == _NVIDIA and text(each / "class").startswith(_DISPLAY) for each in devices)
