"""What tenants hold, within their quotas: resources of the cluster, objects and their bytes. Queries read columns only;
no spec is parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicy
from swiftkv_platform.control_plane.database.tables import (
    PENDING,
    DeletionRow,
    DeliveryRow,
    DeploymentRow,
    FileRow,
    JobRow,
    ModelRow,
    PromotionRow,
)
from swiftkv_platform.control_plane.jobs.job import LIVE_STATUSES, STATUSES_ON_CLUSTER, WAITING_STATUSES
from swiftkv_platform.errors import QuotaExceededError

_TENANT: Any = bindparam("tenant")
_CAPTURE_BYTES: Any = DeploymentRow.spec["capture"]["max_bytes"].as_float()
"""Bytes that a deployment reserves for captured traffic; NULL without. Integers of PostgreSQL are too small."""


def _count_rows(table: Any, *where: Any) -> Select[Any]:
    return select(func.count()).where(table.tenant == _TENANT, *where)


_COUNT_QUOTAS: dict[str, tuple[str, Select[Any], str]] = {
    "max_queued_jobs": (
        "queued or paused jobs",
        _count_rows(JobRow, JobRow.status.in_(WAITING_STATUSES)),
        "cancel one, or submit again after one has started",
    ),
    "max_unfinished_jobs": (
        "unfinished jobs",
        _count_rows(JobRow, JobRow.status.in_(LIVE_STATUSES)),
        "cancel one, or submit again after one has ended",
    ),
    "max_stored_jobs": (
        "stored jobs, including ended ones",
        _count_rows(JobRow),
        "delete one, then submit again",
    ),
    "max_deployments": ("deployments", _count_rows(DeploymentRow), "delete one, wait until it is gone, then try again"),
    "max_files": ("files", _count_rows(FileRow), "delete one (`DELETE /v1/files/{id}`), and upload again"),
    "max_imported_models": (
        "imported models",
        _count_rows(ModelRow, ModelRow.job_id.is_(None)),
        "delete one (`DELETE /models/{id}`), and import again",
    ),
    "max_aliases": (
        "aliases",
        select(func.count(PromotionRow.alias.distinct())).where(PromotionRow.tenant == _TENANT),
        "use an existing alias, or ask the operator for a higher quota",
    ),
    "max_pending_deliveries": (
        "pending webhook deliveries",
        _count_rows(DeliveryRow, DeliveryRow.status == PENDING),
        "wait until some are sent",
    ),
}
"""What limits of a policy count: the objects' name, their number, and the way to make room."""


def count_objects(session: Session, limit: str, tenant: str) -> int:
    """Return how many objects of a tenant count against a limit, a field of `TenantPolicy` such as `max_files`."""
    return session.scalar(_COUNT_QUOTAS[limit][1], {"tenant": tenant}) or 0


def check_count_quota(session: Session, limit: str, tenant: str, policy: TenantPolicy) -> None:
    """Raise `QuotaExceededError` if a tenant has as many objects as the policy's field `limit` allows."""
    quota = getattr(policy, limit)
    if quota is not None and (number := count_objects(session, limit, tenant)) >= quota:
        kind, _, cure = _COUNT_QUOTAS[limit]
        message = f"tenant {tenant!r} has {number} {kind}; its quota {limit} is {quota}; {cure}"
        raise QuotaExceededError(message, field=limit, value=number)


def check_storage_quota(session: Session, tenant: str, added: int, policy: TenantPolicy) -> None:
    """Raise `QuotaExceededError` if the tenant's files, models and captured traffic would, with `added` bytes, exceed
    its quota."""
    quota = policy.max_stored_bytes
    if quota is not None and (used := sum_stored_bytes(session, tenant) + added) > quota:
        raise QuotaExceededError(
            f"files, models and captured traffic of tenant {tenant!r} would use {used} bytes; its quota "
            f"max_stored_bytes is {quota}; delete some (their bytes are freed within minutes), or ask the operator for "
            "a higher quota",
            field="max_stored_bytes",
            value=used,
        )


def sum_stored_bytes(session: Session, tenant: str) -> int:
    """Return the bytes of the tenant's files and models, and those that its deployments reserve for captured traffic.
    Models of jobs count, and deleted ones until their objects are gone."""
    sizes: list[tuple[Any, Any]] = [(table, table.size) for table in (FileRow, ModelRow, DeletionRow)]
    sizes.append((DeploymentRow, _CAPTURE_BYTES))
    sums = (select(func.sum(size)).where(table.tenant == tenant) for table, size in sizes)
    return sum(int(session.scalar(each) or 0) for each in sums)


def sum_demand(session: Session, tenant: str, *, exclude: str = "") -> Demand:
    """Return the demand of a tenant's jobs on the cluster and of its deployments. `exclude`: id of a deployment that
    does not count."""
    jobs = sum_job_demand(session, STATUSES_ON_CLUSTER, tenants=[tenant]).get(tenant, Demand())
    return jobs + sum_deployment_demand(session, tenants=[tenant], exclude=exclude).get(tenant, Demand())


def sum_job_demand(
    session: Session, statuses: Sequence[str], *, tenants: Sequence[str] | None = None
) -> dict[str, Demand]:
    """Return the summed demand of jobs in these statuses, by tenant. `tenants`: None for all."""
    query = select(JobRow.tenant, func.count(), func.sum(JobRow.gpus), func.sum(JobRow.cpus))
    query = query.where(JobRow.status.in_(statuses)).group_by(JobRow.tenant)
    if tenants is not None:
        query = query.where(JobRow.tenant.in_(tenants))
    return {tenant: Demand(jobs, gpus, cpus) for tenant, jobs, gpus, cpus in session.execute(query)}


def sum_deployment_demand(
    session: Session, *, tenants: Sequence[str] | None = None, exclude: str = ""
) -> dict[str, Demand]:
    """Return the summed demand of deployments, by tenant. Deployments being deleted count, since their replicas still
    run. `tenants`: None for all. `exclude`: id of a deployment that does not count."""
    sums = (func.sum(DeploymentRow.gpus), func.sum(DeploymentRow.cpus), func.sum(DeploymentRow.replicas))
    query = select(DeploymentRow.tenant, *sums).where(DeploymentRow.id != exclude).group_by(DeploymentRow.tenant)
    if tenants is not None:
        query = query.where(DeploymentRow.tenant.in_(tenants))
    return {tenant: Demand(0, gpus, cpus, replicas) for tenant, gpus, cpus, replicas in session.execute(query)}
