"""Admission of callers at a replica: API keys and tokens, tenant, rate limits, hosts, origins and path normalization.
Knows no model."""

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
from swiftkv_platform.security.credentials import has_token
from swiftkv_platform.security.principals import Authenticator, Principal, Scope
from swiftkv_platform.web.limiters import Clock, Sender, TokenBucket
from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.origins import explain_foreign_host
from swiftkv_platform.web.problems import is_anthropic_path, respond_with_error

REPLICA_HEADER = "x-replica"
"""Header of every response: Serve's name of the replica that answered."""
IGNORED_FIELDS_HEADER = "x-swiftkv-ignored-fields"
"""Response header with the names, comma-separated, of request fields that were accepted without effect."""
API_KEY_HEADER = "x-api-key"
"""Header in which Anthropic's clients send the key, accepted on the routes of Anthropic's API."""


_MOST_QUOTAS = 10_000
"""Most callers whose quotas are kept; the least recent one is dropped."""
_SLASHES = re.compile("/{2,}")
_MODELS = "/v1/models"
_LIMITS = [f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")]


@dataclass(frozen=True)
class Caller:
    """Caller of a request, with the request's path and trace."""

    tenant: str = ""
    """Tenant of the key; empty if no key is needed."""
    name: str = ""
    """Name of the key; empty if no key is needed."""
    max_priority: int | None = None
    """Highest priority (lowest number) that the caller may ask for; None: any."""
    quota: Quota | None = None
    """Quota of the key; None: no limit."""
    path: str = ""
    """Path of the request."""
    traceparent: str | None = None
    """The caller's own trace context (https://www.w3.org/TR/trace-context/)."""
    address: str = ""
    """Address of the client, or of the proxy in front."""

    @property
    def sender(self) -> Sender:
        """By whom the replica is shared: the key, or without keys the client address."""
        return Sender(self.tenant, self.name or self.address)

    def check_priority(self, priority: int) -> None:
        """Raise `ForbiddenError` for a priority more urgent than the key allows."""
        if self.max_priority is not None and priority < self.max_priority:
            accepted = f"; lower goes first, and this key accepts {self.max_priority} and above"
            raise ForbiddenError.for_field("priority", priority, accepted)


def _credential(request: Request) -> str | None:
    """Return the request's `Authorization`, or the equivalent of the header that Anthropic's clients use instead."""
    credential, key = (request.headers.get(name) for name in ("authorization", API_KEY_HEADER))
    path = request.url.path
    if credential is None and key is not None and (is_anthropic_path(path) or _MODELS in path):
        return f"Bearer {key}"
    return credential


class Gate:
    """Admits callers by key or token; without an authenticator, every caller. `tenant`: the only tenant admitted; None:
    any."""

    def __init__(self, authenticator: Authenticator | None, tenant: str | None = None) -> None:
        self._authenticator = authenticator
        self._tenant = tenant
        # All keys of one caller share a quota, until their limits change.
        self._quota_of = lru_cache(_MOST_QUOTAS)(lambda _tenant, *limits: Quota(*limits))

    def _check_tenant(self, key: Principal) -> None:
        if self._tenant not in (None, key.tenant):
            raise ForbiddenError(
                f"key {key.name!r} belongs to tenant {key.tenant!r}, this deployment to another; ask one of your own",
                field="Authorization",
            )

    def check_sees(self, request: Request) -> None:
        """Raise `UnauthenticatedError` or `ForbiddenError` unless the caller may see what is served: it needs a key or
        token of the tenant, with any scope. Counts nothing. May block to fetch the keys of a token's issuer."""
        if self._authenticator is not None:
            self._check_tenant(self._authenticator.authenticate(_credential(request)))

    def admit(self, request: Request) -> Caller:
        """Authenticate a request and count it. Raises `UnauthenticatedError`, `ForbiddenError`, `RateLimitedError`."""
        path, traceparent = request.url.path, request.headers.get("traceparent")
        address = "" if request.client is None else request.client.host
        if self._authenticator is None:
            return Caller(path=path, traceparent=traceparent, address=address)
        key = self._authenticator.authenticate(_credential(request))
        key.require(Scope.GENERATE)
        self._check_tenant(key)
        limits = (key.requests_per_minute, key.tokens_per_minute)
        request.state.quota = quota = None if limits == (None, None) else self._quota_of(key.tenant, key.name, *limits)
        if quota is not None and request.method == "POST":
            quota.count_request()
        return Caller(key.tenant, key.name, key.max_priority, quota, path, traceparent, address)

    async def let_in(self, request: Request) -> Caller:
        """Call `admit`, in a thread if the issuer of a token may have to be asked. Raises as `admit`."""
        if self._authenticator is not None and has_token(_credential(request)):
            return await run_in_threadpool(self.admit, request)
        return self.admit(request)


class Door(Middleware):
    """Authenticates and counts POST requests before any of the body is read."""

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            request = Request(scope)
            gate: Gate = request.app.state.gate
            try:
                request.state.caller = await gate.let_in(request)
            except SwiftKVError as error:
                await respond_with_error(error, request.url.path)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostGuard(Middleware):
    """Refuses requests for unknown hosts, for replicas without keys: guards against DNS rebinding by web pages.
    `allowed`: hosts accepted in addition to addresses and local names."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        super().__init__(app)
        self._allowed = frozenset(host.lower() for host in allowed)

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        detail = explain_foreign_host(Headers(scope=scope), self._allowed, local_names=True)
        if detail is None:
            await self._app(scope, receive, send)
            return
        error = ForbiddenError(f"{detail}; a deployment without keys lists its names in allowed_hosts", field="Host")
        await respond_with_error(error, scope["path"])(scope, receive, send)


_Header = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
"""Declares the key in the OpenAPI document; the gate reads the header itself."""
HAS_API_KEY = Security(APIKeyHeader(name=API_KEY_HEADER, auto_error=False))
"""Declares Anthropic's key header in the OpenAPI document."""


async def get_caller(request: Request, _header: _Header) -> Caller:
    """Return the caller, admitted by `Door` for POST requests and here for others. Raises as `Gate.admit`."""
    known: Caller | None = getattr(request.state, "caller", None)
    gate: Gate = request.app.state.gate
    return known or await gate.let_in(request)


TheCaller = Annotated[Caller, Depends(get_caller)]


def check_viewer(request: Request, _header: _Header) -> None:
    """Call `Gate.check_sees`, and raise as it does."""
    gate: Gate = request.app.state.gate
    gate.check_sees(request)


def get_viewer(request: Request, header: _Header) -> bool:
    """Whether the caller may see what is served."""
    try:
        check_viewer(request, header)
    except (ForbiddenError, UnauthenticatedError):
        return False
    return True


Sees = Annotated[bool, Depends(get_viewer)]
MustSee = Annotated[None, Depends(check_viewer)]


class AnswerHeaders(Middleware):
    """Adds headers to responses: the replica's name, ignored fields, and a caller's remaining rate limits."""

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


class Origins(CORSMiddleware):
    """CORS for the deployment's allowed origins, without cookies. `allowed`: returns the current origins, `*` for all;
    with none, the middleware does nothing."""

    def __init__(self, app: ASGIApp, allowed: Callable[[], Collection[str]]) -> None:
        exposed = [REPLICA_HEADER, IGNORED_FIELDS_HEADER, "retry-after", *_LIMITS]
        methods = ["GET", "HEAD", "POST"]
        super().__init__(app, allow_methods=methods, allow_headers=["*"], expose_headers=exposed)
        self._allowed = allowed

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        await (super().__call__ if self._allowed() else self.app)(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        allowed = self._allowed()
        return origin in allowed or "*" in allowed


class Spelling(Middleware):
    """Treats `//models` and `/models/` as `/models`, and answers HEAD like GET without the body."""

    async def handle(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        changed: dict[str, Any] = {"path": _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"}
        if scope["method"] != "HEAD":
            await self._app({**scope, **changed}, receive, send)
            return

        async def head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, **changed, "method": "GET"}, receive, head)


class Quota:
    """Token buckets of one caller for requests and tokens per minute; without a bucket if the limit is None.

    A bucket holds one minute's worth and refills evenly. Each replica counts separately: a caller whose requests reach
    several replicas may use the limit at each of them.
    """

    def __init__(self, name: str, requests: int | None, tokens: int | None, clock: Clock = time.monotonic) -> None:
        self._name = name
        self._requests = None if requests is None else TokenBucket(requests, clock)
        self._tokens = None if tokens is None else TokenBucket(tokens, clock)

    def count_request(self) -> None:
        """Count a request. Raises `RateLimitedError` above the limit; refused requests are not counted."""
        if self._requests is not None:
            self._check(self._requests, 1, "requests")
            self._requests.consume(1)

    def reserve_tokens(self, amount: int) -> Reservation:
        """Reserve `amount` tokens, at most one minute's, for a new answer. Raises `RateLimitedError`."""
        if self._tokens is None:
            return Reservation()
        amount = min(amount, self._tokens.per_minute)
        self._check(self._tokens, amount, "tokens")
        self._tokens.consume(amount)
        return Reservation(self._tokens, amount)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit` headers."""
        headers = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(bucket.level), 0))
                headers[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def _check(self, bucket: TokenBucket, amount: int, what: str) -> None:
        wait = bucket.seconds_until(amount)
        if wait > 0.0:
            raise RateLimitedError(
                f"key {self._name!r} may use {bucket.per_minute} {what} a minute; try again in {wait:.1f} s",
                field="Authorization",
                retry_after_s=wait,
            )


class Reservation:
    """Tokens reserved for an answer until its actual use is known."""

    def __init__(self, bucket: TokenBucket | None = None, amount: int = 0) -> None:
        self._bucket = bucket
        self._amount = amount

    def settle(self, used: int) -> None:
        """Replace the reserved tokens by the `used` ones. Only the first call has an effect."""
        if self._bucket is not None:
            self._bucket.consume(used - self._amount)
            self._bucket = None
