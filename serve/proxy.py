"""Middlewares of Serve's proxy: they hide the list of routes, and respond to health probes if no replica does."""

from __future__ import annotations

import asyncio

from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from swiftkv_platform.errors import LoadingError
from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.problems import make_problem, respond_with_problem

PROBE_TIMEOUT_S = 2.0
"""Max seconds for a ready replica's response to a probe."""

_NOT_FOUND = PlainTextResponse("there is no such path", 404)


class RouteListBlocker(Middleware):
    """Responds with 404 to Ray's `/-/routes`, which lists the deployments of all tenants without a key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        await (_NOT_FOUND if path == "/-/routes" else self._app)(scope, receive, send)


def is_probe(scope: Scope) -> bool:
    """Whether a request is a probe of `/health`."""
    return scope["method"] in ("GET", "HEAD") and scope["path"].rstrip("/").endswith("/health")


class ProbeMiddleware(Middleware):
    """Responds with 503 to probes of `/health` if no replica responds, since Serve queues requests until one is
    ready."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_probe(scope):
            await self._app(scope, receive, send)
            return
        has_response = asyncio.Event()

        async def send_and_record(message: Message) -> None:
            has_response.set()
            await send(message)

        response = asyncio.ensure_future(self._app(scope, receive, send_and_record))
        try:
            await asyncio.wait({response}, timeout=PROBE_TIMEOUT_S)
            if response.done() or has_response.is_set():
                await response
                return
        finally:
            response.cancel()
        detail = f"no replica has responded within {PROBE_TIMEOUT_S:g} s: the first model is loading, or all are busy"
        await respond_with_problem(make_problem(scope["path"], 503, LoadingError.code, detail))(scope, receive, send)
