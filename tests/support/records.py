"""Jobs, events and models for tests of the database."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from swiftkv_platform.control_plane.access.tenants import Demand
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, make_status_event
from swiftkv_platform.control_plane.jobs.repository import (
    PRIORITIES,
    IdempotencyKey,
    JobRepository,
    QueuedJob,
    QueueSnapshot,
)
from swiftkv_platform.control_plane.models.repository import Model
from swiftkv_platform.specs import JobSpec

TENANT = "acme"


def make_job(*, tenant: str = TENANT, **spec: Any) -> Job:
    return Job(
        id=new_id("job"), tenant=tenant, created_by="ann", spec=JobSpec(**{"name": "test", **spec}), created_at=100
    )


def store(jobs: JobRepository, job: Job, *, key: str | None = None, body: str = "a") -> Job:
    idempotency = None if key is None else IdempotencyKey(key, body)
    return jobs.create(job, make_status_event(job, now=100), idempotency=idempotency)


def message(job: Job, text: str) -> Event:
    return Event(new_id("evt"), job.id, 100, "message", text)


def make_model(job: Job) -> Model:
    return Model(
        id=new_id("mdl"),
        tenant=job.tenant,
        name="test",
        job_id=job.id,
        attempt=1,
        created_at=200,
        artifact_uri="s3://bucket/artifact",
        manifest_digest="d" * 64,
        size=1 << 40,
        lineage={"teacher": "tiny"},
        metrics={"kl": 0.1},
    )


def snapshot_of(live: Sequence[Job], *, most: int, now: float, without: Collection[str] = ()) -> QueueSnapshot:
    """Compute the queue of these jobs in Python, as the database does in SQL."""
    queued = [job for job in live if job.status is JobStatus.QUEUED]
    ready = [job for job in queued if job.not_before <= now and job.id not in without]
    waiting: dict[str, list[QueuedJob]] = {}
    for job in sorted(ready, key=lambda job: (PRIORITIES[job.spec.limits.priority], job.id)):
        waiting.setdefault(job.tenant, []).append(QueuedJob(job.id, Demand.for_job(job.spec)))
    placed = [job for job in live if job.status.is_on_cluster]
    total = sum((Demand.for_job(job.spec) for job in [*placed, *queued]), Demand())
    return QueueSnapshot(held_by(placed), total, {tenant: jobs[:most] for tenant, jobs in waiting.items()})


def held_by(jobs: Sequence[Job]) -> dict[str, Demand]:
    """Sum the demand of the jobs on the cluster by tenant."""
    held: dict[str, Demand] = {}
    for job in jobs:
        if job.status.is_on_cluster:
            held[job.tenant] = held.get(job.tenant, Demand()) + Demand.for_job(job.spec)
    return held


UNDISPUTED: Any = SimpleNamespace(fence=None, check_leading=lambda: None)
"""Lease of a process that runs alone."""
