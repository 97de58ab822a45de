"""Authentication of callers, checks of their scopes, and limits on their streams and concurrent requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Depends, Request
from fastapi.params import Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from swiftkv_platform.control_plane.access.audit import get_request_audit
from swiftkv_platform.control_plane.access.sessions import Session, Sessions
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Authenticator, Principal, Scope
from swiftkv_platform.web.limiters import ConcurrencyLimiter, RequestKind, Sender, TenantConcurrencyLimiter

SESSION_COOKIE = "swiftkv_session"
"""Cookie with the id of the dashboard's session. Browsers do not send it with requests of other sites
(`SameSite=Strict`)."""


_LOCAL_CALLER = Caller(tenant="default", name="local")
"""Caller of every request if no API keys are configured."""


_WRITE_SCOPES = frozenset({Scope.JOBS_WRITE, Scope.DEPLOY})
"""Scopes of routes that change something."""


SIGN_IN_PATH = "/session"
_AuthorizationHeader = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
"""Shows a padlock in the API's documentation; `get_authorization` reads the header itself."""


def authenticate_request(request: Request) -> Principal | None:
    """Authenticate the caller, and count the request once. Returns None if no API keys are configured.

    Raises `UnauthenticatedError` and `RateLimitedError`.
    """
    authenticator: Authenticator | None = request.app.state.authenticator
    record = get_request_audit(request)
    if authenticator is None:
        record.set_caller(request, None, name=_LOCAL_CALLER.name, tenant=_LOCAL_CALLER.tenant)
        return None
    if not hasattr(request.state, "principal"):
        key = request.state.principal = authenticator.authenticate(get_authorization(request))
        record.set_caller(request, key, name=key.name, tenant=key.tenant)
        request.app.state.rate_limit.count_request(key.name)
        request.app.state.key_uses.record(key)
    principal: Principal = request.state.principal
    return principal


async def admit_request(request: Request) -> Sender:
    """Authenticate a request before its body is read. Raises as `authenticate_request`, and `RateLimitedError` for
    too many sign-ins."""
    if request.url.path == SIGN_IN_PATH:
        address = request.client.host if request.client else "unknown"
        if request.app.state.authenticator is not None:
            request.app.state.sign_ins.count_request(address)
        return Sender("", address)
    key = await run_in_threadpool(authenticate_request, request)
    caller = _LOCAL_CALLER if key is None else Caller(key.tenant, key.name)
    return Sender(caller.tenant, caller.name)


def get_caller(request: Request, scopes: SecurityScopes, _header: _AuthorizationHeader) -> Caller:
    """Return the caller if it has the scopes. Raises `UnauthenticatedError`, `RateLimitedError` and
    `ForbiddenError`."""
    key = authenticate_request(request)
    if key is not None:
        for scope in scopes.scopes:
            key.require_scope(Scope(scope))
        if request.method not in ("GET", "HEAD"):
            get_logger().info("audit", tenant=key.tenant, key=key.name, method=request.method, path=request.url.path)
    get_request_audit(request).start_storing(is_read_only=_WRITE_SCOPES.isdisjoint(map(Scope, scopes.scopes)))
    caller = request.state.caller = _LOCAL_CALLER if key is None else Caller(tenant=key.tenant, name=key.name)
    return caller


def require_scope(request: Request, scope: Scope) -> None:
    """Require a further scope of an admitted caller. Raises `ForbiddenError`."""
    principal = authenticate_request(request)
    if principal is not None:
        principal.require_scope(scope)


async def hold_stream_slot(
    request: Request, scopes: SecurityScopes, header: _AuthorizationHeader
) -> AsyncIterator[None]:
    """Hold one of the caller's stream slots until the response is sent. Raises as `get_caller`, and `OverloadedError`.

    Routes list it before their caller, so that an excess stream is refused without waiting in the tenant's queue. An
    events route counts no stream if the caller accepts only JSON.
    """
    if not hasattr(request.state, "caller"):
        await run_in_threadpool(get_caller, request, scopes, header)
    caller: Caller = request.state.caller
    streams: ConcurrencyLimiter = request.app.state.streams
    if request.scope["route"].path.endswith("/events") and not accepts_event_stream(request):
        yield
        return
    with streams.hold(caller.tenant, caller.name):
        yield


def accepts_event_stream(request: Request) -> bool:
    """Whether the caller accepts a stream of events."""
    return "text/event-stream" in request.headers.get("accept", "")


def get_authorization(request: Request) -> str | None:
    """Return the `Authorization` header, or that of the dashboard's session. Raises `UnauthenticatedError`."""
    header = request.headers.get("authorization")
    found = get_session(request) if header is None else None
    return header if found is None else found.authorization


def get_session(request: Request) -> Session | None:
    """Return the session of the request's cookie, which is looked up once. Raises `UnauthenticatedError` if it has
    expired."""
    cookie = request.cookies.get(SESSION_COOKIE)
    sessions: Sessions | None = request.app.state.sessions
    if not cookie or sessions is None:
        return None
    if not hasattr(request.state, "session"):
        request.state.session = sessions.get(cookie)
    session: Session = request.state.session
    return session


def _make_caller_dependency(kind: RequestKind) -> Callable[..., AsyncIterator[Caller]]:
    async def hold_slot(
        request: Request, scopes: SecurityScopes, header: _AuthorizationHeader
    ) -> AsyncIterator[Caller]:
        limiter: TenantConcurrencyLimiter = request.app.state.concurrency_limiter
        caller = await run_in_threadpool(get_caller, request, scopes, header)
        async with limiter.acquire(caller.tenant, kind):
            # A change is made even if its client does not wait for the answer.
            if kind != "changing" and await request.is_disconnected():
                raise ClientDisconnect
            yield caller

    return hold_slot


def require_caller(kind: RequestKind, *scopes: Scope) -> Security:
    """Require scopes of the caller, and count the request among its tenant's concurrent requests of this kind until
    the route's function returns. Validation of the body is included, streaming is not. Raises as `get_caller`, and
    `OverloadedError`."""
    return Security(_make_caller_dependency(kind), scopes=list(scopes), scope="function")


ReadingCaller = Annotated[Caller, require_caller("reading", Scope.JOBS_READ)]
FetchingCaller = Annotated[Caller, require_caller("fetching", Scope.JOBS_READ)]
"""A `ReadingCaller` whose route calls an object store or a cluster."""
WritingCaller = Annotated[Caller, require_caller("changing", Scope.JOBS_WRITE)]
SubmittingCaller = Annotated[Caller, require_caller("submitting", Scope.JOBS_WRITE)]
"""A `WritingCaller` of a job's spec; validation calls object stores."""
DeployingCaller = Annotated[Caller, require_caller("changing", Scope.DEPLOY)]
UploadingCaller = Annotated[Caller, Security(get_caller, scopes=[Scope.JOBS_WRITE])]
"""A `WritingCaller` of files. Uploads take long, so `TheUploadParsers` limits them instead."""
InferenceCaller = Annotated[Caller, Security(get_caller, scopes=[Scope.GENERATE])]
"""A caller of a deployment. The deployment limits its requests, not the control plane."""
StreamSlot = Annotated[None, Depends(hold_stream_slot)]
