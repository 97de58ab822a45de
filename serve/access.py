"""Callers of a replica: the tenant of an API key, where the deployment has keys. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as ASGIScope

from serve.quotas import Quota, Quotas
from swiftkv_platform.errors import ForbiddenError
from swiftkv_platform.keys import KeyRing, Scope

REPLICA_HEADER = "x-replica"
"""Header of every answer: Serve's name of the replica that gave it."""


@dataclass(frozen=True)
class Caller:
    """Caller of a request, and its circumstances."""

    tenant: str = ""
    """Tenant of the key; empty where none is needed."""
    quota: Quota | None = None
    """Quota of the key; None: no limit."""
    path: str = ""
    """The route that was asked."""
    traceparent: str | None = None
    """The caller's own trace (https://www.w3.org/TR/trace-context/)."""


class Gate:
    """Admits callers with a key for it; with no key ring, every caller.

    Args:
        tenant: whose keys alone are let in; None: any.
    """

    def __init__(self, key_ring: KeyRing | None, tenant: str | None = None) -> None:
        self._key_ring = key_ring
        self._tenant = tenant
        self._quotas = Quotas()

    def admit(self, request: Request) -> Caller:
        """Raises `UnauthenticatedError`, `ForbiddenError` and `RateLimitedError`."""
        path, traceparent = request.url.path, request.headers.get("traceparent")
        if self._key_ring is None:
            return Caller(path=path, traceparent=traceparent)
        key = self._key_ring.authenticate(request.headers.get("authorization"))
        key.require(Scope.GENERATE)
        if self._tenant not in (None, key.tenant):
            raise ForbiddenError(
                f"key {key.name!r} is of tenant {key.tenant!r}, and this deployment of another; ask one of your own",
                field="Authorization",
            )
        request.state.quota = quota = self._quotas.of(key)
        if quota is not None and request.method == "POST":
            quota.count_request()
        return Caller(key.tenant, quota, path, traceparent)


async def get_caller(
    request: Request, _header: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> Caller:
    """The caller. Raises as `Gate.admit`."""
    gate: Gate = request.app.state.gate
    return gate.admit(request)


TheCaller = Annotated[Caller, Depends(get_caller)]


class AnswerHeaders:
    """Middleware that adds the replica's name to answers, and for a caller with limits what is left of them."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA_HEADER] = self._replica
                quota: Quota | None = scope.get("state", {}).get("quota")
                if quota is not None:
                    headers.update(quota.headers())
            await send(message)

        await self._app(scope, receive, tell)
