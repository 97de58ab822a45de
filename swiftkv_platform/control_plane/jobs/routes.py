"""`/jobs` and `/recipes`: jobs, their events, metrics and logs as a page or live stream, and their files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain
from typing import Annotated

import yaml
from fastapi import APIRouter, Depends, Header, Query, Request, Response, status
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import TypeAdapter, ValidationError
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from swiftkv_platform.contract.attempts import MANIFEST, ManifestFile
from swiftkv_platform.control_plane.access.callers import (
    FetchingCaller,
    ReadingCaller,
    StreamSlot,
    SubmittingCaller,
    WritingCaller,
    accepts_event_stream,
    require_scope,
)
from swiftkv_platform.control_plane.access.tenants import Demand
from swiftkv_platform.control_plane.base import Caller, Page, PageQuery
from swiftkv_platform.control_plane.components import (
    RAY_TIMEOUT_S,
    Components,
    ComponentsDep,
    DeletionsDep,
    NodesDep,
    RayErrorDep,
    SettingsDep,
    SpansDep,
    SpecParsersDep,
)
from swiftkv_platform.control_plane.jobs.estimates import get_prices
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason
from swiftkv_platform.control_plane.jobs.logs import EventFollowers, LogFollowers, WatchedJobsDep, read_logs, read_tail
from swiftkv_platform.control_plane.jobs.queue import ResourceRequest, explain_wait, make_driver_bundle
from swiftkv_platform.control_plane.jobs.repository import JobFilter
from swiftkv_platform.control_plane.jobs.responses import (
    ArtifactFileResponse,
    CheckpointResponse,
    EstimateResponse,
    EventResponse,
    JobResponse,
    MetricPointResponse,
    RecipeResponse,
    ResumeRequest,
    TrackingFileResponse,
    make_checkpoint_id,
    paginate,
)
from swiftkv_platform.control_plane.jobs.service import JobService
from swiftkv_platform.control_plane.ray import EmptyNodePlacement
from swiftkv_platform.control_plane.responses import ListResponse, NewestFirst, OldestFirst, make_list_response
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError, NotFoundError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Scope
from swiftkv_platform.sources.recipes import find_recipes as shipped_recipes
from swiftkv_platform.sources.recipes import read_description, remove_editor_comment
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import Label
from swiftkv_platform.storage.artifacts import hash_manifest, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore, StoredCheckpoint
from swiftkv_platform.storage.object_store import ObjectInfo
from swiftkv_platform.traces import parse_traceparent
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.limiters import ConnectedClient

router = APIRouter(tags=["jobs"], route_class=BodyRoute)
_METADATA_PREFIX = "metadata."
_LABEL_ADAPTER = TypeAdapter[str](Label)


class JobPresenter:
    """Makes the responses of jobs. It looks up Ray, the queue and the tenant's quota at most once per request."""

    def __init__(
        self, request: Request, parts: ComponentsDep, settings: SettingsDep, ray: RayErrorDep, nodes: NodesDep
    ) -> None:
        self._parts, self._settings, self._ray, self._nodes = parts, settings, ray, nodes
        self._reports_cluster = request.method == "GET"  # requests that change a job do not wait for Ray
        self._find_queue_places, self._sum_demand = (
            cache(parts.jobs.list_queue_positions),
            cache(parts.jobs.sum_tenant_demand),
        )

    def render(self, job: Job) -> JobResponse:
        """Return a job's response, for a queued job with its position in the queue and the reason why it waits."""
        now = self._parts.clock()
        place = self._find_queue_places(job.tenant).get(job.id) if job.status is JobStatus.QUEUED else None
        reason = None if place is None else self._explain_wait(job, place, now)
        return JobResponse.from_job(job, get_prices(self._settings), now, place, reason)

    def _explain_wait(self, job: Job, place: int, now: float) -> Reason:
        demand, policy = Demand.for_job(job.spec), self._parts.policies.get(job.tenant)
        request = ResourceRequest.for_job(job.spec, make_driver_bundle(self._settings))
        nodes = self._empty_nodes if self._reports_cluster else None
        cannot_fit = nodes is not None and not nodes.can_place(request.bundles)
        return explain_wait(
            job,
            place=place,
            running=self._num_running,
            slots=self._settings.max_running_jobs,
            exceeded=(self._sum_demand(job.tenant) + demand).find_exceeded_limit(policy, adding=demand),
            now=now,
            away=self._ray_problem if self._reports_cluster else None,
            lacking=request.wait_reason if cannot_fit else None,
        )

    @cached_property
    def _num_running(self) -> int:
        return len(self._parts.jobs.list_cluster_jobs())

    @cached_property
    def _ray_problem(self) -> str | None:
        return self._ray.get(RAY_TIMEOUT_S, "Ray does not answer")

    @cached_property
    def _empty_nodes(self) -> EmptyNodePlacement | None:
        nodes = self._nodes.get(RAY_TIMEOUT_S, None)
        return None if nodes is None else EmptyNodePlacement(node.total for node in nodes)


