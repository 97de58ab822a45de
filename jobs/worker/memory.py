"""Memory that a worker finds and gives back, and what it shares with other workers: a process group, and a directory of
its machine. Knows no model.
"""

from __future__ import annotations

import ctypes
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psutil
import torch
import torch.distributed as dist

from swiftkv_platform.jobs.values import Member
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs import ResourcesSpec

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_MAPPED_BYTES = 8 << 20
"""Least size of a tensor that gets a mapping of its own. glibc's bound rises to 32 MiB as soon as a tensor of that size
is freed; what was gathered of each layer then stays in its heap, and a worker holds twice what it uses."""


def give_back_freed_tensors() -> None:
    """Have glibc return a large tensor's memory to the system once it is freed; other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def free_bytes(device: torch.device, num_local: int) -> float:
    """Bytes that one of `num_local` workers of this machine may take on `device`."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available) / num_local


@dataclass(frozen=True)
class Workspace:
    """A directory that the workers of a machine share."""

    path: Path
    fetches: bool
    """Whether this worker is the first of its machine, which fetches for the others."""
    num_local: int
    """Workers of the machine."""


@contextmanager
def shared_workspace(name: str) -> Iterator[Workspace]:
    """A new directory, the same for all workers of a machine; the first of them removes it as it leaves. Collective."""
    workers = Workers()
    hosts, host = workers.gather(socket.gethostname()), socket.gethostname()
    path = Path(tempfile.gettempdir()) / workers.from_first(f"{name}-{uuid4().hex}")
    path.mkdir(exist_ok=True)
    fetches = workers.rank == hosts.index(host)
    try:
        yield Workspace(path, fetches, hosts.count(host))
    finally:
        if fetches:
            shutil.rmtree(path, ignore_errors=True)


_PATIENCE = timedelta(hours=24)
"""Longest wait of a worker for what another does alone, e.g. a download; a lost one is noticed at once."""


@contextmanager
def joined(member: Member, resources: ResourcesSpec) -> Iterator[None]:
    """The default process group of a group's workers; none for one alone."""
    if member.size == 1:
        yield
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if resources.gpus_per_worker else "gloo",
        init_method=f"tcp://{member.address}",
        rank=member.rank,
        world_size=member.size,
        timeout=_PATIENCE,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
