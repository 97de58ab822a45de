"""The process group of workers that do a phase together. Knows no phase and no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from swiftkv_platform.jobs.values import Member
from swiftkv_platform.specs import ResourcesSpec

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
