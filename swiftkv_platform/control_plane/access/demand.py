"""Resources that jobs and deployments hold, summed by the database, or ask for, compared with a tenant's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.autoscaling import replica_resources
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.control_plane.database.tables import DeploymentRow, JobRow
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import ResolvedDeployment

_LIMITS = {"max_running_jobs": "jobs", "max_gpus": "gpus", "max_cpus": "cpus", "max_replicas": "replicas"}
"""Field of `Demand` that each limit of a tenant's policy bounds."""


@dataclass(frozen=True)
class Demand:
    """Resources of the cluster that jobs and deployments hold, or ask for, counted at the most they may grow to."""

    jobs: int = 0
    gpus: float = 0.0
    cpus: float = 0.0
    replicas: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> Demand:
        resources, workers = spec.resources, spec.most_workers
        # A worker's thread takes a core, however small a share it reserves.
        return cls(1, workers * resources.gpus_per_worker, workers * max(resources.cpus_per_worker, 1))

    @classmethod
    def of_deployment(cls, spec: ResolvedDeployment) -> Demand:
        resources, replicas = replica_resources(spec.engine), spec.max_replicas
        return cls(0, replicas * resources["num_gpus"], replicas * resources["num_cpus"], replicas)

    def __add__(self, other: Demand) -> Demand:
        return Demand(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def beyond(self, other: Demand) -> Demand:
        """Return the excess over `other`, part by part, and 0 where there is none."""
        return Demand(*(max(ours - theirs, 0) for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def exceeded_limit(self, policy: TenantPolicy, *, adding: Demand | None = None) -> tuple[str, float, float] | None:
        """Return name, demand and limit of the first of a tenant's limits that this exceeds; None if it is within all.
        With `adding`, the newly asked part, only limits on resources that it asks for count."""
        for limit, part in _LIMITS.items():
            asked, most = getattr(self, part), getattr(policy, limit)
            if most is not None and asked > most and (adding is None or getattr(adding, part) > 0):
                return limit, asked, most
        return None

    def share(self, total: Demand) -> float:
        """Dominant share: the largest fraction of `total` among jobs, GPUs and CPUs."""
        parts = ((self.jobs, total.jobs), (self.gpus, total.gpus), (self.cpus, total.cpus))
        return max((part / whole for part, whole in parts if whole), default=0.0)


def held_by_jobs(
    session: Session, statuses: Sequence[str], *, tenants: Sequence[str] | None = None
) -> dict[str, Demand]:
    """Return the summed demand of jobs in these statuses, by tenant. `tenants`: None for all."""
    query = select(JobRow.tenant, func.count(), func.sum(JobRow.gpus), func.sum(JobRow.cpus))
    query = query.where(JobRow.status.in_(statuses)).group_by(JobRow.tenant)
    if tenants is not None:
        query = query.where(JobRow.tenant.in_(tenants))
    return {tenant: Demand(jobs, gpus, cpus) for tenant, jobs, gpus, cpus in session.execute(query)}


def held_by_deployments(session: Session, tenant: str, *, without: str = "") -> Demand:
    """Return the summed demand of a tenant's deployments. Deployments being deleted count, since their replicas still
    run. `without`: id of a deployment that does not count."""
    sums = (func.sum(DeploymentRow.gpus), func.sum(DeploymentRow.cpus), func.sum(DeploymentRow.replicas))
    query = select(*sums).where(DeploymentRow.tenant == tenant, DeploymentRow.id != without)
    gpus, cpus, replicas = session.execute(query).one()
    return Demand(0, gpus or 0.0, cpus or 0.0, replicas or 0)
