"""Middleware that refuses hostile queries, paths and headers. Knows no route."""

from __future__ import annotations

import inspect
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.web.hostile_json import MAX_KEY_LENGTH, check_text, dotted
from swiftkv_platform.web.middleware import Middleware

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
