"""Middlewares of Serve's proxy that hide the list of routes and answer health probes while no replica does."""

from __future__ import annotations

import asyncio

from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from swiftkv_platform.errors import LoadingError
from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.problems import make_problem, respond_with_problem

PROBE_TIMEOUT_S = 2.0
"""Seconds within which a ready replica answers a probe."""

_NOT_FOUND = PlainTextResponse("there is no such path", 404)


class RoutesGuard(Middleware):
    """Answers 404 at Ray's `/-/routes`, which would list the deployments of all tenants to anyone."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        await (_NOT_FOUND if path == "/-/routes" else self._app)(scope, receive, send)


def is_probe(scope: Scope) -> bool:
    """Whether a request asks for `/health`."""
    return scope["method"] in ("GET", "HEAD") and scope["path"].rstrip("/").endswith("/health")


class Probes(Middleware):
    """Answers 503 to probes of `/health` while no replica answers, since Serve holds requests until one is ready."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_probe(scope):
            await self._app(scope, receive, send)
            return
        begun = asyncio.Event()

        async def tell(message: Message) -> None:
            begun.set()
            await send(message)

        answer = asyncio.ensure_future(self._app(scope, receive, tell))
        try:
            await asyncio.wait({answer}, timeout=PROBE_TIMEOUT_S)
            if answer.done() or begun.is_set():
                await answer
                return
        finally:
            answer.cancel()
        detail = (
            f"no replica has answered within {PROBE_TIMEOUT_S:g} s: the first model is still loading, or all are busy"
        )
        await respond_with_problem(make_problem(scope["path"], 503, LoadingError.code, detail))(scope, receive, send)
