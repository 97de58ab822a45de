"""Prefix-aware routing: Serve's proxy sends a prompt to the replica that last received the same beginning.

Serve's proxy chooses a replica before it reads the body. `PrefixHeader`, a middleware of the proxy, reads the beginning
of the body first and puts hashes of it into a header, which Serve passes to `PrefixRouter`. Ray's own
`PrefixCacheAffinityRouter` needs vLLM and requests that another deployment has parsed. The middlewares run if
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `proxy_middlewares`; without them the least busy replica is chosen.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.datastructures import Headers
from starlette.middleware import Middleware as Installed
from starlette.types import Message, Receive, Scope, Send

from swiftkv_platform.serve.access import API_KEY_HEADER
from swiftkv_platform.serve.proxy import Probes, RoutesGuard
from swiftkv_platform.web.middleware import Middleware

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
"""Most prefixes that a router remembers; the least recently seen is dropped."""
MAX_IMBALANCE = 4
"""Requests that a replica may have more than the least busy one while its prefixes still count. Beyond that, waiting
costs more than computing the prompt again."""

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


def from_header(value: str) -> list[str]:
    """Return the fingerprints of a header's value, or a caller's own session as one fingerprint. An overlong value
    gives none, so that it cannot evict the prefixes of others from the router."""
    if _PRINTS.fullmatch(value):
        return value.split(".")
    return [value] if 0 < len(value) <= MAX_SESSION_LENGTH else []


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
        header = (SESSION_HEADER.encode(), ".".join(fingerprints(body, tenant)).encode())
        again: Iterator[Message] = iter(read)

        async def replay() -> Message:
            return next(again, None) or await receive()

        await self._app({**scope, "headers": [*scope["headers"], header]}, replay, send)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Prefers the replica that last received the longest known prefix, then the one with the fewest requests.

    Each proxy has its own router, which knows only the requests it routed itself. If a replica is new or has evicted a
    prefix, the request is only slower.
    """

    def initialize_state(self) -> None:
        """Set up the router; called by Serve."""
        self._last_replica: OrderedDict[str, str] = OrderedDict()
        """By prefix, the name of the replica that received it last."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas in the order to try them: the one with the longest known prefix, then the least busy."""
        loads = {replica.replica_id.unique_id: self._load(replica) for replica in candidate_replicas}
        most = min(loads.values(), default=0) + MAX_IMBALANCE
        prints = [] if pending_request is None else from_header(pending_request.metadata.session_id)
        known = (self._last_replica.get(fingerprint, "") for fingerprint in reversed(prints))
        preferred = next((name for name in known if loads.get(name, math.inf) <= most), None)

        def rank(replica: RunningReplica) -> tuple[bool, int, float]:
            name = replica.replica_id.unique_id
            return name != preferred, loads[name], random.random()  # noqa: S311  # a tie, not a secret

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Record the prefixes of a request; called by Serve when a replica has accepted one."""
        for fingerprint in from_header(pending_request.metadata.session_id):
            self._last_replica[fingerprint] = replica_id.unique_id
            self._last_replica.move_to_end(fingerprint)
        while len(self._last_replica) > MAX_PREFIXES:
            self._last_replica.popitem(last=False)

    def _load(self, replica: RunningReplica) -> int:
        """Return the number of requests at a replica, as far as this router knows."""
        return self._replica_queue_len_cache.get(replica.replica_id) or 0