Presenter = Annotated[JobPresenter, Depends(JobPresenter)]


def _get_job_service(
    parts: ComponentsDep, settings: SettingsDep, nodes: NodesDep, parsers: SpecParsersDep
) -> JobService:
    return JobService(parts, settings, nodes, parsers)


Service = Annotated[JobService, Depends(_get_job_service)]


class JobSubmitter:
    """Submits the caller's job, with the headers that all submitting routes accept."""

    def __init__(
        self,
        request: Request,
        service: Service,
        caller: SubmittingCaller,  # before the client, since watching it reads from its connection
        client: ConnectedClient,
        spans: SpansDep,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
        traceparent: Annotated[str | None, Header(description="W3C trace context that the job's spans join")] = None,
    ) -> None:
        self._request, self._service, self._caller, self._client, self._spans = request, service, caller, client, spans
        self._idempotency_key, self._traceparent = idempotency_key, traceparent

    def submit(self, spec: JobSpec) -> Job:
        """Submit a job within a span of the route. Raises as `JobService.submit`, and `ForbiddenError` for a rollout by
        a caller who may not deploy."""
        if spec.rollout is not None:
            require_scope(self._request, Scope.DEPLOY)
        name = f"{self._request.method} {self._request.scope['route'].path}"
        with self._spans.span(name, parse_traceparent(self._traceparent), tenant=self._caller.tenant) as context:
            return self._service.submit(
                spec, self._caller, self._client, idempotency_key=self._idempotency_key, traceparent=context
            )


JobSubmission = Annotated[JobSubmitter, Depends(JobSubmitter)]


def set_location_header(response: Response, job: JobResponse) -> JobResponse:
    """Add a new job's URL to the response as `Location`."""
    response.headers["Location"] = f"/jobs/{job.id}"
    return job


@router.post("/jobs", status_code=status.HTTP_201_CREATED)
def create_job(spec: JobSpec, submission: JobSubmission, presenter: Presenter, response: Response) -> JobResponse:
    """Submit a job. The same `Idempotency-Key` with the same body returns the same job."""
    job = submission.submit(spec)
    return set_location_header(response, presenter.render(job))


@router.post("/jobs/validate")
def validate_job(
    spec: JobSpec,
    service: Service,
    caller: SubmittingCaller,  # before the client, as in `JobSubmitter`
    client: ConnectedClient,
) -> EstimateResponse:
    """Check a spec as submitting it would, and return an estimate; nothing is stored."""
    return EstimateResponse(**dict(service.validate(spec, caller, client)))


@router.get("/jobs")
def list_jobs(
    request: Request,
    parts: ComponentsDep,
    caller: ReadingCaller,
    presenter: Presenter,
    page: NewestFirst,
    status: Annotated[JobStatus | None, Query()] = None,
    model: Annotated[str | None, Query(description="the teacher's `name_or_path`")] = None,
    name: Annotated[str | None, Query(description="the job's name")] = None,
) -> ListResponse[JobResponse]:
    """Jobs, newest first. `metadata.{key}={value}` filters by metadata."""
    where = JobFilter(status, model, name, parse_metadata_filter(request, _METADATA_PREFIX))
    found = parts.jobs.list(page, tenant=caller.tenant, where=where)
    return make_list_response(found, presenter.render, order=page.order)


def parse_metadata_filter(request: Request, before: str, after: str = "") -> dict[str, str]:
    """Return the metadata of a query, whose names stand between `before` and `after`. Raises `InvalidInputError` for a
    name that cannot be a key of a job's metadata."""
    asked = {
        name.removeprefix(before).removesuffix(after): value
        for name, value in request.query_params.items()
        if name.startswith(before) and name.endswith(after)
    }
    for key in asked:
        try:
            _LABEL_ADAPTER.validate_python(key)
        except ValidationError as error:
            message = f"invalid metadata key: {error.errors()[0]['msg']}"
            raise InvalidInputError(message, field=f"{_METADATA_PREFIX}{key}") from error
    return asked


