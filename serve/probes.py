"""Probes of a deployment that no replica answers yet, in Serve's proxy. Imports no Ray."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.problems import make_problem, problem_response

PROBE_TIMEOUT_S = 2.0
"""Seconds in which a replica that serves answers a probe."""


class Probes(Middleware):
    """Answers 503 to a probe of `/health` while the first model loads: Serve holds requests until a replica is ready.

    Args:
        timeout_s: seconds that a replica has for its answer.
    """

    def __init__(self, app: ASGIApp, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        super().__init__(app)
        self._timeout_s = timeout_s

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/")
        if scope["method"] not in ("GET", "HEAD") or not path.endswith("/health"):
            await self._app(scope, receive, send)
            return
        begun = asyncio.Event()

        async def tell(message: Message) -> None:
            begun.set()
            await send(message)

        answer = asyncio.ensure_future(self._app(scope, receive, tell))
        try:
            await asyncio.wait({answer}, timeout=self._timeout_s)
            if answer.done() or begun.is_set():
                await answer
                return
        finally:
            answer.cancel()
        detail = (
            f"no replica has answered within {self._timeout_s:g} s: the first model is being loaded, or all are busy"
        )
        await problem_response(make_problem(path, 503, "loading", detail))(scope, receive, send)
