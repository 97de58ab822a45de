"""`/`, `/session` and `/audit`: the dashboard's files, signing in and out, and the audit trail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Depends, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import Field

from swiftkv_platform.control_plane.access.audit import AuditEntry, AuditFilter, AuditTrail, get_request_audit
from swiftkv_platform.control_plane.access.callers import SESSION_COOKIE, SIGN_IN_PATH, get_session, require_caller
from swiftkv_platform.control_plane.access.sessions import Session, Sessions
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.http.responses import ListResponse, NewestFirst, ResponseModel, make_list_response
from swiftkv_platform.errors import ForbiddenError, UnauthenticatedError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.security.principals import Principal, Scope
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.middleware import PAGE_HEADERS

FILES = Path(__file__).parent.parent / "dashboard"

router = APIRouter(tags=["operations"], route_class=BodyRoute)


@router.get("/", include_in_schema=False)
def index() -> FileResponse:
    """Return the dashboard's page."""
    return FileResponse(FILES / "index.html", headers=dict(PAGE_HEADERS))


class SignIn(FrozenModel):
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
    record.enable()
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
            record.enable()
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
    """Id of the object of the request."""
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
    principal.require(Scope.ADMIN)
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
