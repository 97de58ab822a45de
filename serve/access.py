"""Callers of a replica: the tenant of an API key, where the deployment has keys. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as ASGIScope

from swiftkv_platform.errors import ForbiddenError, SwiftKVError, UnauthenticatedError
from swiftkv_platform.security.credentials import shows_token
from swiftkv_platform.security.principals import Authenticator, Principal, Scope
from swiftkv_platform.serve.quotas import Quota, Quotas
from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.origins import foreign_host

REPLICA_HEADER = "x-replica"
"""Header of every answer: Serve's name of the replica that gave it."""
IGNORED_FIELDS_HEADER = "x-swiftkv-ignored-fields"
"""Header of an answer to a body with fields that were accepted without effect: their names, comma-separated."""


@dataclass(frozen=True)
class Caller:
    """Caller of a request, and its circumstances."""

    tenant: str = ""
    """Tenant of the key; empty where no key is needed."""
    name: str = ""
    """Name of the key, likewise."""
    max_priority: int | None = None
    """Highest priority, the lowest number, that it may ask for; None: any."""
    quota: Quota | None = None
    """Quota of the key; None: no limit."""
    path: str = ""
    """The route that was asked."""
    traceparent: str | None = None
    """The caller's own trace (https://www.w3.org/TR/trace-context/)."""

    def check_priority(self, priority: int) -> None:
        """Raises `ForbiddenError` for one that goes before what the key allows."""
        if self.max_priority is not None and priority < self.max_priority:
            raise ForbiddenError(
                f"priority is {priority}; lower goes first, and this key accepts {self.max_priority} and above",
                field="priority",
                value=priority,
            )


class Gate:
    """Admits callers with a key or token for it; with no authenticator, every caller. `tenant`: whose keys alone are
    let in; None: any."""

    def __init__(self, authenticator: Authenticator | None, tenant: str | None = None) -> None:
        self._authenticator = authenticator
        self._tenant = tenant
        self._quotas = Quotas()

    @property
    def is_open(self) -> bool:
        """Whether every caller is let in."""
        return self._authenticator is None

    def _check_tenant(self, key: Principal) -> None:
        if self._tenant not in (None, key.tenant):
            raise ForbiddenError(
                f"key {key.name!r} is of tenant {key.tenant!r}, and this deployment of another; ask one of your own",
                field="Authorization",
            )

    def check_sees(self, request: Request) -> None:
        """Return if the caller may see what is served: it is of the tenant, with any scope. Counts nothing, and blocks
        where the issuer of a token has to be asked. Raises `UnauthenticatedError` and `ForbiddenError`."""
        if self._authenticator is not None:
            self._check_tenant(self._authenticator.authenticate(request.headers.get("authorization")))

    def admit(self, request: Request) -> Caller:
        """Raises `UnauthenticatedError`, `ForbiddenError` and `RateLimitedError`."""
        path, traceparent = request.url.path, request.headers.get("traceparent")
        if self._authenticator is None:
            return Caller(path=path, traceparent=traceparent)
        key = self._authenticator.authenticate(request.headers.get("authorization"))
        key.require(Scope.GENERATE)
        self._check_tenant(key)
        request.state.quota = quota = self._quotas.of(key)
        if quota is not None and request.method == "POST":
            quota.count_request()
        return Caller(key.tenant, key.name, key.max_priority, quota, path, traceparent)

    async def let_in(self, request: Request) -> Caller:
        """`admit`, beside the event loop where the issuer of a token may have to be asked. Raises as it does."""
        if self._authenticator is not None and shows_token(request.headers.get("authorization")):
            return await run_in_threadpool(self.admit, request)
        return self.admit(request)


class Door(Middleware):
    """Lets in who may, and counts the request, before a byte of its body is read. `refuse`: (error, path) -> the answer
    to who may not."""

    def __init__(self, app: ASGIApp, gate: Gate, refuse: Callable[[SwiftKVError, str], ASGIApp]) -> None:
        super().__init__(app)
        self._gate = gate
        self._refuse = refuse

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            request = Request(scope)
            try:
                request.state.caller = await self._gate.let_in(request)
            except SwiftKVError as error:
                await self._refuse(error, request.url.path)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostGuard(Middleware):
    """Refuses requests to another host, where no key keeps pages out that rebind a name of theirs to this address.
    `allowed`: hosts beside addresses and local names."""

    def __init__(self, app: ASGIApp, allowed: Collection[str], refuse: Callable[[SwiftKVError, str], ASGIApp]) -> None:
        super().__init__(app)
        self._allowed = frozenset(host.lower() for host in allowed)
        self._refuse = refuse

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        detail = foreign_host(Headers(scope=scope), self._allowed, local_names=True)
        if detail is None:
            await self._app(scope, receive, send)
            return
        error = ForbiddenError(f"{detail}; names of a deployment without keys are in allowed_hosts", field="Host")
        await self._refuse(error, scope["path"])(scope, receive, send)


async def get_caller(
    request: Request, _header: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> Caller:
    """The caller: whom the door let in, or, of what has no body, who is at the gate. Raises as `Gate.admit`."""
    known: Caller | None = getattr(request.state, "caller", None)
    gate: Gate = request.app.state.gate
    return known or await gate.let_in(request)


TheCaller = Annotated[Caller, Depends(get_caller)]


def get_viewer(
    request: Request, _header: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> bool:
    """Whether the caller may see what is served. Raises nothing."""
    gate: Gate = request.app.state.gate
    try:
        gate.check_sees(request)
    except (ForbiddenError, UnauthenticatedError):
        return False
    return True


def check_viewer(
    request: Request, _header: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> None:
    """Raises as `Gate.check_sees`."""
    gate: Gate = request.app.state.gate
    gate.check_sees(request)


Sees = Annotated[bool, Depends(get_viewer)]
MustSee = Annotated[None, Depends(check_viewer)]


class AnswerHeaders(Middleware):
    """Adds the replica's name to answers, the fields without effect, and for a caller with limits what is left of
    them."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        super().__init__(app)
        self._replica = replica

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA_HEADER] = self._replica
                state = scope.get("state", {})
                ignored_fields: tuple[str, ...] = state.get("ignored_fields", ())
                if ignored_fields:
                    headers[IGNORED_FIELDS_HEADER] = ", ".join(ignored_fields)
                quota: Quota | None = state.get("quota")
                if quota is not None:
                    headers.update(quota.headers())
            await send(message)

        await self._app(scope, receive, tell)
