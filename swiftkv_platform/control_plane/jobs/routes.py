"""`/jobs`: submit, validate, list, get, cancel, pause, resume, delete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response, status
from pydantic import TypeAdapter, ValidationError

from swiftkv_platform.control_plane.access.callers import Reader, Submitter, Writer
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import source_rules
from swiftkv_platform.control_plane.files.rows import files_of
from swiftkv_platform.control_plane.hooks.webhooks import webhook_rules
from swiftkv_platform.control_plane.http.answers import ListAnswer, NewestFirst, list_answer
from swiftkv_platform.control_plane.http.clients import WaitingClient
from swiftkv_platform.control_plane.jobs.answers import EstimateAnswer, JobAnswer, ResumeRequest
from swiftkv_platform.control_plane.jobs.capacity import GroupLimits, Needs, driver_needs
from swiftkv_platform.control_plane.jobs.costs import prices
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason
from swiftkv_platform.control_plane.jobs.limits import JobLimits
from swiftkv_platform.control_plane.jobs.parents import PublishRules
from swiftkv_platform.control_plane.jobs.ports import JobFilter
from swiftkv_platform.control_plane.jobs.queue import why_waiting
from swiftkv_platform.control_plane.jobs.service import JobService
from swiftkv_platform.control_plane.parts import (
    RAY_ANSWERS_WITHIN_S,
    Deletions,
    JobSpans,
    Parts,
    TheNodes,
    TheParents,
    TheRay,
    TheSettings,
    TheSpecParsers,
    TheWatches,
)
from swiftkv_platform.control_plane.ray.places import EmptyNodes
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import Label
from swiftkv_platform.traces import valid_traceparent
from swiftkv_platform.web.bodies import BodyRoute

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=BodyRoute)

_METADATA = "metadata."
_LABEL = TypeAdapter[str](Label)


def _present(
    request: Request, parts: Parts, settings: TheSettings, ray: TheRay, nodes: TheNodes
) -> Callable[[Job], JobAnswer]:
    asks_ray = request.method == "GET"  # requests that change a job do not wait for Ray
    # Each is read at most once for all jobs of an answer.
    away = cache(lambda: ray.within(RAY_ANSWERS_WITHIN_S, "Ray does not answer"))

    @cache
    def empty_nodes() -> EmptyNodes | None:
        told = nodes.within(RAY_ANSWERS_WITHIN_S, None)
        return None if told is None else EmptyNodes(node.total for node in told)

    def lacking(needs: Needs) -> Reason | None:
        empty = empty_nodes()
        return None if empty is None or empty.hold(needs.bundles) else needs.nowhere

    places, running = cache(parts.jobs.queue_places), cache(lambda: len(parts.jobs.on_cluster()))
    held = cache(lambda tenant: parts.jobs.usage(tenant).held + parts.deployments.demand(tenant))

    def present(job: Job) -> JobAnswer:
        place = places(job.tenant).get(job.id) if job.status is JobStatus.QUEUED else None
        if place is None:
            return JobAnswer.of(job, prices(settings), parts.clock())
        demand, policy = Demand.of(job.spec), parts.policies.policy(job.tenant)
        waits = why_waiting(
            job,
            place=place,
            running=running(),
            slots=settings.max_running_jobs,
            exceeded=(held(job.tenant) + demand).exceeded_limit(policy, adding=demand),
            now=parts.clock(),
            away=away() if asks_ray else None,
            lacking=lacking(Needs.of(job.spec, driver_needs(settings))) if asks_ray else None,
        )
        return JobAnswer.of(job, prices(settings), parts.clock(), place, waits)

    return present


Present = Annotated[Callable[[Job], JobAnswer], Depends(_present)]


def _service(
    parts: Parts,
    settings: TheSettings,
    parents: TheParents,
    nodes: TheNodes,
) -> JobService:
    told = partial(nodes.within, RAY_ANSWERS_WITHIN_S, None)
    return JobService(
        parts.jobs,
        clock=parts.clock,
        rules=source_rules(settings),
        policies=parts.policies,
        webhooks=webhook_rules(settings),
        prices=prices(settings),
        flops_per_second=settings.flops_per_second,
        limits=JobLimits(settings.max_workers_per_job, settings.max_batch_size, settings.max_runtime_s),
        files=files_of(parts.files, parts.objects.uri, usable_at=parts.clock),
        parents=parents,
        publishing=PublishRules(settings.publish_targets),
        groups=GroupLimits(settings.node_groups, driver_needs(settings), told),
        rehearse=lambda job: JobAnswer.of(job, prices(settings), parts.clock()).model_dump_json(),
    )


Service = Annotated[JobService, Depends(_service)]


def _checking_service(
    service: Service,
    _caller: Submitter,  # before the client, since watching it reads from its connection
    parsers: TheSpecParsers,
    client: WaitingClient,
) -> JobService:
    return replace(service, run=parsers.run_for(client))


CheckingService = Annotated[JobService, Depends(_checking_service)]
"""Service that checks specs in parser processes, as long as the client waits."""


def _submission(
    request: Request,
    service: CheckingService,
    caller: Submitter,
    spans: JobSpans,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    traceparent: Annotated[str | None, Header(description="W3C trace context that the job's spans join")] = None,
) -> Callable[[JobSpec], Job]:
    def submit(spec: JobSpec) -> Job:
        name = f"{request.method} {request.scope['route'].path}"
        with spans.span(name, valid_traceparent(traceparent), tenant=caller.tenant) as context:
            return service.submit(spec, caller, idempotency_key=idempotency_key, traceparent=context)

    return submit


Submit = Annotated[Callable[[JobSpec], Job], Depends(_submission)]
"""Function that submits the caller's job, with the headers that all submitting routes accept."""


