"""JSON bodies of requests: authenticate the sender, limit the size, count the values, then parse once. Knows no route.

Parsing holds the GIL. So values are counted before parsing, in pieces that let other threads run, and one thread parses
all large bodies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from swiftkv_platform.limits import BODY_SECONDS, BODY_STRINGS, BODY_VALUES
from swiftkv_platform.web.limiters import Allocation, ConcurrencyLimiter, ConcurrencyLimits, Sender
from swiftkv_platform.web.middleware import LARGE_BODY_BYTES, get_content_length
from swiftkv_platform.web.safe_json import exceeds_limits, load_json

READ_TIMEOUT_S = BODY_SECONDS.default


class BodyReader:
    """Reads the bodies of an application.

    Args:
        admit: authenticates a request and counts it against rate limits. If it raises, the body is not read.
        limits: max bytes of bodies in memory.
        max_values: returns the max values (numbers, lists, objects) of a body; called for each body. The default is
            more than the longest job spec has, and few enough to report an error for each.
        max_strings: max strings of a body, keys included.
        max_keys: see `load_json`.
        allow_nul: see `load_json`.
        hold_until_response: whether a body counts against `limits` until its response; else until it is parsed.
    """

    def __init__(
        self,
        admit: Callable[[Request], Awaitable[Sender]],
        limits: ConcurrencyLimits,
        *,
        max_values: Callable[[], int] = lambda: BODY_VALUES.default,
        max_strings: int = BODY_STRINGS.default,
        max_keys: int | None = None,
        allow_nul: bool = False,
        hold_until_response: bool = True,
    ) -> None:
        self._admit = admit
        self._max_values = max_values
        self._max_strings = max_strings
        self._max_keys = max_keys
        self._allow_nul = allow_nul
        self.hold_until_response = hold_until_response
        self.limiter = ConcurrencyLimiter("bytes of request bodies", limits)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def admit_request(self, request: Request) -> Allocation:
        """Admit a request without reading its body. Returns the empty allocation for its bytes. Raises as `admit`."""
        sender = await self._admit(request)
        return Allocation(self.limiter, sender.tenant, sender.key)

    async def read_body(self, request: Request, allocation: Allocation) -> bytes:
        """Read the body, counting its bytes as they arrive. Raises `OverloadedError`, and `HTTPException` (408) if it
        does not arrive in time."""
        held = get_content_length(request.headers)
        allocation.grow(held)  # `BodyLimit` has refused larger values of `Content-Length` already
        body = bytearray()  # appending stays cheap however small the pieces are
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for piece in request.stream():
                    body += piece
                    allocation.grow(max(len(body) - held, 0))
                    held = max(len(body), held)
        except TimeoutError as error:
            raise HTTPException(408, f"the body took more than {READ_TIMEOUT_S:g} s to arrive") from error
        return bytes(body)

    async def parse_body(self, body: bytes) -> Any:
        """Return the value of a JSON body. Raises as `load_json`, and `HTTPException` (413) for too many values."""
        if len(body) <= LARGE_BODY_BYTES:  # larger ones share one thread
            return self._parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._parse, body)

    def _parse(self, body: bytes) -> Any:
        max_values = self._max_values()
        if exceeds_limits(body, max_values, self._max_strings):
            raise HTTPException(413, f"the body has more than {max_values} values or {self._max_strings} strings")
        return load_json(body, allow_nul=self._allow_nul, max_keys=self._max_keys)


class BodyRoute(APIRoute):
    """A route whose body the application's `BodyReader` (`app.state.bodies`) reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which gets the body read and parsed by the `BodyReader`."""
        handler, field = super().get_route_handler(), self.body_field
        if field is None:
            return handler

        async def handle(request: Request) -> Response:
            bodies: BodyReader = request.app.state.bodies
            allocation = await bodies.admit_request(request)
            try:
                request._body = body = await bodies.read_body(request, allocation)
                # Starlette's `Request.json` returns `_json`: the bytes themselves if the body is not JSON.
                request._json = await bodies.parse_body(body) if body and is_json(request) else body
                if request._json is None and field.field_info.is_required():
                    raise RequestValidationError([_MISSING_BODY])  # FastAPI's versions differ on `null`
                if not bodies.hold_until_response:
                    allocation.release()
                return await handler(request)
            except json.JSONDecodeError as error:
                raise RequestValidationError([_describe_json_error(error)]) from error
            finally:
                allocation.release()

        return handle


_MISSING_BODY = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}


def is_json(request: Request) -> bool:
    """Whether FastAPI parses a body of the request's content type as JSON."""
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    kind = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))


def _describe_json_error(error: json.JSONDecodeError) -> dict[str, Any]:
    return {
        "type": "json_invalid",
        "loc": ("body", error.pos),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": error.msg},
    }
