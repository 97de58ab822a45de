"""ASGI middleware of the control plane and the replicas: security headers, request times, body limits, delays of error
responses, and checks of origins, paths, queries and headers. Knows no route."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from urllib.parse import SplitResult, parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.errors import InvalidInputError, RateLimitedError
from swiftkv_platform.web.limiters import RateLimiter
from swiftkv_platform.web.problems import make_problem, respond_with_problem
from swiftkv_platform.web.safe_json import MAX_KEY_LENGTH, check_text, format_path

RESPONSE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of responses other than pages: browsers do not execute, store or frame them, or guess their type."""
PAGE_HEADERS: Mapping[str, str] = {
    **RESPONSE_HEADERS,
    # Only this origin may be loaded from, connected to or sent forms; libraries need inline styles and icons as data
    # URLs.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


class Middleware:
    """ASGI middleware; subclasses override `handle` for HTTP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.handle(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class SecurityHeaders(Middleware):
    """Adds `RESPONSE_HEADERS` unless a response sets them, and over TLS `Strict-Transport-Security`."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            await send(message)

        await self._app(scope, receive, send_with_headers)


_KNOWN_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class RequestTimer(Middleware):
    """Measures the time from each request to the start of its response, since a stream may last hours. `on_response`:
    called with (method, route template or `unmatched`, status, seconds)."""

    def __init__(self, app: ASGIApp, *, on_response: Callable[[str, str, int, float], None]) -> None:
        super().__init__(app)
        self._on_response = on_response

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at, is_reported = time.perf_counter(), False

        def report(status: int) -> None:
            nonlocal is_reported
            is_reported = True
            method = scope["method"] if scope["method"] in _KNOWN_METHODS else "other"
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._on_response(method, route, status, time.perf_counter() - started_at)

        async def send_and_report(message: Message) -> None:
            if message["type"] == "http.response.start":
                report(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_report)
        except Exception:
            if not is_reported:  # the 500 response is made by an outer layer
                report(500)
            raise


REFUSAL_DELAY_S = 0.1
MAX_REFUSAL_DELAY_S = 2.0
LARGE_BODY_BYTES = 1 << 16

_DELAYED_IF_LARGE = frozenset({401, 403, 422})
"""Statuses whose responses are delayed if the request's body is large, since its rest is still received."""


class RefusalBackoff(Middleware):
    """Delays error responses of a caller, so that immediate retries over many connections do not slow down others.

    The delay is `REFUSAL_DELAY_S` per delayed response of the same caller, up to `MAX_REFUSAL_DELAY_S`.

    Args:
        statuses: delayed statuses; `_DELAYED_IF_LARGE` are delayed for large bodies too.
        undelayed_per_minute: error responses per caller that are not delayed, for routers that then try another server;
            a thirtieth of them may come at once.
    """

    def __init__(self, app: ASGIApp, *, statuses: Collection[int], undelayed_per_minute: int = 0) -> None:
        super().__init__(app)
        self._statuses = statuses
        self._undelayed = (
            RateLimiter(undelayed_per_minute, time.monotonic, burst=undelayed_per_minute // 30)
            if undelayed_per_minute
            else None
        )
        self._waiting: Counter[tuple[str, str]] = Counter()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_delayed(message: Message) -> None:
            if message["type"] == "http.response.start" and (
                message["status"] in self._statuses
                or (message["status"] in _DELAYED_IF_LARGE and _has_large_body(scope))
            ):
                await self._delay(scope)
            await send(message)

        await self._app(scope, receive, send_delayed)

    async def _delay(self, scope: Scope) -> None:
        host, _ = scope.get("client") or ("", 0)
        caller = host, Headers(scope=scope).get("authorization", "")
        if self._is_undelayed(" ".join(caller)):
            return
        self._waiting[caller] += 1
        try:
            await asyncio.sleep(min(REFUSAL_DELAY_S * self._waiting[caller], MAX_REFUSAL_DELAY_S))
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

    def _is_undelayed(self, caller: str) -> bool:
        if self._undelayed is None:
            return False
        try:
            self._undelayed.count_request(caller)
        except RateLimitedError:
            return False
        return True


def _has_large_body(scope: Scope) -> bool:
    """Whether a body is large or of unknown size."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or get_content_length(headers) > LARGE_BODY_BYTES


def is_probe(scope: Scope) -> bool:
    """Whether a request is a probe of `/health`."""
    return scope["method"] in ("GET", "HEAD") and scope["path"].rstrip("/").endswith("/health")


class BodyLimit(Middleware):
    """Refuses bodies that are larger than `max_bytes(path)`: with 413 by `Content-Length`, or by an `HTTPException`
    while the body is read."""

    def __init__(self, app: ASGIApp, *, max_bytes: Callable[[str], int]) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        max_bytes = self._max_bytes(scope["path"])
        detail = f"the body has more than {max_bytes} bytes, which is the limit"
        if get_content_length(Headers(scope=scope)) > max_bytes:
            problem = make_problem(scope["path"], 413, "request_entity_too_large", detail)
            await respond_with_problem(problem)(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise HTTPException(413, detail)
            return message

        await self._app(scope, receive_counted, send)


def get_content_length(headers: Headers) -> int:
    """Return the value of `Content-Length`, at most `sys.maxsize`; 0 if it is missing or not a number."""
    value = headers.get("content-length", "")
    digits = value.lstrip("0") if value.isascii() and value.isdecimal() else ""
    return min(int(digits[:20] or 0), sys.maxsize)  # `int` refuses thousands of digits


MAX_QUERY_VALUE_LENGTH = 2048
MAX_QUERY_PARAMETERS = 256


class InputGuard(Middleware):
    """Refuses paths, queries and headers that no route can use, with the application's response to an
    `InvalidInputError`, and compressed bodies with its response to 415. `web.bodies` checks bodies."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_path(scope)
            _check_query(scope)
            _check_headers(scope)
            _check_encoding(Headers(scope=scope))
        except (InvalidInputError, HTTPException) as error:
            await (await _handle_error(scope, error))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _check_path(scope: Scope) -> None:
    if "\0" in scope["path"]:
        raise InvalidInputError("the path has a NUL character; leave it out", field="path")


def _check_headers(scope: Scope) -> None:
    for name, value in scope["headers"]:
        if b"\0" in value:
            header = name.decode("latin-1")
            raise InvalidInputError(f"the header {header} has a NUL character; leave it out", field=header)


def _check_encoding(headers: Headers) -> None:
    """Raise `HTTPException` (415) for a compressed body, which may be far larger than its size says."""
    encodings = [each.strip() for value in headers.getlist("content-encoding") for each in value.split(",")]
    used = ", ".join(each for each in encodings if each.lower() not in ("", "identity"))
    if used and ("transfer-encoding" in headers or get_content_length(headers)):
        detail = f"content-encoding is {used[:MAX_KEY_LENGTH]!r}; send the body uncompressed, without content-encoding"
        raise HTTPException(415, detail, headers={"Accept-Encoding": "identity"})


def _check_query(scope: Scope) -> None:
    # Bytes that are not UTF-8 become surrogates, which are refused like those of a body.
    query = scope.get("query_string", b"").decode("latin-1")
    if query.count("&") >= MAX_QUERY_PARAMETERS:
        message = f"the query has more than {MAX_QUERY_PARAMETERS} parameters, which is the limit"
        raise InvalidInputError(message, field="query")
    for name, value in parse_qsl(query, keep_blank_values=True, errors="surrogateescape"):
        for text, max_length in ((name, MAX_KEY_LENGTH), (value, MAX_QUERY_VALUE_LENGTH)):
            check_text(text, (name,))
            if len(text) > max_length:
                field = format_path((name,))
                message = f"the query parameter {field} has {len(text)} characters; the limit is {max_length}"
                raise InvalidInputError(message, field=field)


async def _handle_error(scope: Scope, error: Exception) -> ASGIApp:
    """Return the response of the application's exception handler, which does not see errors raised in middleware."""
    handlers = scope["app"].exception_handlers
    handler = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    response = handler(Request(scope), error)
    asgi_response: ASGIApp = await response if inspect.isawaitable(response) else response
    return asgi_response


_SAME_ORIGIN_SITES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for a page of this server, and for a user's own navigation."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_SHOWN_LENGTH = 100
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Suffixes of local names; no public page has one."""


def explain_foreign_page(headers: Headers, scheme: str) -> str | None:
    """Return the reason why a request comes from another server's page; None if it does not. `scheme`: the request's;
    `http` behind an untrusted proxy, even for https pages."""
    for site in headers.getlist("sec-fetch-site"):
        if site not in _SAME_ORIGIN_SITES:
            return f"Sec-Fetch-Site is {_quote_value(site)}; only this server's own web pages may send requests"
    for origin in headers.getlist("origin"):
        page, own = _parse_origin(origin), _parse_origin(f"{scheme}://{headers.get('host', '')}")
        if page is None or own is None or not _is_same_origin(page, own):
            host = _quote_value(headers.get("host", ""))
            return (
                f"Origin is {_quote_value(origin)}, and Host {host}; only this server's own pages may send requests. "
                "A proxy in front must forward Host"
            )
    return None


def explain_foreign_host(headers: Headers, allowed: Collection[str], *, local_names: bool = False) -> str | None:
    """Return the reason to refuse `Host`; None if it is accepted. Guards against DNS rebinding, in which a page's host
    name resolves to this server.

    Args:
        allowed: hosts without ports, in lower case.
        local_names: also accept addresses and local names (`name`, `name.svc`, `name.local`).
    """
    host = headers.get("host", "")
    parts = _parse_origin(f"http://{host}")
    name = "" if parts is None else (parts.hostname or "").rstrip(".")
    if name in allowed or (local_names and is_local_name(name)):
        return None
    accepted = [*sorted(allowed), *(["addresses and local names"] if local_names else [])]
    return f"Host is {_quote_value(host)}; accepted: {', '.join(accepted)}"


def is_local_name(name: str) -> bool:
    """Whether a host is an IP address, or a name without a dot or with a local suffix."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "" and ("." not in name or name.endswith(_LOCAL_SUFFIXES))
    return True


def _parse_origin(origin: str) -> SplitResult | None:
    try:
        parts = urlsplit(origin)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return None
    return parts


def _is_same_origin(page: SplitResult, own: SplitResult) -> bool:
    return bool(page.hostname) and _get_address(page) in (_get_address(own), _get_address(own._replace(scheme="https")))


def _get_address(origin: SplitResult) -> tuple[str, str | None, int | None]:
    return origin.scheme, origin.hostname, origin.port or _DEFAULT_PORTS.get(origin.scheme)


def _quote_value(value: str) -> str:
    return ascii(value[:_MAX_SHOWN_LENGTH])


_JSON_TYPE = "application/json"
_FORM_TYPE = "multipart/form-data"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


# Guards against requests from pages of other sites.
#
# Without API keys, any web page that a user of this machine opens could submit a job, directly or by rebinding its own
# host name to the loopback address. So the Host header must name this server, a browser's Origin must be this server,
# and a body must be JSON, which a page cannot send to another origin without a preflight request. File uploads are
# forms, which a page can send; for those, the browser must not report another site as the sender (`Sec-Fetch-Site`).
#
# With keys, a browser sends its session in a cookie, which a page of a sibling origin can make it send as well. So a
# request that changes something and has no `Authorization` of its own must come from this server's pages. Programs are
# unaffected.


class SessionOriginGuard(Middleware):
    """Refuses requests that a page of another site sends with the session's cookie."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # Signing in needs no key yet; another site's page must not sign a browser in either.
        asks = scope["method"] not in _SAFE_METHODS and "authorization" not in headers
        detail = explain_foreign_page(headers, scope["scheme"]) if asks else None
        await (self._app if detail is None else _respond_forbidden(scope, detail))(scope, receive, send)


class OriginGuard(Middleware):
    """Refuses requests to unknown host names, and requests from pages of other sites. `forms`: paths whose body is a
    form."""

    def __init__(self, app: ASGIApp, allowed_hosts: tuple[str, ...], forms: Collection[str] = ()) -> None:
        super().__init__(app)
        self._forms = frozenset(forms)
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._check_request(scope) or self._app)(scope, receive, send)

    def _check_request(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        detail = explain_foreign_host(headers, self._allowed_hosts)
        if detail is not None:
            return _respond_forbidden(scope, detail, "host_not_allowed")
        asks = scope["method"] not in _SAFE_METHODS or "origin" in headers  # a link on another site may lead here
        detail = explain_foreign_page(headers, scope["scheme"]) if asks else None
        if detail is not None:
            return _respond_forbidden(scope, detail)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        wanted = _FORM_TYPE if path in self._forms else _JSON_TYPE
        if has_body and kind != wanted:
            detail = f"Content-Type is {kind or 'missing'!r}; only {wanted} is accepted"
            return respond_with_problem(make_problem(path, 415, "content_type_not_allowed", detail))
        return None


def _respond_forbidden(scope: Scope, detail: str, code: str = "origin_not_allowed") -> Response:
    return respond_with_problem(make_problem(scope["path"], 403, code, detail))
