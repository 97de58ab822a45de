"""Cluster resources of jobs and deployments, compared with a tenant's limits."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from swiftkv_platform.contract.autoscaling import compute_replica_resources
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import ResolvedDeployment

_LIMITS = {"max_running_jobs": "jobs", "max_gpus": "gpus", "max_cpus": "cpus", "max_replicas": "replicas"}
"""The field of `Demand` that each limit of a tenant's policy bounds."""


@dataclass(frozen=True)
class Demand:
    """Cluster resources of jobs and deployments, at their max size."""

    jobs: int = 0
    gpus: float = 0.0
    cpus: float = 0.0
    replicas: int = 0

    @classmethod
    def for_job(cls, spec: JobSpec) -> Demand:
        resources, workers = spec.resources, spec.max_total_workers
        # A worker's thread takes a core, however small a share it reserves.
        return cls(1, workers * resources.gpus_per_worker, workers * max(resources.cpus_per_worker, 1))

    @classmethod
    def for_deployment(cls, spec: ResolvedDeployment) -> Demand:
        resources, replicas = compute_replica_resources(spec.engine), spec.max_replicas
        return cls(0, replicas * resources["num_gpus"], replicas * resources["num_cpus"], replicas)

    def __add__(self, other: Demand) -> Demand:
        return Demand(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def subtract_clamped(self, other: Demand) -> Demand:
        """Subtract `other` per field; negative results become 0."""
        return Demand(*(max(ours - theirs, 0) for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def find_exceeded_limit(
        self, policy: TenantPolicy, *, adding: Demand | None = None
    ) -> tuple[str, float, float] | None:
        """Return (limit's name, demand, limit) of the first exceeded limit; None without one. With `adding`, only
        limits on resources that `adding` has count."""
        for limit, part in _LIMITS.items():
            requested, most = getattr(self, part), getattr(policy, limit)
            if most is not None and requested > most and (adding is None or getattr(adding, part) > 0):
                return limit, requested, most
        return None

    def dominant_share(self, total: Demand) -> float:
        """Compute the dominant share (dominant resource fairness): the largest fraction of `total` among jobs, GPUs
        and CPUs."""
        parts = ((self.jobs, total.jobs), (self.gpus, total.gpus), (self.cpus, total.cpus))
        return max((part / whole for part, whole in parts if whole), default=0.0)
