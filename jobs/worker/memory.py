"""Memory that a worker finds and gives back, and what it shares with other workers of its machine. Knows no model."""

from __future__ import annotations

import ctypes
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import torch

from swiftkv_platform.model.workers import Workers

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
