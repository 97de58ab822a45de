"""Check of what the operating system grants a process: open files, shared memory, memory."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import psutil

from swiftkv_platform.cli.doctor.disk import GIB
from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, worst
from swiftkv_platform.local.stack import StackOptions

MIB = 1 << 20
_OPEN_FILES = 4096
"""Ray's processes hold a socket or more for each worker, and replicas one for each caller."""
_MEMORY = 3 * GIB
"""Bytes that the local stack, a job of the built-in model and a replica take together."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)


def examine_limits(_: Surroundings) -> Finding:
    """Compare the limits with what the local stack needs."""
    return worst([_open_files(), _shared_memory(), _memory()])


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES:
        return Finding("ok", "Any number of open files" if limit == resource.RLIM_INFINITY else f"{limit} open files")
    message = f"A process may have {limit} files open; Ray and a busy replica need {_OPEN_FILES} and more"
    return Finding("warning", message, "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit")


def _shared_memory() -> Finding:
    wanted = StackOptions().object_store_memory
    if not _SHARED_MEMORY.is_dir():
        return Finding("ok", "no /dev/shm, so that Ray's objects lie in files")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free >= wanted:
        return Finding("ok", f"{free / GIB:.1f} GiB of shared memory free")
    message = f"{_SHARED_MEMORY} has {free // MIB} MiB free; `swiftkv up` gives Ray's object store {wanted // MIB}"
    return Finding("warning", message, "in a container: docker run --shm-size=1g; else make room there")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    if available >= _MEMORY:
        return Finding("ok", f"{available / GIB:.1f} GiB of memory available")
    message = (
        f"{available / GIB:.1f} GiB of memory are available; stack, a small job and a replica take {_MEMORY / GIB:.0f}"
    )
    return Finding("warning", message, "end what takes the memory, or use a larger machine")
