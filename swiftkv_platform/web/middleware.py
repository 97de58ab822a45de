"""ASGI parts that every server of ours wants. Knows no route and no error format."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_HEADERS: Mapping[str, str] = {
    # Nothing from elsewhere runs, is embedded or is asked; libraries set styles of elements and have icons as data.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of pages for browsers."""


class PageFiles(StaticFiles):
    """The files of pages, with headers that keep everything else out."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


class Middleware:
    """An ASGI application around another one, which `handle` asks for a request's answer."""

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


_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class RequestTimes(Middleware):
    """Tells how long each request takes to the head of its answer: a stream may go on for hours. `answered`: (method,
    template of the route, status, seconds); what no route answers is `unmatched`."""

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
            if not told:  # the server's own 500 is made further out
                tell(500)
            raise


REFUSAL_WAIT_S = 0.1
MOST_REFUSAL_WAIT_S = 2.0
LARGE_BODY_BYTES = 1 << 16
"""Bytes of a body whose parsing is felt."""


class PatientRefusals(Middleware):
    """Lets callers whose requests are refused, with one of `statuses`, or 422 for a large body, wait for the answer,
    `REFUSAL_WAIT_S` for each of theirs that waits: who asks again at once, over many connections, would have others
    wait."""

    def __init__(self, app: ASGIApp, *, statuses: Collection[int]) -> None:
        super().__init__(app)
        self._statuses = statuses
        self._waiting: Counter[tuple[str, str]] = Counter()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_late(message: Message) -> None:
            if message["type"] == "http.response.start" and (
                message["status"] in self._statuses or (message["status"] == 422 and _is_large(scope))
            ):
                await self._wait(scope)
            await send(message)

        await self._app(scope, receive, send_late)

    async def _wait(self, scope: Scope) -> None:
        host, _ = scope.get("client") or ("", 0)
        caller = host, Headers(scope=scope).get("authorization", "")
        self._waiting[caller] += 1
        try:
            await asyncio.sleep(min(REFUSAL_WAIT_S * self._waiting[caller], MOST_REFUSAL_WAIT_S))
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]


def _is_large(scope: Scope) -> bool:
    """Whether a body is large, or does not say."""
    headers = Headers(scope=scope)
    announced = headers.get("content-length", "")
    return "transfer-encoding" in headers or _exceeds(announced, LARGE_BODY_BYTES)


class BodyLimit(Middleware):
    """Refuses bodies of more bytes than a path accepts, announced or not. `refuse`: (path, why) -> the 413 answer to a
    body that announces its size; one that does not gets an `HTTPException` while it is read."""

    def __init__(self, app: ASGIApp, *, max_bytes: Callable[[str], int], refuse: Callable[[str, str], ASGIApp]) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes
        self._refuse = refuse

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = self._max_bytes(scope["path"])
        detail = f"the body has more than {most} bytes, which is the limit"
        announced = Headers(scope=scope).get("content-length", "")
        if _exceeds(announced, most):
            await self._refuse(scope["path"], detail)(scope, receive, send)
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


def _exceeds(announced: str, most: int) -> bool:
    """Whether a `Content-Length` is above `most`, with however many digits: Python makes no number of thousands."""
    digits, limit = announced.lstrip("0"), str(most)
    return announced.isdecimal() and (len(digits), digits) > (len(limit), limit)
