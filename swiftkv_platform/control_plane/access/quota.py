"""`/quota`: the quotas of the caller's tenant, and their use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter

from swiftkv_platform.control_plane.access.callers import Reader
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.usage import (
    count_objects,
    sum_deployment_demand,
    sum_job_demand,
    sum_stored_bytes,
)
from swiftkv_platform.control_plane.components import RAY_TIMEOUT_S, ComponentsDep, NodesDep
from swiftkv_platform.control_plane.http.responses import ResponseModel
from swiftkv_platform.control_plane.jobs.job import ON_CLUSTER
from swiftkv_platform.control_plane.ray.placement import Node

router = APIRouter(tags=["operations"])


class ResourceUseResponse(ResponseModel):
    """GPUs and CPUs of the cluster that jobs or deployments hold."""

    gpus: float
    cpus: float


class ClusterResponse(ResponseModel):
    """GPUs and CPUs of the jobs' cluster, as Ray reported them seconds ago, and those in use by all tenants together.

    Nodes that the operator's node groups may still add count as well.
    """

    gpus: float
    """GPUs that tasks, actors and placement groups hold."""
    total_gpus: float
    cpus: float
    total_cpus: float

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> ClusterResponse:
        total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in ("GPU", "CPU")}
        held = {name: round(total[name] - sum(node.free.get(name, 0.0) for node in nodes), 4) for name in total}
        return cls(gpus=held["GPU"], total_gpus=total["GPU"], cpus=held["CPU"], total_cpus=total["CPU"])


class QuotaResponse(ResponseModel):
    """Limits of a tenant, null if there is none, and what its jobs and deployments hold.

    Both count at the most they may grow to, and a deployment until its replicas are gone.
    """

    object: Literal["quota"] = "quota"
    tenant: str
    weight: float
    """Share of the cluster relative to other tenants that wait."""
    max_queued_jobs: int | None
    max_running_jobs: int | None
    max_gpus: float | None
    max_cpus: float | None
    max_replicas: int | None
    """Max replicas of all its deployments together."""
    queued_jobs: int
    """Queued and paused jobs."""
    running_jobs: int
    replicas: int
    gpus: float
    """GPUs of jobs and deployments together."""
    cpus: float
    stored_bytes: int
    """Bytes of its uploaded files and models together."""
    max_stored_bytes: int | None
    stored_jobs: int
    """Jobs, including ended ones."""
    max_stored_jobs: int | None
    max_unfinished_jobs: int | None
    """Max jobs that have not ended."""
    deployments: int
    """Deployments, including those that are being deleted."""
    max_deployments: int | None
    files: int
    """Uploaded files."""
    max_files: int | None
    imported_models: int
    max_imported_models: int | None
    aliases: int
    max_aliases: int | None
    max_alias_changes: int | None
    """Max changes in the history of each alias; a further change removes the oldest."""
    pending_deliveries: int
    """Webhook deliveries that wait to be sent."""
    max_pending_deliveries: int | None
    held_by_jobs: ResourceUseResponse
    held_by_deployments: ResourceUseResponse
    cluster: ClusterResponse | None
    """Null if Ray does not answer, or does not report its nodes."""


_COUNTS = {
    "queued_jobs": "max_queued_jobs",
    "stored_jobs": "max_stored_jobs",
    "deployments": "max_deployments",
    "files": "max_files",
    "imported_models": "max_imported_models",
    "aliases": "max_aliases",
    "pending_deliveries": "max_pending_deliveries",
}
"""Limit of each counted field."""


@router.get("/quota")
def get_quota(parts: ComponentsDep, caller: Reader, nodes: NodesDep) -> QuotaResponse:
    """Quota of the caller's tenant, its use, and the use of the whole cluster."""
    tenant, told = caller.tenant, nodes.get(RAY_TIMEOUT_S, None)
    with parts.database.reading() as session:
        jobs = sum_job_demand(session, ON_CLUSTER, tenants=[tenant]).get(tenant, Demand())
        deployments = sum_deployment_demand(session, tenants=[tenant]).get(tenant, Demand())
        counts = {name: count_objects(session, limit, tenant) for name, limit in _COUNTS.items()}
        stored_bytes = sum_stored_bytes(session, tenant)
    return QuotaResponse.model_validate(
        {
            **dict(parts.policies.get(tenant)),
            **vars(jobs + deployments),
            **counts,
            "tenant": tenant,
            "running_jobs": jobs.jobs,
            "stored_bytes": stored_bytes,
            "held_by_jobs": jobs,
            "held_by_deployments": deployments,
            "cluster": None if told is None else ClusterResponse.of(told),
        }
    )
