"""Prefix-aware routing: Serve's proxy sends a prompt to the replica that last received the same prefix.

Serve chooses a replica before it reads the body. So `PrefixHeaderMiddleware`, a middleware of its proxy, reads the
beginning of the body and puts hashes of it into a header, which Serve passes to `PrefixRouter`. Ray's own
`PrefixCacheAffinityRouter` needs vLLM and requests that another deployment has parsed. The middlewares run if
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `proxy_middlewares`; without them Serve chooses the least busy
replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.datastructures import Headers
from starlette.middleware import Middleware as MiddlewareEntry
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from swiftkv_platform.errors import LoadingError
from swiftkv_platform.serve.access import API_KEY_HEADER
from swiftkv_platform.serve.openai.schemas import CLIENT_METADATA_LINE
from swiftkv_platform.web.middleware import Middleware, is_probe
from swiftkv_platform.web.problems import make_problem, respond_with_problem

SESSION_HEADER = "x-session-id"
"""Header that Serve's proxy passes to the router. A caller may set it, to route its requests to one replica."""

BLOCK_BYTES = 256
"""Bytes per hashed block; prefixes match in whole blocks."""
MAX_BLOCKS = 64
"""Max hashed blocks per prompt: its first 16 KiB decide the routing."""
MAX_SESSION_LENGTH = 128
"""Max characters of a caller's session header; a longer one is ignored."""
MAX_PREFIXES = 1 << 16
"""Max prefixes per router; the least recent one is dropped."""
MAX_IMBALANCE = 4
"""Max requests that a replica preferred by prefix may have more than the least busy one. Beyond that, waiting costs
more than computing the prompt again."""

_GENERATE_PATHS = ("/generate", "/completions", "/responses", "/messages")
_PROMPT_KEY = re.compile(rb'"(?:(?:prompt|messages)"\s*:\s*|input"\s*:\s*(?=["\[]))')
_CLIENT_LINES = re.compile(CLIENT_METADATA_LINE.encode(), re.IGNORECASE)
_BLOCK_HASH = "[0-9a-f]{1,12}"
_BLOCK_HASHES = re.compile(rf"{_BLOCK_HASH}(?:\.{_BLOCK_HASH}){{0,{MAX_BLOCKS - 1}}}")


def proxy_middlewares() -> list[MiddlewareEntry]:
    return [MiddlewareEntry(middleware) for middleware in (RouteListBlocker, ProbeMiddleware, PrefixHeaderMiddleware)]


def hash_prefixes(body: bytes, tenant: bytes = b"") -> list[str]:
    """Hash each whole block of a JSON body's prompt, together with all previous blocks.

    Hashes the raw text without parsing or tokenizing. The body may be cut off. Requests of a conversation share a
    prefix.
    """
    prompt = _PROMPT_KEY.search(body)
    if prompt is None:
        return []
    beginning = body[prompt.end() : prompt.end() + MAX_BLOCKS * BLOCK_BYTES]
    text = _CLIENT_LINES.sub(b"", beginning)  # which prompts do not get
    digest = hashlib.sha256(tenant)
    hashes = []
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(text[start : start + BLOCK_BYTES])
        hashes.append(digest.hexdigest()[:12])
    return hashes


def parse_session_header(value: str) -> list[str]:
    """Return the hashes in a header's value, or a caller's own session as a single one. An overlong value has none,
    since it could evict the prefixes of others from the router."""
    if _BLOCK_HASHES.fullmatch(value):
        return value.split(".")
    return [value] if 0 < len(value) <= MAX_SESSION_LENGTH else []


class PrefixHeaderMiddleware(Middleware):
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] != "POST" or not scope["path"].endswith(_GENERATE_PATHS) or SESSION_HEADER in headers:
            await self._app(scope, receive, send)
            return
        # 1. read the beginning of the body
        messages: list[Message] = []
        size = 0
        while size < (MAX_BLOCKS + 1) * BLOCK_BYTES and (not messages or messages[-1].get("more_body", False)):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
        body = b"".join(message.get("body", b"") for message in messages)
        # 2. hash the prompt's blocks, separately for each key
        tenant = (headers.get("authorization") or headers.get(API_KEY_HEADER, "")).encode()
        header = (SESSION_HEADER.encode(), ".".join(hash_prefixes(body, tenant)).encode())
        # 3. pass the request on with the messages read so far
        replayed: Iterator[Message] = iter(messages)

        async def receive_replayed() -> Message:
            return next(replayed, None) or await receive()

        await self._app({**scope, "headers": [*scope["headers"], header]}, receive_replayed, send)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Prefers the replica that last received the longest known prefix, then the one with the fewest requests.

    Each proxy has its own router, which knows only its own requests. A request is only slower if its replica is new or
    has evicted the prefix.
    """

    def initialize_state(self) -> None:
        self._last_replica: OrderedDict[str, str] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas in order of preference: the one with the longest known prefix, then the least busy."""
        # 1. find the last replica of the longest known prefix, unless it is too busy
        loads = {replica.replica_id.unique_id: self._get_load(replica) for replica in candidate_replicas}
        max_load = min(loads.values(), default=0) + MAX_IMBALANCE
        hashes = [] if pending_request is None else parse_session_header(pending_request.metadata.session_id)
        names = (self._last_replica.get(prefix, "") for prefix in reversed(hashes))
        preferred = next((name for name in names if loads.get(name, math.inf) <= max_load), None)

        # 2. sort the others by load
        def rank_replica(replica: RunningReplica) -> tuple[bool, int, float]:
            name = replica.replica_id.unique_id
            return name != preferred, loads[name], random.random()  # noqa: S311  # a tie, not a secret

        return [[replica] for replica in sorted(candidate_replicas, key=rank_replica)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Record the prefixes of a request that a replica has accepted; called by Serve."""
        for prefix in parse_session_header(pending_request.metadata.session_id):
            self._last_replica[prefix] = replica_id.unique_id
            self._last_replica.move_to_end(prefix)
        while len(self._last_replica) > MAX_PREFIXES:
            self._last_replica.popitem(last=False)

    def _get_load(self, replica: RunningReplica) -> int:
        return self._replica_queue_len_cache.get(replica.replica_id) or 0


PROBE_TIMEOUT_S = 2.0
"""Max seconds for a ready replica's response to a probe."""

_NOT_FOUND = PlainTextResponse("there is no such path", 404)


class RouteListBlocker(Middleware):
    """Responds with 404 to Ray's `/-/routes`, which lists the deployments of all tenants without a key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        await (_NOT_FOUND if path == "/-/routes" else self._app)(scope, receive, send)


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
