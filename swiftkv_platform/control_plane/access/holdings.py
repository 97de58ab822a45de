"""Demand of the jobs and deployments that tenants have, summed by the database from columns. No spec is read.

`demand.py` has no SQL, since the command line plans jobs without SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.database.tables import DeploymentRow, JobRow


def held_by_jobs(
    session: Session, statuses: Sequence[str], *, tenants: Sequence[str] | None = None
) -> dict[str, Demand]:
    """Return the summed demand of jobs in these statuses, by tenant. `tenants`: None for all."""
    query = select(JobRow.tenant, func.count(), func.sum(JobRow.gpus), func.sum(JobRow.cpus))
    query = query.where(JobRow.status.in_(statuses)).group_by(JobRow.tenant)
    if tenants is not None:
        query = query.where(JobRow.tenant.in_(tenants))
    return {tenant: Demand(jobs, gpus, cpus) for tenant, jobs, gpus, cpus in session.execute(query)}


def held_by_deployments(
    session: Session, *, tenants: Sequence[str] | None = None, without: str = ""
) -> dict[str, Demand]:
    """Return the summed demand of deployments, by tenant. Deployments being deleted count, since their replicas still
    run. `tenants`: None for all. `without`: id of a deployment that does not count."""
    sums = (func.sum(DeploymentRow.gpus), func.sum(DeploymentRow.cpus), func.sum(DeploymentRow.replicas))
    query = select(DeploymentRow.tenant, *sums).where(DeploymentRow.id != without).group_by(DeploymentRow.tenant)
    if tenants is not None:
        query = query.where(DeploymentRow.tenant.in_(tenants))
    return {tenant: Demand(0, gpus, cpus, replicas) for tenant, gpus, cpus, replicas in session.execute(query)}
