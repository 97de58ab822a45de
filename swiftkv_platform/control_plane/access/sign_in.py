"""`/`: the dashboard's files, and the session with which a browser sends an API key. Knows no job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import Field

from swiftkv_platform.control_plane.access.audit import record_of
from swiftkv_platform.control_plane.access.callers import SESSION_COOKIE, SIGN_IN_PATH, current_session
from swiftkv_platform.control_plane.access.sessions import Session, Sessions
from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.middleware import PAGE_HEADERS

FILES = Path(__file__).parent.parent / "dashboard"

router = APIRouter(include_in_schema=False, route_class=BodyRoute)


@router.get("/")
def index() -> FileResponse:
    """The dashboard."""
    return FileResponse(FILES / "index.html", headers=dict(PAGE_HEADERS))


class SignIn(FrozenModel):
    api_key: Annotated[str, Field(max_length=8192)]


@router.post(SIGN_IN_PATH, status_code=status.HTTP_204_NO_CONTENT)
def sign_in(body: SignIn, request: Request, response: Response) -> None:
    """Begin a session. Its id goes into a cookie that scripts cannot read, since an event stream cannot send a
    header."""
    sessions: Sessions | None = request.app.state.sessions
    if sessions is None:
        return
    principal = sessions.identify(body.api_key)
    record = record_of(request)
    record.identify(request, principal, name=principal.name, tenant=principal.tenant)
    record.open()
    session = sessions.open(body.api_key, principal)
    _close(request, sessions)
    response.set_cookie(
        SESSION_COOKIE,
        session.id,
        max_age=max(int(session.expires_at - session.began_at), 0),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


@router.get(SIGN_IN_PATH)
def show_session(request: Request) -> dict[str, object]:
    """Return the session's key and end, null without a session, and whether the caller may read the audit trail."""
    session = _session_or_none(request)
    if session is None:
        return {"session": None, "reads_audit": request.app.state.authenticator is None}
    told = {"name": session.key.name, "tenant": session.key.tenant, "expires_at": int(session.expires_at)}
    return {"session": told, "reads_audit": session.key.reads_audit}


@router.delete(SIGN_IN_PATH, status_code=status.HTTP_204_NO_CONTENT)
def sign_out(request: Request, response: Response) -> None:
    """End the session."""
    sessions: Sessions | None = request.app.state.sessions
    if sessions is not None:
        session = _session_or_none(request)
        if session is not None:
            record = record_of(request)
            record.identify(request, session.key, name=session.key.name, tenant=session.key.tenant)
            record.open()
        _close(request, sessions)
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")


def _session_or_none(request: Request) -> Session | None:
    try:
        return current_session(request)
    except UnauthenticatedError:
        return None


def _close(request: Request, sessions: Sessions) -> None:
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        sessions.close(cookie)
