"""JSON bodies of requests: check the sender, then the size, then the number of values; then parse once.

Knows no route. Parsing holds the GIL in whatever thread it runs. So values are counted before anything is parsed, in
pieces that let other threads run, and all large bodies are parsed on one thread.
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
from swiftkv_platform.web.hostile_json import exceeds, load_json
from swiftkv_platform.web.middleware import LARGE_BODY_BYTES, announced_bytes
from swiftkv_platform.web.places import Place, Places, Sender, Share

READ_TIMEOUT_S = BODY_SECONDS.default


class Bodies:
    """Reads the bodies of an application.

    Args:
        admit: authenticates a request and counts it against rate limits. If it raises, the body is not read.
        share: bytes of bodies held at a time.
        max_values: max values (numbers, strings, lists, objects) of a body that is not a prompt of token ids; called
            for each body. The default is more than the longest job spec has, and few enough to report an error for
            each.
        max_strings: max strings of a body, keys included.
        max_keys: see `load_json`.
        allow_nul: see `load_json`.
        until_answered: whether a body counts against `share` until its route has answered; else until it is parsed.
    """

    def __init__(
        self,
        admit: Callable[[Request], Awaitable[Sender]],
        share: Share,
        *,
        max_values: Callable[[], int] = lambda: BODY_VALUES.default,
        max_strings: int = BODY_STRINGS.default,
        max_keys: int | None = None,
        allow_nul: bool = False,
        until_answered: bool = True,
    ) -> None:
        self._admit = admit
        self._max_values = max_values
        self._max_strings = max_strings
        self._max_keys = max_keys
        self._allow_nul = allow_nul
        self.until_answered = until_answered
        self.places = Places("bytes of request bodies", share)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def open(self, request: Request) -> Place:
        """Admit a request without reading its body. Raises as `admit`."""
        sender = await self._admit(request)
        return Place(self.places, sender.tenant, sender.key)

    async def read(self, request: Request, place: Place) -> bytes:
        """Read the body, counting its bytes as they arrive. Raises `OverloadedError`, and `HTTPException` (408) if it
        does not arrive in time."""
        held = announced_bytes(request.headers)
        place.grow(held)  # `BodyLimit` has refused larger announcements already
        body = bytearray()  # appending stays cheap however small the pieces are
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for piece in request.stream():
                    body += piece
                    place.grow(max(len(body) - held, 0))
                    held = max(len(body), held)
        except TimeoutError as error:
            raise HTTPException(408, f"the body took more than {READ_TIMEOUT_S:g} s to arrive") from error
        return bytes(body)

    async def parse(self, body: bytes) -> Any:
        """Return the value of a JSON body. Raises as `load_json`, and `HTTPException` (413) for too many values."""
        if len(body) <= LARGE_BODY_BYTES:  # larger ones share one thread
            return self._parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._parse, body)

    def _parse(self, body: bytes) -> Any:
        most = self._max_values()
        if exceeds(body, most, self._max_strings):
            raise HTTPException(
                413, f"the body has more than {most} values or {self._max_strings} strings, which is the limit"
            )
        return load_json(body, allow_nul=self._allow_nul, max_keys=self._max_keys)


class BodyRoute(APIRoute):
    """A route whose body is read by the application's `Bodies` (`app.state.bodies`)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, wrapped so that `Bodies` reads and parses the body first."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            bodies: Bodies = request.app.state.bodies
            place = await bodies.open(request)
            try:
                request._body = body = await bodies.read(request, place)
                # Starlette's `Request.json` returns `_json`: the bytes themselves if the body is not JSON.
                request._json = await bodies.parse(body) if body and is_json(request) else body
                if not bodies.until_answered:
                    place.free()
                return await handler(request)
            except json.JSONDecodeError as error:
                raise RequestValidationError([_no_json(error)]) from error
            finally:
                place.free()

        return handle


def is_json(request: Request) -> bool:
    """Whether FastAPI would parse the body as JSON, by its content type."""
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    kind = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))


def _no_json(error: json.JSONDecodeError) -> dict[str, Any]:
    """Describe a JSON error as FastAPI does."""
    return {
        "type": "json_invalid",
        "loc": ("body", error.pos),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": error.msg},
    }
