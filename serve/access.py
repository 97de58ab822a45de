"""Middleware and dependencies of a replica for its callers: API keys and tokens, tenant, rate limits, hosts, CORS and
path normalization. Knows no model."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as ASGIScope

from swiftkv_platform.errors import ForbiddenError, RateLimitedError, SwiftKVError, UnauthenticatedError
from swiftkv_platform.security.keys import is_jwt_header
from swiftkv_platform.security.principals import Authenticator, Principal, Scope
from swiftkv_platform.web.limiters import Clock, Sender, TokenBucket
from swiftkv_platform.web.middleware import Middleware, explain_foreign_host
from swiftkv_platform.web.problems import is_anthropic_path, respond_with_error

REPLICA_HEADER = "x-replica"
"""Response header with Serve's name of the replica."""
IGNORED_FIELDS_HEADER = "x-swiftkv-ignored-fields"
"""Response header with the comma-separated names of request fields without effect."""
API_KEY_HEADER = "x-api-key"
"""Request header in which Anthropic's clients send the key, for the routes of Anthropic's API."""

_MAX_QUOTAS = 10_000
"""Max callers with a quota in memory; the least recent one is dropped."""
_REPEATED_SLASHES = re.compile("/{2,}")
_MODELS_PATH = "/v1/models"
_RATE_LIMIT_HEADERS = [
    f"x-ratelimit-{field}-{unit}" for field in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
]


@dataclass(frozen=True)
class Caller:
    """Caller of a request, with path and trace of the request."""

    tenant: str = ""
    """Tenant of the key; empty without keys."""
    name: str = ""
    """Name of the key; empty without keys."""
    max_priority: int | None = None
    """Most urgent allowed priority (lowest number); None: any."""
    quota: Quota | None = None
    """Quota of the key; None: no limit."""
    request_path: str = ""
    traceparent: str | None = None
    address: str = ""

    @property
    def sender(self) -> Sender:
        """The key, or without keys the client address."""
        return Sender(self.tenant, self.name or self.address)

    def check_priority(self, priority: int) -> None:
        """Raise `ForbiddenError` for a priority more urgent than the key allows."""
        if self.max_priority is not None and priority < self.max_priority:
            accepted = f"; the most urgent priority of this key is {self.max_priority} (lower is more urgent)"
            raise ForbiddenError.for_field("priority", priority, accepted)


def _get_credential(request: Request) -> str | None:
    """Return the request's `Authorization`, also for a key in `API_KEY_HEADER`."""
    credential, key = (request.headers.get(name) for name in ("authorization", API_KEY_HEADER))
    path = request.url.path
    if credential is None and key is not None and (is_anthropic_path(path) or _MODELS_PATH in path):
        return f"Bearer {key}"
    return credential


