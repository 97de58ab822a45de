"""`/`, `/session`, `/audit` and `/quota`: the dashboard, sessions, the audit trail, and quotas with their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Depends, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import Field

from swiftkv_platform.control_plane.access.audit import AuditEntry, AuditFilter, AuditTrail, get_request_audit
from swiftkv_platform.control_plane.access.callers import (
    SESSION_COOKIE,
    SIGN_IN_PATH,
    ReadingCaller,
    get_session,
    require_caller,
)
from swiftkv_platform.control_plane.access.sessions import Session, Sessions
from swiftkv_platform.control_plane.access.tenants import Demand
from swiftkv_platform.control_plane.access.usage import (
    count_objects,
    sum_deployment_demand,
    sum_job_demand,
    sum_stored_bytes,
)
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.components import RAY_TIMEOUT_S, ComponentsDep, NodesDep
from swiftkv_platform.control_plane.jobs.job import STATUSES_ON_CLUSTER
from swiftkv_platform.control_plane.ray import Node
from swiftkv_platform.control_plane.responses import ListResponse, NewestFirst, ResponseModel, make_list_response
from swiftkv_platform.errors import ForbiddenError, UnauthenticatedError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.security.principals import Principal, Scope
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.middleware import PAGE_HEADERS

DASHBOARD_DIRECTORY = Path(__file__).parent.parent / "dashboard"

router = APIRouter(tags=["operations"], route_class=BodyRoute)


@router.get("/", include_in_schema=False)
def index() -> FileResponse:
    """Return the dashboard's page."""
    return FileResponse(DASHBOARD_DIRECTORY / "index.html", headers=dict(PAGE_HEADERS))


class SignIn(FrozenBaseModel):
    api_key: Annotated[str, Field(max_length=8192)]