@router.get("/jobs/{job_id}")
def get_job(
    job_id: str, parts: ComponentsDep, caller: ReadingCaller, watches: WatchedJobsDep, presenter: Presenter
) -> JobResponse:
    """Return a job."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    if not job.status.is_terminal:
        watches.mark_watched(job_id)
    return presenter.render(job)


@router.post("/jobs/{job_id}/cancel")
def cancel_job(job_id: str, service: Service, caller: WritingCaller, presenter: Presenter) -> JobResponse:
    """Cancel a job; repeating the request is harmless."""
    return presenter.render(service.cancel(job_id, caller))


@router.post("/jobs/{job_id}/pause")
def pause_job(job_id: str, service: Service, caller: WritingCaller, presenter: Presenter) -> JobResponse:
    """Ask a job to checkpoint and free the cluster; repeating the request is harmless."""
    return presenter.render(service.pause(job_id, caller))


@router.post("/jobs/{job_id}/resume")
def resume_job(
    job_id: str, service: Service, caller: WritingCaller, presenter: Presenter, body: ResumeRequest | None = None
) -> JobResponse:
    """Queue a paused job again; it continues from its last checkpoint. `cost_cap` replaces `limits.cost_cap`."""
    return presenter.render(service.resume(job_id, caller, cost_cap=None if body is None else body.cost_cap))


@router.delete("/jobs/{job_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_job(job_id: str, deletions: DeletionsDep, parts: ComponentsDep, caller: WritingCaller) -> None:
    """Delete a job that has ended, with its model and all its data; retention removes its objects in its next round.

    Returns 409 for a job that is resumable, whose model is deployed or promoted, or that another job reads; the
    response says which.
    """
    deletions.delete_job(job_id, by=caller.name, now=parts.clock(), tenant=caller.tenant)


_PLAIN_TEXT_TYPE = "text/plain; charset=utf-8"
_MAX_INT64 = (1 << 63) - 1


@router.get("/jobs/{job_id}/events", response_model=ListResponse[EventResponse])
def list_events(
    request: Request,
    job_id: str,
    parts: ComponentsDep,
    _stream: StreamSlot,
    caller: ReadingCaller,
    watches: WatchedJobsDep,
    page: OldestFirst,
    last_event_id: Annotated[str | None, Header()] = None,
) -> ListResponse[EventResponse] | Response:
    """List a job's events. With `Accept: text/event-stream` they are streamed live, starting after `Last-Event-ID`."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    watches.mark_watched(job_id)
    if not accepts_event_stream(request):
        return make_list_response(parts.jobs.list_events(job_id, page), EventResponse.model_validate)
    after = last_event_id or page.after
    # refuse an unknown `after` before the stream begins
    parts.jobs.list_events(job_id, PageQuery(after, limit=1, order="asc"))
    stream: Response = EventSourceResponse(_follow_events(parts, request.app.state.followers, caller, job_id, after))
    return stream


async def _follow_events(
    parts: Components, followers: EventFollowers, caller: Caller, job_id: str, after: str | None
) -> AsyncIterator[dict[str, str]]:
    """Yield server-sent events until the job's last one; if the database fails, the stream ends and clients
    reconnect."""
    try:
        # The job is read before its events: if it has ended, its last event is stored.
        job = await run_in_threadpool(parts.jobs.get, job_id, tenant=caller.tenant)
        following = followers.follow(job_id, caller.tenant, after, has_ended=job.status.is_terminal)
        async with aclosing(following) as events:
            async for event in events:
                yield {
                    "id": event.id,
                    "event": event.type,
                    "data": EventResponse.model_validate(event).model_dump_json(),
                }
    except DatabaseUnavailableError as error:
        get_logger().warning("event stream ended early", job_id=job_id, reason=error.message)


