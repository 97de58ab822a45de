"""Bodies of requests: how large they may be for the model that is served, and where their JSON is parsed.

Parsing holds Python's lock, in whatever thread it is done. So the number of values is bounded before anything is
parsed, by a count that lets other threads in, and large bodies have one thread for all of them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from swiftkv_platform.serve.current import Current, Version

MAX_BODY_BYTES = 16 << 20
"""Largest body that is read, unless a deployment says otherwise; a larger one gets 413."""
BASE_BODY_BYTES = 1 << 20
"""Room for what is not a prompt: stop strings, schemas, names, spaces."""
NUM_LONGEST_PROMPTS = 8
"""Prompts of the longest text for which there is room in one body; there may be more that are shorter."""
ESCAPED_BYTES = 6
"""Most bytes that JSON takes for one byte of text."""
LARGE_BODY_BYTES = 1 << 16
"""A larger body is not parsed on the event loop: its values are counted, and parsed in a thread."""
BASE_VALUES = 1 << 16
"""Numbers, strings, lists and objects that a large body may have beside the token ids of its prompts."""
MAX_PROMPT_VALUES = 1 << 18
"""Token ids of one body, or those of one prompt where the context has more."""
MAX_STRINGS = 1 << 15
"""Strings of a large body, keys included."""

_VALUES = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
"""Strings, and what stands before a value that may be something else. A string without an end takes all that follows,
so that no byte is looked at twice."""


class Bodies:
    """Limits on the bodies of an application, and the thread that parses large ones. `max_bytes`: of the deployment;
    None: what the context of the served model needs, at most `MAX_BODY_BYTES`."""

    def __init__(self, current: Current, max_bytes: int | None = None) -> None:
        self._current = current
        self._own_max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    @property
    def max_bytes(self) -> int:
        """Most bytes of a body, for the models that are served now."""
        return self._own_max_bytes or max(map(_max_bytes, self._versions()), default=MAX_BODY_BYTES)

    @property
    def max_values(self) -> int:
        """Most values of a body, likewise."""
        return max(map(_max_values, self._versions()), default=BASE_VALUES + MAX_PROMPT_VALUES)

    def _versions(self) -> list[Version]:
        if self._current.is_empty:
            return []
        return [one for one in (self._current.version, self._current.version.candidate) if one is not None]

    async def parse(self, body: bytes) -> Any:
        """The JSON of a body. Raises `ValueError` where it is none, and `HTTPException` for too many values."""
        if len(body) <= LARGE_BODY_BYTES:
            return json.loads(body)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _parsed, body, self.max_values)


class BodyRoute(APIRoute):
    """A route whose body is parsed by the application's `Bodies`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, on a request that parses its body so."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_ParsedAside(request.scope, request.receive))

        return handle


class _ParsedAside(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            bodies: Bodies = self.app.state.bodies
            self._json = await bodies.parse(await self.body())
        return self._json


def _max_bytes(version: Version) -> int:
    text = version.engine.reader.max_prompt_bytes * ESCAPED_BYTES * NUM_LONGEST_PROMPTS
    return min(BASE_BODY_BYTES + text, MAX_BODY_BYTES)


def _max_values(version: Version) -> int:
    max_model_len = version.engine.model.context_length
    of_all = min(max_model_len * version.engine.max_sequences, MAX_PROMPT_VALUES)
    return BASE_VALUES + max(max_model_len, of_all)


def _parsed(body: bytes, max_values: int) -> Any:
    """Raises `ValueError`, and `HTTPException` for more values than there may be."""
    at_most = sum(map(body.count, (b",", b"[", b"{"))) + 1
    if at_most > max_values or body.count(b'"') > 2 * MAX_STRINGS:  # which may all be characters of one text
        num_strings = num_others = 0
        for match in _VALUES.finditer(body):
            is_string = body[match.start()] == ord('"')
            num_strings, num_others = num_strings + is_string, num_others + (not is_string)
            if num_strings > MAX_STRINGS or num_others >= max_values:
                raise HTTPException(
                    413, f"the body has more than {max_values} values or {MAX_STRINGS} strings, which is the limit"
                )
    return json.loads(body)
