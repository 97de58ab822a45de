"""`/deployments`: served models, and their captured traffic. Reading its rows is in the audit trail."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from ssl import SSLContext
from typing import Annotated, Any, Literal, Self

import httpx
from fastapi import APIRouter, Depends, Query, Request, Response, status
from fastapi.responses import StreamingResponse
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ConfigDict, Field
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool

from swiftkv_platform.contract.traffic import (
    MAX_USER_CHARS,
    CapturedRequest,
    TrafficDeletion,
    make_traffic_prefix,
    strip_response_id_prefix,
)
from swiftkv_platform.control_plane.access.callers import (
    DeployingCaller,
    FetchingCaller,
    InferenceCaller,
    ReadingCaller,
    StreamSlot,
    get_authorization,
)
from swiftkv_platform.control_plane.components import Components, ComponentsDep, SettingsDep
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentStatus
from swiftkv_platform.control_plane.deployments.rollout import Rollout, RolloutStatus
from swiftkv_platform.control_plane.deployments.rollout_steps import RolloutService
from swiftkv_platform.control_plane.deployments.service import DeploymentService
from swiftkv_platform.control_plane.merge_patch import IfMatch, MergePatch, derive_merge_patch, set_etag
from swiftkv_platform.control_plane.models.responses import RollbackRequest
from swiftkv_platform.control_plane.responses import ListResponse, NewestFirst, ResponseModel, make_list_response
from swiftkv_platform.errors import ClusterUnavailableError, InvalidInputError
from swiftkv_platform.limits import PAGE_BYTES
from swiftkv_platform.specs.deployment import DeploymentSpec, ResolvedCapture, ResolvedDeployment
from swiftkv_platform.storage.traffic import TrafficStore
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.limiters import TenantConcurrencyLimiter


@derive_merge_patch(DeploymentSpec)
class DeploymentChange(MergePatch):
    """Changes of a deployment, as a JSON merge patch (RFC 7396); fields that are left out keep their value."""


class ReplicaMetricsResponse(ResponseModel):
    """Measurements of one replica since it was started."""

    replica: str
    values: dict[str, float]
    """Values by the names of its own `/metrics` without the prefix `swiftkv:`, such as `generation_tokens_total`,
    `tokens_exited_total`, `kv_cache_usage_perc`, `num_requests_waiting`, `time_to_first_token_seconds_sum` and
    `_count`. Totals only grow; rates are differences between two responses."""


class DeploymentMetricsResponse(ResponseModel):
    """Metrics of the replicas that responded."""

    object: Literal["deployment.metrics"] = "deployment.metrics"
    time: float
    """Unix seconds at which they were read."""
    replicas: list[ReplicaMetricsResponse]


class _DeploymentIdentity(ResponseModel):
    """First fields of a deployment's response."""

    id: str
    object: Literal["deployment"] = "deployment"
    created_at: int
    version: int
    """Increases with every change; also in `ETag`, for `If-Match`."""


