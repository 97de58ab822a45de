"""`/quota`: what the caller's tenant is granted, and what of it is in use."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from swiftkv_platform.api.dependencies import Parts, Reader
from swiftkv_platform.api.schemas import Answer
from swiftkv_platform.orchestration.fair_queue import Demand, held_by
from swiftkv_platform.orchestration.job import JobStatus

router = APIRouter(tags=["operations"])


class QuotaAnswer(Answer):
    """Limits of a tenant, null where there is none, and what its jobs hold."""

    object: Literal["quota"] = "quota"
    tenant: str
    weight: float
    """Share of the cluster relative to other tenants that wait."""
    max_queued_jobs: int | None
    max_running_jobs: int | None
    max_gpus: float | None
    max_cpus: float | None
    queued_jobs: int
    """Jobs that wait or are paused."""
    running_jobs: int
    gpus: float
    cpus: float


@router.get("/quota")
def get_quota(parts: Parts, caller: Reader) -> QuotaAnswer:
    """Quota of the caller's tenant, and its use."""
    live = [job for job in parts.jobs.live() if job.tenant == caller.tenant]
    held, policy = held_by(live).get(caller.tenant, Demand()), parts.policies.policy(caller.tenant)
    return QuotaAnswer(
        tenant=caller.tenant,
        weight=policy.weight,
        max_queued_jobs=policy.max_queued_jobs,
        max_running_jobs=policy.max_running_jobs,
        max_gpus=policy.max_gpus,
        max_cpus=policy.max_cpus,
        queued_jobs=sum(job.status in (JobStatus.QUEUED, JobStatus.PAUSED) for job in live),
        running_jobs=held.jobs,
        gpus=held.gpus,
        cpus=held.cpus,
    )
