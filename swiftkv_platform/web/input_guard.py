"""The door of an application: hostile bodies, queries, paths and headers go no further. Knows no route."""

from __future__ import annotations

import inspect
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.web.hostile_json import MAX_KEY_LENGTH, check_json, check_text, dotted
from swiftkv_platform.web.middleware import Middleware

MAX_QUERY_VALUE_LENGTH = 2048
"""Characters of a query parameter's value."""
_IN_PLACE = 1 << 16
"""Bytes of a body up to which checking takes less time than a thread."""


class InputGuard(Middleware):
    """Answers what cannot be meant as the application itself answers an `InvalidInputError`.

    It reads a JSON body whole before the application sees the request, so it belongs inside the limit of its size.

    Args:
        allow_nul: see `check_json`.
    """

    def __init__(self, app: ASGIApp, *, allow_nul: bool = False) -> None:
        super().__init__(app)
        self._allow_nul = allow_nul

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_path(scope)
            _check_query(scope)
            _check_headers(scope)
            if _brings_json(scope):
                receive = await self._checked_body(receive)
        except (InvalidInputError, HTTPException) as error:
            await (await _answer(scope, error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _checked_body(self, receive: Receive) -> Receive:
        """`receive` of the same request, whose body is good. Raises `InvalidInputError`."""
        pieces: list[bytes] = []
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                return _first(message, receive)
            pieces.append(message.get("body", b""))
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(body) > _IN_PLACE:
            await run_in_threadpool(check_json, body, allow_nul=self._allow_nul)
        elif body:
            check_json(body, allow_nul=self._allow_nul)
        return _first({"type": "http.request", "body": body, "more_body": False}, receive)


def _first(message: Message, receive: Receive) -> Receive:
    """`message`, then what `receive` gives."""
    held = [message]

    async def replay() -> Message:
        return held.pop() if held else await receive()

    return replay


def _brings_json(scope: Scope) -> bool:
    """Whether the body is JSON, or its type is left open."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    return kind in ("", "application/json") or kind.endswith("+json")


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
    for name, value in parse_qsl(query, keep_blank_values=True, errors="surrogateescape"):
        for text, most in ((name, MAX_KEY_LENGTH), (value, MAX_QUERY_VALUE_LENGTH)):
            check_text(text, (name,))
            if len(text) > most:
                field = dotted((name,))
                message = f"the query parameter {field} has {len(text)} characters where {most} are the most"
                raise InvalidInputError(message, field=field)


async def _answer(scope: Scope, error: Exception) -> ASGIApp:
    """Return the application's answer to such an error: middleware is outside the reach of its handlers."""
    handlers = scope["app"].exception_handlers
    handler = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
    response = handler(Request(scope), error)
    answer: ASGIApp = await response if inspect.isawaitable(response) else response
    return answer