class DeploymentResponse(ResolvedDeployment, _DeploymentIdentity):
    """A served model."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    # Callers only see deployments of their own tenant.
    tenant: str | None = Field(default=None, exclude=True)
    status: DeploymentStatus
    message: str
    replicas: int
    """Replicas running now."""
    load_seconds: dict[str, float]
    """Cold start: seconds by phase of the running replica that took longest to serve the model. `fetch`: from the
    object store or the machine's cache; `load`: into the engine; `check`: its first token. Empty until a replica
    runs."""
    unknown_since: int | None
    """Unix seconds since which the cluster has not reported the status and replicas, which are the last known ones;
    null while it reports them."""
    url: str
    """Base URL; requests go to `{url}/generate`."""

    @classmethod
    def from_deployment(cls, deployment: Deployment, serve_url: str) -> Self:
        spec, kept = deployment.spec, {"created_at": deployment.created_at, "version": deployment.version}
        url = serve_url.rstrip("/") + spec.route_prefix.rstrip("/")
        return cls(**spec.model_dump(), **vars(deployment.state), **kept, url=url)


_METRIC_PREFIX = "swiftkv:"
_REPLICA_METRIC = "swiftkv:replica_info"
_MAX_METRICS_REQUESTS = 16
"""Max metrics requests per call; the proxy routes each to any replica."""
_METRICS_TIMEOUT = httpx.Timeout(5.0)
"""Seconds."""


async def read_replica_metrics(
    url: str, num_replicas: int, *, authorization: str | None = None
) -> list[ReplicaMetricsResponse]:
    """Return the metrics of the replicas that answered, ordered by replica name.

    The proxy at `url` is asked until `num_replicas` have answered, or a limited number of times. `authorization`: the
    caller's header; replicas with keys show their metrics to their tenant. Raises `ClusterUnavailableError` if a
    request gets no answer.
    """
    found: dict[str, ReplicaMetricsResponse] = {}
    headers = {} if authorization is None else {"Authorization": authorization}
    async with httpx.AsyncClient(timeout=_METRICS_TIMEOUT, trust_env=False, headers=headers) as client:
        for _ in range(max(1, min(4 * num_replicas, _MAX_METRICS_REQUESTS))):
            try:
                answer = await client.get(f"{url}/metrics")
            except httpx.HTTPError as error:
                raise ClusterUnavailableError(
                    f"{url}/metrics does not answer: {error or type(error).__name__}"
                ) from error
            if not answer.is_success:
                raise ClusterUnavailableError(f"{url}/metrics answers {answer.status_code} {answer.reason_phrase}")
            metrics = _parse_metrics(answer.text)
            found[metrics.replica] = metrics
            if len(found) >= num_replicas:
                break
    return [found[name] for name in sorted(found)]


def _parse_metrics(page: str) -> ReplicaMetricsResponse:
    """Parse a page in Prometheus' text format. Counters and histograms (`_count`, `_sum`) are summed over their labels,
    buckets left out."""
    replica = ""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == _REPLICA_METRIC:
                replica = sample.labels["replica"]
            elif sample.name.startswith(_METRIC_PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix(_METRIC_PREFIX)
                values[name] = values.get(name, 0.0) + sample.value
    return ReplicaMetricsResponse(replica=replica, values=values)


_PROXY_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
"""Seconds; a busy replica sends nothing before the first token."""

router = APIRouter(prefix="/deployments", tags=["deployments"], route_class=BodyRoute)


def get_deployment_service(parts: ComponentsDep, settings: SettingsDep) -> DeploymentService:
    return DeploymentService(parts, settings)


Service = Annotated[DeploymentService, Depends(get_deployment_service)]


@router.post("", status_code=status.HTTP_201_CREATED)
def create_deployment(
    body: DeploymentSpec, service: Service, caller: DeployingCaller, settings: SettingsDep, response: Response
) -> DeploymentResponse:
    """Deploy a model. Returns at once; `status` becomes `running` when the deployment accepts requests."""
    deployment = service.create(caller, body)
    response.headers["Location"] = f"/deployments/{deployment.spec.id}"
    set_etag(response, deployment.version)
    return DeploymentResponse.from_deployment(deployment, settings.serve_url)


@router.get("")
def list_deployments(
    parts: ComponentsDep, caller: ReadingCaller, settings: SettingsDep, page: NewestFirst
) -> ListResponse[DeploymentResponse]:
    """List deployments, newest first."""
    found = parts.deployments.list_deployments(page, tenant=caller.tenant)
    return make_list_response(
        found, lambda item: DeploymentResponse.from_deployment(item, settings.serve_url), order=page.order
    )


@router.get("/{deployment_id}")
def get_deployment(
    deployment_id: str, parts: ComponentsDep, caller: ReadingCaller, settings: SettingsDep, response: Response
) -> DeploymentResponse:
    """Return a deployment. `ETag` names its version, which `status` and `replicas` do not change."""
    found = parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
    set_etag(response, found.version)
    return DeploymentResponse.from_deployment(found, settings.serve_url)


@router.get("/{deployment_id}/metrics")
async def get_deployment_metrics(
    deployment_id: str, request: Request, parts: ComponentsDep, caller: FetchingCaller, settings: SettingsDep
) -> DeploymentMetricsResponse:
    """Return the present metrics of the deployment's replicas, for pages without a Prometheus server. Empty if none
    runs."""
    found = await run_in_threadpool(parts.deployments.get_deployment, deployment_id, tenant=caller.tenant)
    if not found.state.replicas:
        return DeploymentMetricsResponse(time=parts.clock(), replicas=[])
    url = DeploymentResponse.from_deployment(found, settings.serve_url).url
    key = await run_in_threadpool(get_authorization, request)
    replicas = await read_replica_metrics(url, found.state.replicas, authorization=key)
    return DeploymentMetricsResponse(time=parts.clock(), replicas=replicas)


@router.patch("/{deployment_id}")
def change_deployment(
    deployment_id: str,
    body: DeploymentChange,
    service: Service,
    caller: DeployingCaller,
    settings: SettingsDep,
    expected: IfMatch,
    response: Response,
) -> DeploymentResponse:
    """Serve another model, or change options, without a failed request. Returns at once: the deployment is `swapping`
    until all replicas serve the change, or `refused` if they cannot load it; they then continue to serve the previous
    version.

    Concurrent changes of different fields both take effect; of two that contradict each other the later one is answered
    with 409. With `If-Match` only that version is changed (else 412).
    """
    changed = service.update(deployment_id, caller, body.dump_set_fields(), expected=expected)
    set_etag(response, changed.version)
    return DeploymentResponse.from_deployment(changed, settings.serve_url)


@cache
def _make_ssl_context() -> SSLContext:
    """Load the trusted certificates once, since that takes a tenth of a second."""
    return httpx.create_ssl_context(trust_env=False)


class DeploymentProxy:
    """Forwards the caller's request to a deployment, and streams the response back."""

    def __init__(
        self,
        deployment_id: str,
        body: dict[str, Any],
        request: Request,
        parts: ComponentsDep,
        caller: InferenceCaller,
        settings: SettingsDep,
        _stream: StreamSlot,
    ) -> None:
        self._deployment_id, self._body, self._request = deployment_id, body, request
        self._parts, self._caller, self._settings = parts, caller, settings

    async def forward(self, path: str) -> StreamingResponse:
        """Forward to `path` below the deployment's URL. Raises `NotFoundError`, `OverloadedError` and
        `ClusterUnavailableError`."""
        url = await self._find_url()
        client = httpx.AsyncClient(timeout=_PROXY_TIMEOUT, trust_env=False, verify=_make_ssl_context())
        try:
            key = await run_in_threadpool(get_authorization, self._request)  # for replicas that have the key file
            headers = {} if key is None else {"Authorization": key}
            request = client.build_request("POST", f"{url}{path}", json=self._body, headers=headers)
            response = await client.send(request, stream=True)
        except httpx.TransportError as error:
            await client.aclose()
            message = f"deployment {self._deployment_id} does not answer: {error or type(error).__name__}"
            raise ClusterUnavailableError(message, field="deployment_id", value=self._deployment_id) from error

        async def close() -> None:
            await response.aclose()
            await client.aclose()

        kept = {name: response.headers[name] for name in ("Content-Type", "Retry-After") if name in response.headers}
        return StreamingResponse(response.aiter_raw(), response.status_code, kept, background=BackgroundTask(close))

    async def _find_url(self) -> str:
        limiter: TenantConcurrencyLimiter = self._request.app.state.concurrency_limiter
        tenant = self._caller.tenant
        async with limiter.acquire(tenant, "asking"):
            deployments = self._parts.deployments
            found = await run_in_threadpool(deployments.get_deployment, self._deployment_id, tenant=tenant)
            return DeploymentResponse.from_deployment(found, self._settings.serve_url).url