def place(response: Response, job: JobAnswer) -> JobAnswer:
    """Add a new job's URL to the answer as `Location`."""
    response.headers["Location"] = f"/jobs/{job.id}"
    return job


@router.post("", status_code=status.HTTP_201_CREATED)
def create_job(spec: JobSpec, submit: Submit, present: Present, response: Response) -> JobAnswer:
    """Submit a job. The same `Idempotency-Key` with the same body returns the same job."""
    return place(response, present(submit(spec)))


@router.post("/validate")
def validate_job(spec: JobSpec, service: CheckingService, caller: Submitter) -> EstimateAnswer:
    """Check a spec as submitting it would, and return an estimate; nothing is stored."""
    return EstimateAnswer(**dict(service.validate(spec, caller)))


@router.get("")
def list_jobs(
    request: Request,
    parts: Parts,
    caller: Reader,
    present: Present,
    page: NewestFirst,
    status: Annotated[JobStatus | None, Query()] = None,
    model: Annotated[str | None, Query(description="the teacher's `name_or_path`")] = None,
) -> ListAnswer[JobAnswer]:
    """Jobs, newest first. `metadata.{key}={value}` filters by metadata."""
    where = JobFilter(status, model, metadata_asked_for(request, _METADATA))
    found = parts.jobs.list(page, tenant=caller.tenant, where=where)
    return list_answer(found, present, order=page.order)


def metadata_asked_for(request: Request, before: str, after: str = "") -> dict[str, str]:
    """Return the metadata of a query, whose names stand between `before` and `after`. Raises `InvalidInputError` for a
    name that cannot be a key of a job's metadata."""
    asked = {
        name.removeprefix(before).removesuffix(after): value
        for name, value in request.query_params.items()
        if name.startswith(before) and name.endswith(after)
    }
    for key in asked:
        try:
            _LABEL.validate_python(key)
        except ValidationError as error:
            message = f"this cannot be a key of metadata: {error.errors()[0]['msg']}"
            raise InvalidInputError(message, field=f"{_METADATA}{key}") from error
    return asked


@router.get("/{job_id}")
def get_job(job_id: str, parts: Parts, caller: Reader, watches: TheWatches, present: Present) -> JobAnswer:
    """Return a job."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    if not job.status.is_terminal:
        watches.note(job_id)
    return present(job)


@router.post("/{job_id}/cancel")
def cancel_job(job_id: str, service: Service, caller: Writer, present: Present) -> JobAnswer:
    """Cancel a job; repeating the request is harmless."""
    return present(service.cancel(job_id, caller))


@router.post("/{job_id}/pause")
def pause_job(job_id: str, service: Service, caller: Writer, present: Present) -> JobAnswer:
    """Ask a job to checkpoint and free the cluster; repeating the request is harmless."""
    return present(service.pause(job_id, caller))


@router.post("/{job_id}/resume")
def resume_job(
    job_id: str, service: Service, caller: Writer, present: Present, body: ResumeRequest | None = None
) -> JobAnswer:
    """Queue a paused job again; it continues from its last checkpoint. `cost_cap` replaces `limits.cost_cap`."""
    return present(service.resume(job_id, caller, cost_cap=None if body is None else body.cost_cap))


@router.delete("/{job_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_job(job_id: str, deletions: Deletions, parts: Parts, caller: Writer) -> None:
    """Delete a job that has ended, with its model and all its data; its objects are removed in the sweeper's next
    round.

    A job that is resumable, whose model is deployed or promoted, or that another job reads is kept: the 409 names the
    holder.
    """
    deletions.delete_job(job_id, by=caller.name, now=parts.clock(), tenant=caller.tenant)
