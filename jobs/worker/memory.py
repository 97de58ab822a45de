"""Memory that a worker finds, and which of the workers share a machine. Knows no model."""

from __future__ import annotations

import socket

import psutil
import torch

from swiftkv_platform.model.workers import Workers

MODEL_SHARE = 0.5
"""Share of a worker's free memory that weights may take; the rest is for activations and caches."""


def free_bytes(device: torch.device, num_local: int) -> float:
    """Bytes that one of `num_local` workers of this machine may take on `device`."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available) / num_local


def local_first(workers: Workers) -> int:
    """Rank of the first worker of this machine, which fetches for the others. Collective."""
    hosts = workers.gather(socket.gethostname())
    return hosts.index(socket.gethostname())
