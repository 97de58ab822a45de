"""ASGI middleware shared by the control plane and the replicas: headers, times, sizes and delays of answers, and
refusals of hostile queries, paths and headers. Knows no route."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.errors import InvalidInputError, RateLimitedError
from swiftkv_platform.web.hostile_json import MAX_KEY_LENGTH, check_text, dotted
from swiftkv_platform.web.places import RateLimit
from swiftkv_platform.web.problems import error_response, make_problem

ANSWER_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of answers that are no pages: browsers run nothing of them, and keep, frame and guess nothing."""
PAGE_HEADERS: Mapping[str, str] = {
    **ANSWER_HEADERS,
    # Only this origin may be loaded from, connected to or sent forms; libraries need inline styles and icons as data
    # URLs.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
"""Headers of pages for browsers."""


class PageFiles(StaticFiles):
    """Static files of pages, sent with `PAGE_HEADERS`."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


class Middleware:
    """ASGI application around another one; subclasses answer HTTP requests in `handle`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.handle(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        raise NotImplementedError


class SecurityHeaders(Middleware):
    """Adds `ANSWER_HEADERS` to answers that do not have them, and over TLS the order to stay with it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ANSWER_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            await send(message)

        await self._app(scope, receive, with_headers)


_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class RequestTimes(Middleware):
    """Measures the time from each request to the start of its response, since a stream may last hours. `answered`:
    called with (method, route template, status, seconds); the template is `unmatched` if no route answers."""

    def __init__(self, app: ASGIApp, *, answered: Callable[[str, str, int, float], None]) -> None:
        super().__init__(app)
        self._answered = answered

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, told = time.perf_counter(), False

        def tell(status: int) -> None:
            nonlocal told
            told = True
            method = scope["method"] if scope["method"] in _METHODS else "other"
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._answered(method, route, status, time.perf_counter() - began)

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                tell(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if not told:  # the 500 response is made by an outer layer
                tell(500)
            raise


REFUSAL_WAIT_S = 0.1
MOST_REFUSAL_WAIT_S = 2.0
LARGE_BODY_BYTES = 1 << 16
"""Bytes above which parsing a body takes noticeable time."""


_OF_LARGE_BODIES = frozenset({401, 403, 422})
"""Statuses of refusals that are delayed if the body is large, since the rest of it is still received."""


class PatientRefusals(Middleware):
    """Delays refusals (one of `statuses`, or of a large body) by `REFUSAL_WAIT_S` for each waiting refusal of the
    same caller, up to `MOST_REFUSAL_WAIT_S`. A caller that retries at once over many connections would otherwise slow
    down all others.

    `spared_per_minute`: refusals of a caller that are sent at once, a thirtieth of them together, for routers that then
    try another server.
    """

    def __init__(self, app: ASGIApp, *, statuses: Collection[int], spared_per_minute: int = 0) -> None:
        super().__init__(app)
        self._statuses = statuses
        self._spared = (
            RateLimit(spared_per_minute, time.monotonic, burst=spared_per_minute // 30) if spared_per_minute else None
        )
        self._waiting: Counter[tuple[str, str]] = Counter()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_late(message: Message) -> None:
            if message["type"] == "http.response.start" and (
                message["status"] in self._statuses or (message["status"] in _OF_LARGE_BODIES and _is_large(scope))
            ):
                await self._wait(scope)
            await send(message)

        await self._app(scope, receive, send_late)

    async def _wait(self, scope: Scope) -> None:
        host, _ = scope.get("client") or ("", 0)
        caller = host, Headers(scope=scope).get("authorization", "")
        if self._is_spared(" ".join(caller)):
            return
        self._waiting[caller] += 1
        try:
            await asyncio.sleep(min(REFUSAL_WAIT_S * self._waiting[caller], MOST_REFUSAL_WAIT_S))
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

    def _is_spared(self, caller: str) -> bool:
        if self._spared is None:
            return False
        try:
            self._spared.take(caller)
        except RateLimitedError:
            return False
        return True


def _is_large(scope: Scope) -> bool:
    """Whether a body is large, or does not announce its size."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or announced_bytes(headers) > LARGE_BODY_BYTES


class BodyLimit(Middleware):
    """Refuses bodies of more bytes than a path accepts: with 413 if `Content-Length` is too large; any other raises
    `HTTPException` while it is read."""

    def __init__(self, app: ASGIApp, *, max_bytes: Callable[[str], int]) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._max_bytes(scope["path"])
        detail = f"the body has more than {most} bytes, which is the limit"
        if announced_bytes(Headers(scope=scope)) > most:
            problem = make_problem(scope["path"], 413, "request_entity_too_large", detail)
            await error_response(problem)(scope, receive, send)
            return
        received = 0

        async def count() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, detail)
            return message

        await self._app(scope, count, send)


def announced_bytes(headers: Headers) -> int:
    """Return the size of a body by its `Content-Length`; 0 without a number there, `sys.maxsize` for larger ones."""
    announced = headers.get("content-length", "")
    digits = announced.lstrip("0") if announced.isascii() and announced.isdecimal() else ""
    # Python's `int` refuses thousands of digits.
    return min(int(digits[:20] or 0), sys.maxsize)


MAX_QUERY_VALUE_LENGTH = 2048
"""Most characters of a query parameter's value."""
MAX_QUERY_PARAMETERS = 256


class InputGuard(Middleware):
    """Refuses hostile paths, queries and headers with the application's own answer to an `InvalidInputError`. Bodies
    are checked by `web.bodies`."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_path(scope)
            _check_query(scope)
            _check_headers(scope)
        except InvalidInputError as error:
            await (await _answer(scope, error))(scope, receive, send)
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


def _check_query(scope: Scope) -> None:
    # Bytes that are not UTF-8 become surrogates, which are refused like those of a body.
    query = scope.get("query_string", b"").decode("latin-1")
    if query.count("&") >= MAX_QUERY_PARAMETERS:
        message = f"the query has more than {MAX_QUERY_PARAMETERS} parameters, which is the limit"
        raise InvalidInputError(message, field="query")
    for name, value in parse_qsl(query, keep_blank_values=True, errors="surrogateescape"):
        for text, most in ((name, MAX_KEY_LENGTH), (value, MAX_QUERY_VALUE_LENGTH)):
            check_text(text, (name,))
            if len(text) > most:
                field = dotted((name,))
                message = f"the query parameter {field} has {len(text)} characters; at most {most} are accepted"
                raise InvalidInputError(message, field=field)


async def _answer(scope: Scope, error: Exception) -> ASGIApp:
    """Return the application's answer to an error; its exception handlers do not see errors raised in middleware."""
    handlers = scope["app"].exception_handlers
    handler = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    response = handler(Request(scope), error)
    answer: ASGIApp = await response if inspect.isawaitable(response) else response
    return answer
