"""The queue of jobs, and what is held of the cluster, as columns tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.jobs.job import JobStatus


@dataclass(frozen=True)
class Placed:
    """A job that may have an attempt on the cluster, as the columns of its row tell."""

    id: str
    status: JobStatus
    version: int
    watched_until: float
    """Unix seconds until which it is followed."""


@dataclass(frozen=True)
class Waiting:
    """A job of the queue."""

    id: str
    demand: Demand


@dataclass(frozen=True)
class Standing:
    """The queue, and what is held of the cluster."""

    held: Mapping[str, Demand]
    """Sum over each tenant's jobs on the cluster."""
    total: Demand
    """Sum over all jobs on the cluster and in the queue."""
    waiting: Mapping[str, Sequence[Waiting]]
    """First jobs of each tenant that may start now: by priority, then by age."""


@dataclass(frozen=True)
class Usage:
    """Jobs of one tenant that have not ended."""

    waiting: int
    """Jobs that wait or are paused."""
    held: Demand


class Claim(Protocol):
    def __call__(self, tenant: str, held: Demand, demand: Demand, /) -> bool:
        """Whether a tenant that holds this much of the cluster may have this much more."""
        ...
