"""`/jobs`: submit, validate, list, get, cancel."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response, status

from swiftkv_platform.api.dependencies import NewestFirst, Parts, TheCaller, read_object
from swiftkv_platform.api.schemas import EstimateAnswer, JobAnswer, ListAnswer, list_answer
from swiftkv_platform.orchestration.job import JobStatus
from swiftkv_platform.orchestration.ports import JobFilter
from swiftkv_platform.orchestration.service import JobService
from swiftkv_platform.specs import JobSpec

router = APIRouter(prefix="/jobs", tags=["jobs"])

_METADATA = "metadata."


def _service(parts: Parts) -> JobService:
    return JobService(parts.jobs, clock=parts.clock, read_object=read_object)


@router.post("", status_code=status.HTTP_201_CREATED)
def create_job(
    spec: JobSpec,
    parts: Parts,
    caller: TheCaller,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> JobAnswer:
    """Submit a job. The same `Idempotency-Key` with the same body gives the same job."""
    job = _service(parts).submit(spec, caller, idempotency_key=idempotency_key)
    response.headers["Location"] = f"/jobs/{job.id}"
    return JobAnswer.of(job)


@router.post("/validate")
def validate_job(spec: JobSpec, parts: Parts) -> EstimateAnswer:
    """Check a spec as submitting it would, and say what it would make; stores nothing."""
    return EstimateAnswer(**asdict(_service(parts).validate(spec)))


@router.get("")
def list_jobs(
    request: Request,
    parts: Parts,
    caller: TheCaller,
    page: NewestFirst,
    status: Annotated[JobStatus | None, Query()] = None,
    model: Annotated[str | None, Query(description="the teacher's `name_or_path`")] = None,
) -> ListAnswer[JobAnswer]:
    """Jobs, newest first. `metadata.{key}={value}` filters by metadata."""
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in request.query_params.items()
        if name.startswith(_METADATA)
    }
    found = parts.jobs.list(page, tenant=caller.tenant, where=JobFilter(status, model, metadata))
    return list_answer(found, JobAnswer.of, lambda job: job.id)


@router.get("/{job_id}")
def get_job(job_id: str, parts: Parts, caller: TheCaller) -> JobAnswer:
    """One job."""
    return JobAnswer.of(parts.jobs.get(job_id, tenant=caller.tenant))


@router.post("/{job_id}/cancel")
def cancel_job(job_id: str, parts: Parts, caller: TheCaller) -> JobAnswer:
    """Ask for the end of a job; asking again is the same."""
    return JobAnswer.of(_service(parts).cancel(job_id, caller))