Proxy = Annotated[DeploymentProxy, Depends(DeploymentProxy)]


@router.post("/{deployment_id}/generate", response_class=StreamingResponse)
async def generate(proxy: Proxy) -> StreamingResponse:
    """Forward to a deployment's own `POST /generate`, for pages, which may only send requests to this server."""
    return await proxy.forward("/generate")


@router.post("/{deployment_id}/chat/completions", response_class=StreamingResponse)
async def complete_chat(proxy: Proxy) -> StreamingResponse:
    """Forward to a deployment's own `POST /v1/chat/completions`, for example with tools, for pages as well."""
    return await proxy.forward("/v1/chat/completions")


class RolloutStepResponse(ResponseModel):
    """A change of a rollout's status."""

    status: RolloutStatus
    at: int
    """Unix seconds."""
    by: str
    """Name of the caller's key, or `rollout of job_...`."""
    message: str


class RolloutResponse(ResponseModel):
    """The rollout of a job's model to a deployment (section `rollout` of a job spec)."""

    job_id: str
    object: Literal["rollout"] = "rollout"
    deployment: str
    model: str
    status: RolloutStatus
    share: float
    promote_after_s: int | None
    serving_since: int | None
    """Unix seconds since which all replicas have served the candidate."""
    promote_at: int | None
    """Unix seconds at which the candidate is promoted; null if that is not known yet, or nothing will be."""
    previous: str | None
    """Model that the deployment serves until the promotion."""
    steps: list[RolloutStepResponse]
    """Oldest first; the last one has the present status."""

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Self:
        computed = {"status": rollout.status, "promote_at": rollout.promote_at}
        return cls.model_validate({**vars(rollout), **computed, "steps": list(map(vars, rollout.steps))})


