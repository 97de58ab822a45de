"""`/v1/fine_tuning/jobs`: the jobs of `/jobs` in the format of OpenAI's fine-tuning API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from swiftkv_platform.control_plane.access.callers import Fetcher, Reader, Writer
from swiftkv_platform.control_plane.base import Page
from swiftkv_platform.control_plane.http.answers import ListAnswer, NewestFirst, list_answer, paged
from swiftkv_platform.control_plane.jobs.fine_tuning.answers import (
    FineTuningCheckpointAnswer,
    FineTuningEventAnswer,
    FineTuningJobAnswer,
)
from swiftkv_platform.control_plane.jobs.fine_tuning.requests import CreateFineTuningJob, job_spec
from swiftkv_platform.control_plane.jobs.job import Job
from swiftkv_platform.control_plane.jobs.output_routes import page_of_checkpoints
from swiftkv_platform.control_plane.jobs.ports import JobFilter
from swiftkv_platform.control_plane.jobs.routes import Present, Service, Submit, metadata_asked_for
from swiftkv_platform.control_plane.parts import Components, Parts
from swiftkv_platform.storage.attempt_store import StoredCheckpoint
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.problems import ERROR_RESPONSES

router = APIRouter(
    prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"], responses=ERROR_RESPONSES, route_class=BodyRoute
)


def _show(present: Present) -> Callable[[Job], FineTuningJobAnswer]:
    return lambda job: FineTuningJobAnswer.of(present(job))


Show = Annotated[Callable[[Job], FineTuningJobAnswer], Depends(_show)]


@router.post("")
def create_fine_tuning_job(asked: CreateFineTuningJob, submit: Submit, show: Show) -> FineTuningJobAnswer:
    """Submit a job. `swiftkv` holds settings for which OpenAI has no field: any part of a job spec."""
    return show(submit(job_spec(asked)))


@router.get("")
def list_fine_tuning_jobs(
    request: Request, parts: Parts, caller: Reader, show: Show, page: NewestFirst
) -> ListAnswer[FineTuningJobAnswer]:
    """List jobs, newest first, also those submitted by other routes. `metadata[{key}]={value}` filters by metadata."""
    where = JobFilter(metadata=metadata_asked_for(request, "metadata[", "]"))
    found = parts.jobs.list(page, tenant=caller.tenant, where=where)
    return list_answer(found, show, order=page.order)


@router.get("/{job_id}")
def get_fine_tuning_job(job_id: str, parts: Parts, caller: Reader, show: Show) -> FineTuningJobAnswer:
    """Return a job."""
    return show(parts.jobs.get(job_id, tenant=caller.tenant))


@router.post("/{job_id}/cancel")
def cancel_fine_tuning_job(job_id: str, service: Service, caller: Writer, show: Show) -> FineTuningJobAnswer:
    """Cancel a job; repeating the request is harmless."""
    return show(service.cancel(job_id, caller))


@router.post("/{job_id}/pause")
def pause_fine_tuning_job(job_id: str, service: Service, caller: Writer, show: Show) -> FineTuningJobAnswer:
    """Ask a job to checkpoint and free the cluster; repeating the request is harmless."""
    return show(service.pause(job_id, caller))


@router.post("/{job_id}/resume")
def resume_fine_tuning_job(job_id: str, service: Service, caller: Writer, show: Show) -> FineTuningJobAnswer:
    """Queue a paused job again; it continues from its last checkpoint."""
    return show(service.resume(job_id, caller))


@router.get("/{job_id}/events")
def list_fine_tuning_events(
    job_id: str, parts: Parts, caller: Reader, page: NewestFirst
) -> ListAnswer[FineTuningEventAnswer]:
    """A job's events, newest first."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    return list_answer(parts.jobs.events(job_id, page), FineTuningEventAnswer.of)


@router.get("/{job_id}/checkpoints")
def list_fine_tuning_checkpoints(
    job_id: str, parts: Parts, caller: Fetcher, page: Annotated[Page, Depends(paged(10, "desc"))]
) -> ListAnswer[FineTuningCheckpointAnswer]:
    """Complete checkpoints of all attempts, the last step first."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    found = page_of_checkpoints(parts.attempts, job_id, page)
    return list_answer(found, lambda each: _checkpoint(parts, job_id, each))


def _checkpoint(parts: Components, job_id: str, checkpoint: StoredCheckpoint) -> FineTuningCheckpointAnswer:
    before = str(checkpoint.step - 1) if checkpoint.step else None
    points = parts.jobs.points(job_id, Page(after=before, limit=1, order="asc")).items
    loss = points[0].values.get("loss") if points and points[0].step == checkpoint.step else None
    return FineTuningCheckpointAnswer.of(checkpoint, job_id, loss)