@router.get("/jobs/{job_id}/metrics")
def list_metrics(
    job_id: str, parts: ComponentsDep, caller: ReadingCaller, watches: WatchedJobsDep, page: OldestFirst
) -> ListResponse[MetricPointResponse]:
    """List a job's metrics by ascending step; `after` is a step."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    watches.mark_watched(job_id)
    return make_list_response(
        parts.jobs.list_points(job_id, page), MetricPointResponse.from_point, lambda point: str(point.step)
    )


async def _reserve_follower_slot(
    request: Request,
    _stream: StreamSlot,
    follow: Annotated[bool, Query(description="stream until the job has ended")] = False,
) -> AsyncIterator[bool]:
    """Return whether the logs are followed; if so, hold one of the caller's slots for followers until the response is
    sent. Raises `OverloadedError` if none is free."""
    followers: LogFollowers = request.app.state.log_followers
    caller: Caller = request.state.caller
    with followers.limiter.hold(caller.tenant, caller.name) if follow else nullcontext():
        yield follow


@router.get("/jobs/{job_id}/logs", response_class=PlainTextResponse)
async def get_logs(
    request: Request,
    job_id: str,
    parts: ComponentsDep,
    follow: Annotated[bool, Depends(_reserve_follower_slot)],
    caller: FetchingCaller,
    tail_lines: Annotated[
        int | None, Query(ge=1, le=100_000, description="only the last lines of the newest attempt")
    ] = None,
    offset: Annotated[int, Query(ge=0, le=_MAX_INT64, description="first byte to send")] = 0,
    limit: Annotated[int | None, Query(ge=1, le=_MAX_INT64, description="maximum number of bytes to send")] = None,
) -> Response:
    """Return the output of the attempts, one after the other, streamed as it is read; the middle of a long log is left
    out."""
    job = await run_in_threadpool(parts.jobs.get, job_id, tenant=caller.tenant)
    if tail_lines is not None and (follow or offset or limit is not None):
        message = "tail_lines cannot be combined with follow, offset or limit"
        raise InvalidInputError(message, field="tail_lines", value=tail_lines)
    if follow and limit is not None:
        raise InvalidInputError("limit cannot be combined with follow", field="limit", value=limit)
    if follow:
        followers: LogFollowers = request.app.state.log_followers
        return StreamingResponse(followers.follow(job_id, caller.tenant, offset=offset), media_type=_PLAIN_TEXT_TYPE)
    if tail_lines is not None:
        read = read_tail(parts, job, tail_lines)
    else:
        read = read_logs(parts, job, offset=offset, limit=limit)
    # The first piece is read before the answer begins, so that a failure still gets its own status.
    first = await run_in_threadpool(next, read, b"")
    return StreamingResponse(chain([first], read), media_type=_PLAIN_TEXT_TYPE)


_URL_LIFETIME_S = 3600


@router.get("/jobs/{job_id}/checkpoints")
def list_checkpoints(
    job_id: str, parts: ComponentsDep, caller: FetchingCaller, page: OldestFirst
) -> ListResponse[CheckpointResponse]:
    """List complete checkpoints of all attempts, by step, with held-out KL if it was measured."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    chosen = _find_model_checkpoint(parts.attempts, job)

    def make_response(checkpoint: StoredCheckpoint) -> CheckpointResponse:
        return CheckpointResponse.from_checkpoint(
            checkpoint, model=job.distilled_model if checkpoint.key == chosen else None
        )

    return make_list_response(list_checkpoint_page(parts.attempts, job_id, page), make_response)


def list_checkpoint_page(attempts: AttemptStore, job_id: str, page: PageQuery) -> Page[StoredCheckpoint]:
    """Return a page of a job's complete checkpoints. Only manifests of the page are read."""
    names = attempts.list_checkpoint_names(job_id)
    remaining = paginate(names, make_checkpoint_id, replace(page, limit=max(len(names), 1))).items
    found = attempts.read_checkpoints(remaining, page.limit + 1)
    return Page(found[: page.limit], has_more=len(found) > page.limit)


def _find_model_checkpoint(attempts: AttemptStore, job: Job) -> str | None:
    """Return the key of the checkpoint that the job's model is made of: the newest attempt's at the model's step."""
    step = ((job.result or {}).get("training") or {}).get("step")
    names = [name for name in reversed(attempts.list_checkpoint_names(job.id)) if name.step == step]
    return next((found.key for found in attempts.read_checkpoints(names, 1)), None)