@router.get("/{deployment_id}/rollouts")
def list_rollouts(
    deployment_id: str, parts: ComponentsDep, caller: ReadingCaller, page: NewestFirst
) -> ListResponse[RolloutResponse]:
    """List the rollouts of jobs' models to the deployment, newest job first."""
    parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
    found = parts.rollouts.list_rollouts(deployment_id, page, tenant=caller.tenant)
    return make_list_response(found, RolloutResponse.from_rollout, attrgetter("job_id"), page.order)


@router.post("/{deployment_id}/rollouts/{job_id}/rollback")
def roll_back_rollout(
    deployment_id: str,
    job_id: str,
    body: RollbackRequest,
    caller: DeployingCaller,
    parts: ComponentsDep,
    settings: SettingsDep,
) -> RolloutResponse:
    """Undo a rollout: remove the candidate, or serve the previous model again. A deployment that follows an alias gets
    the alias rolled back.

    Returns 409 if the rollout was refused or rolled back before, or if the deployment serves another model now.
    """
    service = RolloutService(parts, settings)
    return RolloutResponse.from_rollout(service.roll_back(job_id, deployment_id, caller, body.reason))


@router.delete("/{deployment_id}", status_code=status.HTTP_202_ACCEPTED)
def delete_deployment(
    deployment_id: str, service: Service, caller: DeployingCaller, settings: SettingsDep
) -> DeploymentResponse:
    """Delete a deployment. Its status is `deleting` until its replicas are gone; then `GET` returns 404."""
    return DeploymentResponse.from_deployment(service.delete(deployment_id, caller), settings.serve_url)


_MAX_TIME = 253_402_300_799.0
"""Last second of the year 9999."""


class TrafficDayResponse(ResponseModel):
    """Captured traffic of a UTC day."""

    day: str
    """Such as `2026-11-30`."""
    parts: int
    """Number of objects."""
    bytes: int
    """Compressed bytes."""