class RequestAuthenticator:
    """Admits callers by key or token, or all callers without an authenticator. `tenant`: the only admitted tenant;
    None: all."""

    def __init__(self, authenticator: Authenticator | None, tenant: str | None = None) -> None:
        self._authenticator = authenticator
        self._tenant = tenant
        # Keys with the same tenant, name and limits share a quota.
        self._get_quota = lru_cache(_MAX_QUOTAS)(lambda _tenant, *limits: Quota(*limits))

    def _check_tenant(self, key: Principal) -> None:
        if self._tenant not in (None, key.tenant):
            raise ForbiddenError(
                f"key {key.name!r} belongs to tenant {key.tenant!r}, but this deployment to another tenant; use a "
                f"deployment of {key.tenant!r}",
                field="Authorization",
            )

    def require_tenant_access(self, request: Request) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` unless the caller has a key or token of the tenant, with any
        scope. Counts no request. May block to fetch the keys of a token's issuer."""
        if self._authenticator is not None:
            self._check_tenant(self._authenticator.authenticate(_get_credential(request)))

    def admit(self, request: Request) -> Caller:
        """Authenticate and count a request. Raises `UnauthenticatedError`, `ForbiddenError`, `RateLimitedError`."""
        path, traceparent = request.url.path, request.headers.get("traceparent")
        address = "" if request.client is None else request.client.host
        if self._authenticator is None:
            return Caller(request_path=path, traceparent=traceparent, address=address)
        key = self._authenticator.authenticate(_get_credential(request))
        key.require_scope(Scope.GENERATE)
        self._check_tenant(key)
        limits = (key.requests_per_minute, key.tokens_per_minute)
        request.state.quota = quota = None if limits == (None, None) else self._get_quota(key.tenant, key.name, *limits)
        if quota is not None and request.method == "POST":
            quota.count_request()
        return Caller(key.tenant, key.name, key.max_priority, quota, path, traceparent, address)

    async def admit_async(self, request: Request) -> Caller:
        """Call `admit`; with a token in a thread, since `admit` may fetch the issuer's keys. Raises as `admit`."""
        if self._authenticator is not None and is_jwt_header(_get_credential(request)):
            return await run_in_threadpool(self.admit, request)
        return self.admit(request)


class AuthMiddleware(Middleware):
    """Authenticates and counts POST requests before their bodies are read."""

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            request = Request(scope)
            request_authenticator: RequestAuthenticator = request.app.state.request_authenticator
            try:
                request.state.caller = await request_authenticator.admit_async(request)
            except SwiftKVError as error:
                await respond_with_error(error, request.url.path)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AllowedHostsMiddleware(Middleware):
    """Refuses requests for unknown hosts at replicas without keys, against DNS rebinding by web pages. `allowed`:
    accepted hosts besides addresses and local names."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        super().__init__(app)
        self._allowed = frozenset(host.lower() for host in allowed)

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        detail = explain_foreign_host(Headers(scope=scope), self._allowed, local_names=True)
        if detail is None:
            await self._app(scope, receive, send)
            return
        error = ForbiddenError(f"{detail}. Add the host to the deployment's allowed_hosts", field="Host")
        await respond_with_error(error, scope["path"])(scope, receive, send)


_Header = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
"""Declares the key in the OpenAPI document; `RequestAuthenticator` reads the header."""
HAS_API_KEY = Security(APIKeyHeader(name=API_KEY_HEADER, auto_error=False))


async def get_caller(request: Request, _header: _Header) -> Caller:
    """Return the caller, whom `AuthMiddleware` has admitted for POST. Raises as `RequestAuthenticator.admit`."""
    caller: Caller | None = getattr(request.state, "caller", None)
    request_authenticator: RequestAuthenticator = request.app.state.request_authenticator
    return caller or await request_authenticator.admit_async(request)


AdmittedCaller = Annotated[Caller, Depends(get_caller)]


def require_tenant_access(request: Request, _header: _Header) -> None:
    """Raise as `RequestAuthenticator.require_tenant_access`."""
    request_authenticator: RequestAuthenticator = request.app.state.request_authenticator
    request_authenticator.require_tenant_access(request)


def has_tenant_access(request: Request, header: _Header) -> bool:
    try:
        require_tenant_access(request, header)
    except (ForbiddenError, UnauthenticatedError):
        return False
    return True


HasTenantAccess = Annotated[bool, Depends(has_tenant_access)]
TenantAccessRequired = Annotated[None, Depends(require_tenant_access)]


class ResponseHeadersMiddleware(Middleware):
    """Adds response headers: the replica's name, ignored fields, and the caller's remaining rate limits."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        super().__init__(app)
        self._replica = replica

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA_HEADER] = self._replica
                state = scope.get("state", {})
                ignored_fields: tuple[str, ...] = state.get("ignored_fields", ())
                if ignored_fields:
                    headers[IGNORED_FIELDS_HEADER] = ", ".join(ignored_fields)
                quota: Quota | None = state.get("quota")
                if quota is not None:
                    headers.update(quota.make_rate_limit_headers())
            await send(message)

        await self._app(scope, receive, send_with_headers)


class DeploymentCORS(CORSMiddleware):
    """CORS without cookies. `get_allowed`: returns the currently allowed origins, `*` for all; with none, the
    middleware does nothing."""

    def __init__(self, app: ASGIApp, get_allowed: Callable[[], Collection[str]]) -> None:
        exposed = [REPLICA_HEADER, IGNORED_FIELDS_HEADER, "retry-after", *_RATE_LIMIT_HEADERS]
        methods = ["GET", "HEAD", "POST"]
        super().__init__(app, allow_methods=methods, allow_headers=["*"], expose_headers=exposed)
        self._get_allowed = get_allowed

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        await (super().__call__ if self._get_allowed() else self.app)(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        allowed = self._get_allowed()
        return origin in allowed or "*" in allowed


class PathNormalizerMiddleware(Middleware):
    """Treats `//models` and `/models/` as `/models`, and HEAD as GET without the response's body."""

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        changed: dict[str, Any] = {"path": _REPEATED_SLASHES.sub("/", scope["path"]).rstrip("/") or "/"}
        if scope["method"] != "HEAD":
            await self._app({**scope, **changed}, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, **changed, "method": "GET"}, receive, send_without_body)


class Quota:
    """Limits one caller's requests and tokens per minute; None: no limit. Each replica counts separately."""

    def __init__(self, name: str, requests: int | None, tokens: int | None, clock: Clock = time.monotonic) -> None:
        self._name = name
        self._requests = None if requests is None else TokenBucket(requests, clock)
        self._tokens = None if tokens is None else TokenBucket(tokens, clock)

    def count_request(self) -> None:
        """Count a request. Raises `RateLimitedError` above the limit, without counting the request."""
        if self._requests is not None:
            self._require_available(self._requests, 1, "requests")
            self._requests.consume(1)

    def reserve_tokens(self, amount: int) -> TokenReservation:
        """Reserve `amount` tokens for a request, at most one minute's limit. Raises `RateLimitedError`."""
        if self._tokens is None:
            return TokenReservation()
        amount = min(amount, self._tokens.per_minute)
        self._require_available(self._tokens, amount, "tokens")
        self._tokens.consume(amount)
        return TokenReservation(self._tokens, amount)

    def make_rate_limit_headers(self) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit` headers."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(bucket.level), 0))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def _require_available(self, bucket: TokenBucket, amount: int, unit: str) -> None:
        wait = bucket.seconds_until(amount)
        if wait > 0.0:
            raise RateLimitedError(
                f"the limit of key {self._name!r} is {bucket.per_minute} {unit} per minute; try again in {wait:.1f} s",
                field="Authorization",
                retry_after_s=wait,
            )


class TokenReservation:
    """Tokens reserved for a request until it ends."""

    def __init__(self, bucket: TokenBucket | None = None, amount: int = 0) -> None:
        self._bucket = bucket
        self._amount = amount

    def settle(self, used: int) -> None:
        """Replace the reserved tokens by the `used` ones. Later calls have no effect."""
        if self._bucket is not None:
            self._bucket.consume(used - self._amount)
            self._bucket = None
