"""Requests as all kinds of clients make them: pages of other origins, probes by HEAD, addresses with too many slashes.
Knows no route."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.serve.access import IGNORED_FIELDS_HEADER, REPLICA_HEADER
from swiftkv_platform.web.middleware import Middleware

_SLASHES = re.compile("/{2,}")
_LIMITS = [f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")]


class Origins(CORSMiddleware):
    """Lets pages of some origins ask (CORS), by key alone: no cookie is sent. `allowed`: the origins at the moment, `*`
    for all of them; with none it is as if it was not there."""

    def __init__(self, app: ASGIApp, allowed: Callable[[], Collection[str]]) -> None:
        exposed = [REPLICA_HEADER, IGNORED_FIELDS_HEADER, "retry-after", *_LIMITS]
        methods = ["GET", "HEAD", "POST"]
        super().__init__(app, allow_methods=methods, allow_headers=["*"], expose_headers=exposed)
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (super().__call__ if self._allowed() else self.app)(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether the deployment has it."""
        allowed = self._allowed()
        return origin in allowed or "*" in allowed


class Spelling(Middleware):
    """Reads `//models` and `/models/` as `/models`, and answers HEAD as GET, without the body."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        changed: dict[str, Any] = {"path": _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"}
        if scope["method"] != "HEAD":
            await self._app({**scope, **changed}, receive, send)
            return

        async def head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, **changed, "method": "GET"}, receive, head)