class TrafficResponse(ResponseModel):
    """Captured traffic of a deployment."""

    object: Literal["deployment.traffic"] = "deployment.traffic"
    capture: ResolvedCapture | None
    """The deployment's settings; null: nothing is captured, and what was captured is being deleted."""
    bytes: int
    """Compressed bytes of all days."""
    days: list[TrafficDayResponse]
    """In order. Rows of pending deletions count."""
    pending_deletions: list[TrafficDeletion]
    """Deletions whose rows are hidden, and removed from storage within minutes."""


_FilterTime = Annotated[float | None, Query(ge=0.0, le=_MAX_TIME, allow_inf_nan=False)]
_FilterText = Annotated[str | None, Query(min_length=1, max_length=MAX_USER_CHARS)]


def open_traffic(parts: Components, deployment: Deployment) -> TrafficStore:
    """Return the captured traffic of a deployment."""
    return TrafficStore(parts.objects, make_traffic_prefix(deployment.tenant, deployment.spec.id))


class _ReadableTraffic:
    """Captured traffic of the deployment in the path, for callers who may read the tenant's data."""

    def __init__(self, deployment_id: str, parts: ComponentsDep, caller: FetchingCaller) -> None:
        self.deployment = parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        self.store = open_traffic(parts, self.deployment)


ReadableTraffic = Annotated[_ReadableTraffic, Depends(_ReadableTraffic)]


@router.get("/{deployment_id}/traffic")
def get_traffic(traffic: ReadableTraffic) -> TrafficResponse:
    """Return the settings of captured traffic, its size by day, and pending deletions."""
    days = traffic.store.list_days()
    return TrafficResponse(
        capture=traffic.deployment.spec.capture,
        bytes=sum(day.bytes for day in days),
        days=[TrafficDayResponse.model_validate(day) for day in days],
        pending_deletions=[*traffic.store.list_deletions().values()],
    )


@router.get("/{deployment_id}/traffic/rows")
def list_captured_requests(
    traffic: ReadableTraffic,
    since: Annotated[_FilterTime, Query(description="Unix seconds, inclusive")] = None,
    until: Annotated[_FilterTime, Query(description="Unix seconds, exclusive")] = None,
    user: Annotated[_FilterText, Query(description="End user")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after: Annotated[str | None, Query(description="`last_id` of the previous page")] = None,
) -> ListResponse[CapturedRequest]:
    """List captured requests with their answers, newest first. `last_id` is a position, not an id of a request. A page
    reads a limited amount of storage: with a filter it may have few rows, or none, and more may follow."""
    page = traffic.store.read_page(
        limit=limit, after=after, since=since, until=until, user=user, max_bytes=PAGE_BYTES.default
    )
    return ListResponse(
        data=page.rows,
        has_more=page.next is not None,
        first_id=page.rows[0].id if page.rows else None,
        last_id=page.next,
    )


@router.delete("/{deployment_id}/traffic", status_code=status.HTTP_202_ACCEPTED)
def delete_traffic(
    deployment_id: str,
    parts: ComponentsDep,
    caller: DeployingCaller,
    request_id: Annotated[_FilterText, Query(description="Id of a response, with or without its prefix")] = None,
    user: Annotated[_FilterText, Query(description="End user")] = None,
    before: Annotated[_FilterTime, Query(description="Delete requests that ended before, in Unix seconds")] = None,
) -> TrafficDeletion:
    """Delete captured requests that match all given conditions, and ended until now. They are hidden at once, also from
    later jobs, and removed from storage within minutes."""
    deployment = parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
    if request_id is None and user is None and before is None:
        raise InvalidInputError("set request_id, user or before to select the requests to delete", field="request_id")
    deletion = TrafficDeletion(
        requested_at=parts.clock(),
        request_id=None if request_id is None else strip_response_id_prefix(request_id),
        user=user,
        before=before,
    )
    open_traffic(parts, deployment).delete(deletion)
    return deletion