@router.post(SIGN_IN_PATH, status_code=status.HTTP_204_NO_CONTENT, include_in_schema=False)
def sign_in(body: SignIn, request: Request, response: Response) -> None:
    """Create a session. Its id is sent in a cookie that scripts cannot read, since an event stream cannot send a
    header."""
    sessions: Sessions | None = request.app.state.sessions
    if sessions is None:
        return
    principal = sessions.authenticate(body.api_key)
    record = get_request_audit(request)
    record.set_caller(request, principal, name=principal.name, tenant=principal.tenant)
    record.start_storing()
    session = sessions.create(body.api_key, principal)
    _delete_cookie_session(request, sessions)
    response.set_cookie(
        SESSION_COOKIE,
        session.id,
        max_age=max(int(session.expires_at - session.began_at), 0),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


@router.get(SIGN_IN_PATH, include_in_schema=False)
def show_session(request: Request) -> dict[str, object]:
    """Return the session's key and end, null without a session, and whether the caller may read the audit trail."""
    session = _find_session(request)
    if session is None:
        return {"session": None, "reads_audit": request.app.state.authenticator is None}
    told = {"name": session.key.name, "tenant": session.key.tenant, "expires_at": int(session.expires_at)}
    return {"session": told, "reads_audit": session.key.can_read_audit}


@router.delete(SIGN_IN_PATH, status_code=status.HTTP_204_NO_CONTENT, include_in_schema=False)
def sign_out(request: Request, response: Response) -> None:
    """End the session."""
    sessions: Sessions | None = request.app.state.sessions
    if sessions is not None:
        session = _find_session(request)
        if session is not None:
            record = get_request_audit(request)
            record.set_caller(request, session.key, name=session.key.name, tenant=session.key.tenant)
            record.start_storing()
        _delete_cookie_session(request, sessions)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")


def _find_session(request: Request) -> Session | None:
    try:
        return get_session(request)
    except UnauthenticatedError:
        return None


def _delete_cookie_session(request: Request, sessions: Sessions) -> None:
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        sessions.delete(cookie)


class AuditResponse(ResponseModel):
    """A request that changed something, tried to, or was refused access."""

    id: str
    object: Literal["audit.entry"] = "audit.entry"
    created_at: float
    """Unix seconds."""
    request_id: str
    """`X-Request-ID` of the response."""
    actor: str | None
    """Name of the key's owner, or issuer and subject of the token; null if unknown."""
    credential: str | None
    """Id of the key (`swiftkv keys list`), or issuer and subject."""
    tenant: str | None
    address: str
    """Address of the caller, as reported by a trusted proxy."""
    method: str
    route: str
    """Template of the route."""
    about: str | None
    """Id of the object that the request reads or changes, e.g. of a job."""
    status: int
    """HTTP status of the response."""
    left_out: int
    """Number of earlier refusals that were not recorded, to limit the size of the trail."""

    @classmethod
    def from_entry(cls, entry: AuditEntry) -> Self:
        return cls.model_validate({**vars(entry), "object": "audit.entry", "about": entry.object})


def get_visible_tenant(request: Request, caller: Annotated[Caller, require_caller("reading")]) -> str | None:
    """Return the tenant whose entries the caller may read; None for all tenants. Raises `ForbiddenError`."""
    principal: Principal | None = getattr(request.state, "principal", None)
    if principal is None or principal.operator:
        return None
    principal.require_scope(Scope.ADMIN)
    return caller.tenant


@router.get("/audit")
def list_audit(
    request: Request,
    visible_tenant: Annotated[str | None, Depends(get_visible_tenant)],
    filters: Annotated[AuditFilter, Depends()],
    page: NewestFirst,
) -> ListResponse[AuditResponse]:
    """List the audit trail, newest first: an operator's key sees all tenants, another key with `admin` its own."""
    requested = filters.tenant
    if visible_tenant is not None and requested not in (None, visible_tenant):
        message = (
            f"tenant is {requested!r}; this key may read only entries of tenant {visible_tenant!r}; use an operator's "
            "key to read all"
        )
        raise ForbiddenError(message, field="tenant")
    trail: AuditTrail = request.app.state.audit
    found = trail.list_entries(page, replace(filters, tenant=visible_tenant or requested))
    return make_list_response(found, AuditResponse.from_entry, order=page.order)


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
    def from_nodes(cls, nodes: Sequence[Node]) -> ClusterResponse:
        total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in ("GPU", "CPU")}
        held = {name: round(total[name] - sum(node.free.get(name, 0.0) for node in nodes), 4) for name in total}
        return cls(gpus=held["GPU"], total_gpus=total["GPU"], cpus=held["CPU"], total_cpus=total["CPU"])


class QuotaResponse(ResponseModel):
    """Limits of a tenant, null if there is none, and what its jobs and deployments hold.

    Jobs and deployments count at their max size, and a deployment until its replicas are gone.
    """

    object: Literal["quota"] = "quota"
    tenant: str
    weight: float
    """Weight of the tenant's share of the cluster among tenants with waiting jobs or deployments."""
    max_queued_jobs: int | None
    max_running_jobs: int | None
    max_gpus: float | None
    max_cpus: float | None
    max_replicas: int | None
    """Max total replicas of the tenant's deployments."""
    queued_jobs: int
    """Queued and paused jobs."""
    running_jobs: int
    replicas: int
    gpus: float
    """GPUs of jobs and deployments together."""
    cpus: float
    stored_bytes: int
    """Total bytes of the tenant's uploaded files and models."""
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


_LIMIT_BY_COUNT = {
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
def get_quota(parts: ComponentsDep, caller: ReadingCaller, nodes: NodesDep) -> QuotaResponse:
    """Return quotas and use of the caller's tenant, and the use of the whole cluster."""
    tenant, told = caller.tenant, nodes.get(RAY_TIMEOUT_S, None)
    with parts.database.begin_read() as session:
        jobs = sum_job_demand(session, STATUSES_ON_CLUSTER, tenants=[tenant]).get(tenant, Demand())
        deployments = sum_deployment_demand(session, tenants=[tenant]).get(tenant, Demand())
        counts = {name: count_objects(session, limit, tenant) for name, limit in _LIMIT_BY_COUNT.items()}
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
            "cluster": None if told is None else ClusterResponse.from_nodes(told),
        }
    )
