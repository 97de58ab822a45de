"""Middleware of Serve's proxy: adds a header with hashes of the prompt's prefix for the router, answers health probes
while no replica does, and hides the list of routes. Imports no Ray.

Serve's proxy chooses a replica before it reads the body. `proxy_middlewares`, which Serve calls if
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it, reads the beginning of the body first. Otherwise requests go to
the least busy replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware as Installed
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swiftkv_platform.errors import LoadingError
from swiftkv_platform.serve.access import API_KEY_HEADER
from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.problems import make_problem, problem_response

PROXY_CALLBACK = "swiftkv_platform.serve.prefixes:proxy_middlewares"
SESSION_HEADER = "x-session-id"
"""Header that Serve's proxy passes to the router. A caller's own value is kept, and routes its requests to one
replica."""

BLOCK_BYTES = 256
"""Bytes of the body that are hashed together; prefixes match in whole blocks."""
MAX_BLOCKS = 64
"""Most blocks hashed of one prompt, so its first 16 KiB decide the routing."""
MAX_SESSION_LENGTH = 128
"""Most characters of a caller's own session header; a longer one is ignored."""
MAX_PREFIXES = 1 << 16
"""Most prefixes that an index keeps; the least recently seen is dropped."""
PROBE_TIMEOUT_S = 2.0
"""Seconds within which a ready replica answers a probe."""

_NOT_FOUND = PlainTextResponse("there is no such path", 404)
_ASKS = ("/generate", "/completions", "/responses", "/messages")
_PROMPT = re.compile(rb'"(?:(?:prompt|messages)"\s*:\s*|input"\s*:\s*(?=["\[]))')
_PRINT = "[0-9a-f]{1,12}"
_PRINTS = re.compile(rf"{_PRINT}(?:\.{_PRINT}){{0,{MAX_BLOCKS - 1}}}")


def proxy_middlewares() -> list[Installed]:
    """Return the middlewares for `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    return [Installed(RoutesGuard), Installed(Probes), Installed(PrefixHeader)]


def fingerprints(body: bytes, tenant: bytes = b"") -> list[str]:
    """Hash each whole block of the prompt in (the beginning of) a JSON body, together with all blocks before it.

    The raw text is hashed, without parsing or tokenizing; successive turns of a conversation begin with the same text.
    """
    found = _PROMPT.search(body)
    if found is None:
        return []
    digest = hashlib.sha256(tenant)
    prints = []
    for start in range(found.end(), len(body) - BLOCK_BYTES + 1, BLOCK_BYTES)[:MAX_BLOCKS]:
        digest.update(body[start : start + BLOCK_BYTES])
        prints.append(digest.hexdigest()[:12])
    return prints


def in_header(prints: Sequence[str]) -> str:
    """Join fingerprints to the header's value."""
    return ".".join(prints)


def from_header(value: str) -> list[str]:
    """Return the fingerprints of a header's value, or a caller's own session as one fingerprint. An overlong value
    gives none, so that it cannot evict the prefixes of others from the index."""
    if _PRINTS.fullmatch(value):
        return value.split(".")
    return [value] if 0 < len(value) <= MAX_SESSION_LENGTH else []


class RoutesGuard(Middleware):
    """Answers 404 at Ray's `/-/routes`, which would list the deployments of all tenants to anyone."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        await (_NOT_FOUND if path == "/-/routes" else self._app)(scope, receive, send)


class PrefixHeader(Middleware):
    """Adds the prompt's fingerprints to the headers of requests that generate."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] != "POST" or not scope["path"].endswith(_ASKS) or SESSION_HEADER in headers:
            await self._app(scope, receive, send)
            return
        read: list[Message] = []
        size = 0
        while size < (MAX_BLOCKS + 1) * BLOCK_BYTES and (not read or read[-1].get("more_body", False)):
            read.append(await receive())
            size += len(read[-1].get("body", b""))
        body = b"".join(message.get("body", b"") for message in read)
        tenant = (headers.get("authorization") or headers.get(API_KEY_HEADER, "")).encode()
        header = (SESSION_HEADER.encode(), in_header(fingerprints(body, tenant)).encode())
        again: Iterator[Message] = iter(read)

        async def replay() -> Message:
            return next(again, None) or await receive()

        await self._app({**scope, "headers": [*scope["headers"], header]}, replay, send)


class PrefixIndex:
    """Replicas to which each prefix was sent."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[str, set[str]] = OrderedDict()

    def add(self, prints: Sequence[str], replica: str) -> None:
        """Record that a prompt with these fingerprints was sent to `replica`."""
        for fingerprint in prints:
            self._replicas.setdefault(fingerprint, set()).add(replica)
            self._replicas.move_to_end(fingerprint)
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def with_longest_prefix(self, prints: Sequence[str], replicas: Collection[str]) -> set[str]:
        """Return those of `replicas` that were sent the longest prefix of a prompt; empty if none was sent any."""
        for fingerprint in reversed(prints):
            found = self._replicas.get(fingerprint, set()).intersection(replicas)
            if found:
                return found
        return set()


def is_probe(scope: Scope) -> bool:
    """Whether a request asks for `/health`."""
    return scope["method"] in ("GET", "HEAD") and scope["path"].rstrip("/").endswith("/health")


class Probes(Middleware):
    """Answers 503 to probes of `/health` while no replica answers, since Serve holds requests until one is ready.

    Args:
        timeout_s: seconds to wait for a replica's answer.
    """

    def __init__(self, app: ASGIApp, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        super().__init__(app)
        self._timeout_s = timeout_s

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
            await asyncio.wait({answer}, timeout=self._timeout_s)
            if answer.done() or begun.is_set():
                await answer
                return
        finally:
            answer.cancel()
        detail = (
            f"no replica has answered within {self._timeout_s:g} s: the first model is still loading, or all are busy"
        )
        await problem_response(make_problem(scope["path"], 503, LoadingError.code, detail))(scope, receive, send)
