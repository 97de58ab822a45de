"""Authentication of callers, their scopes, and the streams and turns that their requests hold."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.params import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from swiftkv_platform.control_plane.access.audit import record_of
from swiftkv_platform.control_plane.access.sessions import Session, Sessions
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.http.clients import Kind, Turns
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Authenticator, Principal, Scope
from swiftkv_platform.web.limiters import ConcurrencyLimiter, Sender

SESSION_COOKIE = "swiftkv_session"
"""Carries the id of the dashboard's session. No other site's page can make a browser send it (`SameSite=Strict`)."""


_LOCAL_CALLER = Caller(tenant="default", name="local")
"""Caller of every request while no API key is configured."""


_CHANGING = frozenset({Scope.JOBS_WRITE, Scope.DEPLOY})
"""Scopes of routes that change something."""


SIGN_IN_PATH = "/session"
_Header = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
"""Shown as a padlock in the API's documentation; `authorization` reads the header itself."""


def identified(request: Request) -> Principal | None:
    """Authenticate the caller of a request, and count it once. Returns None if no keys are needed.

    Raises `UnauthenticatedError` and `RateLimitedError`.
    """
    authenticator: Authenticator | None = request.app.state.authenticator
    record = record_of(request)
    if authenticator is None:
        record.identify(request, None, name=_LOCAL_CALLER.name, tenant=_LOCAL_CALLER.tenant)
        return None
    if not hasattr(request.state, "principal"):
        key = request.state.principal = authenticator.authenticate(authorization(request))
        record.identify(request, key, name=key.name, tenant=key.tenant)
        request.app.state.rate_limit.count_request(key.name)
        request.app.state.key_uses.note(key)
    principal: Principal = request.state.principal
    return principal


async def admit(request: Request) -> Sender:
    """Admit a request before its body is read. Raises as `identified`, and for sign-ins as `sign_ins.take`."""
    if request.url.path == SIGN_IN_PATH:
        address = request.client.host if request.client else "unknown"
        if request.app.state.authenticator is not None:
            request.app.state.sign_ins.count_request(address)
        return Sender("", address)
    key = await run_in_threadpool(identified, request)
    caller = _LOCAL_CALLER if key is None else Caller(key.tenant, key.name)
    return Sender(caller.tenant, caller.name)


def get_caller(request: Request, scopes: SecurityScopes, _header: _Header) -> Caller:
    """Return the caller, if it is allowed. Raises `UnauthenticatedError`, `RateLimitedError` and `ForbiddenError`."""
    key = identified(request)
    if key is not None:
        for scope in scopes.scopes:
            key.require(Scope(scope))
        if request.method not in ("GET", "HEAD"):
            get_logger().info("audit", tenant=key.tenant, key=key.name, method=request.method, path=request.url.path)
    record_of(request).open(only_asks=_CHANGING.isdisjoint(map(Scope, scopes.scopes)))
    caller = request.state.caller = _LOCAL_CALLER if key is None else Caller(tenant=key.tenant, name=key.name)
    return caller


async def hold_stream(request: Request, scopes: SecurityScopes, header: _Header) -> AsyncIterator[None]:
    """Hold one of the caller's streams until the answer is sent. Raises as `get_caller`, and `OverloadedError`.

    Routes list it before their caller, so that one stream too many is refused without waiting for a turn. Routes of
    events hold no stream for a caller that asks for a page instead.
    """
    if not hasattr(request.state, "caller"):
        await run_in_threadpool(get_caller, request, scopes, header)
    caller: Caller = request.state.caller
    streams: ConcurrencyLimiter = request.app.state.streams
    if request.scope["route"].path.endswith("/events") and not wants_events(request):
        yield
        return
    with streams.hold(caller.tenant, caller.name):
        yield


def wants_events(request: Request) -> bool:
    """Whether the caller accepts a stream of events."""
    return "text/event-stream" in request.headers.get("accept", "")


def authorization(request: Request) -> str | None:
    """The caller's `Authorization`, or that of the dashboard's session. Raises `UnauthenticatedError`."""
    header = request.headers.get("authorization")
    found = current_session(request) if header is None else None
    return header if found is None else found.authorization


def current_session(request: Request) -> Session | None:
    """Return the session of the request's cookie, looked up once. Raises `UnauthenticatedError` if it has ended."""
    cookie = request.cookies.get(SESSION_COOKIE)
    sessions: Sessions | None = request.app.state.sessions
    if not cookie or sessions is None:
        return None
    if not hasattr(request.state, "session"):
        request.state.session = sessions.find(cookie)
    session: Session = request.state.session
    return session


def _in_turn(kind: Kind) -> Callable[..., AsyncIterator[Caller]]:
    async def in_turn(request: Request, scopes: SecurityScopes, header: _Header) -> AsyncIterator[Caller]:
        turns: Turns = request.app.state.turns
        caller = await run_in_threadpool(get_caller, request, scopes, header)
        async with turns.turn(caller.tenant, kind):
            # A change is made even if its client does not wait for the answer.
            if kind != "changing" and await request.is_disconnected():
                raise ClientDisconnect
            yield caller

    return in_turn


def taking_turns(kind: Kind, *scopes: Scope) -> Security:
    """Require these scopes of the caller, and hold its tenant's turn until the route's function returns. The body is
    checked within the turn, and streams are sent after it. Raises as `get_caller`, and `OverloadedError`."""
    return Security(_in_turn(kind), scopes=list(scopes), scope="function")


Reader = Annotated[Caller, taking_turns("reading", Scope.JOBS_READ)]
Fetcher = Annotated[Caller, taking_turns("fetching", Scope.JOBS_READ)]
"""A `Reader` whose route asks a store or a cluster."""
Writer = Annotated[Caller, taking_turns("changing", Scope.JOBS_WRITE)]
Submitter = Annotated[Caller, taking_turns("submitting", Scope.JOBS_WRITE)]
"""A `Writer` of a job's spec, for which stores are asked."""
Deployer = Annotated[Caller, taking_turns("changing", Scope.DEPLOY)]
Uploader = Annotated[Caller, Security(get_caller, scopes=[Scope.JOBS_WRITE])]
"""A `Writer` of files. Uploads take long and have a limit of their own."""
Asker = Annotated[Caller, Security(get_caller, scopes=[Scope.GENERATE])]
"""A caller of a deployment, which limits its own requests."""
Streamed = Annotated[None, Depends(hold_stream)]