@router.get("/jobs/{job_id}/artifacts")
def list_artifacts(
    request: Request, job_id: str, parts: ComponentsDep, caller: FetchingCaller, page: OldestFirst
) -> ListResponse[ArtifactFileResponse]:
    """List the files of the distilled model by path; none before the job has succeeded."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)

    def make_response(item: tuple[str, ManifestFile]) -> ArtifactFileResponse:
        path, file = item
        url = parts.objects.create_presigned_url(f"{job.attempt_id.artifact_prefix}/{path}", _URL_LIFETIME_S)
        url = url or str(request.url_for("download_artifact", job_id=job.id, path=path))
        return ArtifactFileResponse(path=path, size=file.size, sha256=file.sha256, url=url)

    kept = paginate(list(_list_artifact_files(parts, job).items()), lambda item: item[0], page)
    return make_list_response(kept, make_response, lambda file: file.path)


@router.get("/jobs/{job_id}/artifacts/{path:path}", response_class=StreamingResponse)
def download_artifact(
    job_id: str, path: str, parts: ComponentsDep, _stream: StreamSlot, caller: FetchingCaller
) -> StreamingResponse:
    """Download a file of the distilled model."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    file = _list_artifact_files(parts, job).get(path)
    if file is None:
        message = f"job {job_id} has no artifact file {path!r}; GET /jobs/{job_id}/artifacts lists them"
        raise NotFoundError(message, field="path", value=path)
    return StreamingResponse(
        parts.objects.stream(f"{job.attempt_id.artifact_prefix}/{path}"),
        media_type="application/octet-stream",
        headers={"Content-Length": str(file.size), "ETag": f'"{file.sha256}"'},
    )


@router.get("/jobs/{job_id}/tracking")
def list_tracking_files(
    request: Request, job_id: str, parts: ComponentsDep, caller: FetchingCaller, page: OldestFirst
) -> ListResponse[TrackingFileResponse]:
    """List files of W&B runs that are not uploaded to W&B yet, by path; `swiftkv jobs wandb-sync` uploads them."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    kept = paginate(list(parts.attempts.list_tracking_files(job_id).items()), lambda item: item[0], page)

    def make_response(item: tuple[str, ObjectInfo]) -> TrackingFileResponse:
        path, file = item
        url = parts.objects.create_presigned_url(file.key, _URL_LIFETIME_S)
        url = url or str(request.url_for("download_tracking_file", job_id=job_id, tracking_path=path))
        return TrackingFileResponse(path=path, size=file.size, url=url)

    return make_list_response(kept, make_response, lambda file: file.path)


@router.get("/jobs/{job_id}/tracking/{tracking_path:path}", response_class=StreamingResponse)
def download_tracking_file(
    job_id: str, tracking_path: str, parts: ComponentsDep, _stream: StreamSlot, caller: FetchingCaller
) -> StreamingResponse:
    """Download a file of a W&B run."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    file = parts.attempts.list_tracking_files(job_id).get(tracking_path)
    if file is None:
        message = f"job {job_id} has no tracking file {tracking_path!r}; GET /jobs/{job_id}/tracking lists them"
        raise NotFoundError(message, field="tracking_path", value=tracking_path)
    # A run in progress replaces its files, so no size is sent.
    return StreamingResponse(parts.objects.stream(file.key), media_type="application/octet-stream")


def _list_artifact_files(parts: Components, job: Job) -> Mapping[str, ManifestFile]:
    """Files by path, the manifest itself included."""
    if job.status is not JobStatus.SUCCEEDED or job.artifact_uri is None:  # its model may have been deleted
        return {}
    manifest = read_manifest(parts.objects, job.attempt_id.artifact_prefix)
    itself = parts.objects.head(f"{job.attempt_id.artifact_prefix}/{MANIFEST}")
    if itself is None:
        return manifest.files
    return {**manifest.files, MANIFEST: ManifestFile(size=itself.size, sha256=hash_manifest(manifest))}


@cache
def load_recipes() -> Sequence[RecipeResponse]:
    """Return all recipes by id; they are part of the installation, and read once."""
    return [_parse_recipe(name, path.read_text(encoding="utf-8")) for name, path in shipped_recipes().items()]


def _parse_recipe(name: str, text: str) -> RecipeResponse:
    spec = JobSpec.model_validate(yaml.safe_load(text))
    return RecipeResponse(id=name, description=read_description(text), text=remove_editor_comment(text), spec=spec)


@router.get("/recipes")
def list_recipes(_caller: ReadingCaller, page: OldestFirst) -> ListResponse[RecipeResponse]:
    """List the job specs that ship with the platform, by id."""
    kept = paginate(load_recipes(), lambda recipe: recipe.id, page)
    return make_list_response(kept, lambda recipe: recipe, order=page.order)
