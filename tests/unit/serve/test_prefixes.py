"""Fingerprints of prompts, the header that carries them, and the replica they choose; without Ray's processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from swiftkv_platform.serve import prefixes
from swiftkv_platform.serve.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_SESSION_LENGTH,
    SESSION_HEADER,
    PrefixHeaderMiddleware,
    PrefixRouter,
    ProbeMiddleware,
    hash_prefixes,
    parse_session_header,
    proxy_middlewares,
)

LONG = "a system prompt " * 64


def body(prompt: Any, **others: Any) -> bytes:
    return json.dumps({**others, "prompt": prompt}).encode()


def shared(one: bytes, other: bytes) -> int:
    """Number of blocks at the beginning whose hash_prefixes are equal."""
    pairs = list(zip(hash_prefixes(one), hash_prefixes(other), strict=False))
    equal = [left == right for left, right in pairs]
    assert equal == sorted(equal, reverse=True), "after the first difference all blocks differ"
    return sum(equal)


def test_prompts_that_begin_alike_share_the_fingerprints_of_their_beginning() -> None:
    assert shared(body(LONG + "one"), body(LONG + "two", model="m", max_tokens=3)) == len(LONG) // BLOCK_BYTES
    assert shared(body("x" + LONG), body("y" + LONG)) == 0
    assert shared(body([1] * 500 + [2] * 500), body([1] * 500 + [3] * 500)) > 0
    assert hash_prefixes(body("short")) == []
    assert hash_prefixes(b'{"tokens": [1]}') == []
    assert len(hash_prefixes(body("a" * 1_000_000))) == MAX_BLOCKS
    of_tenants = [set(hash_prefixes(body(LONG), credential)) for credential in (b"Bearer a", b"Bearer b")]
    assert not of_tenants[0] & of_tenants[1], "tenants do not share a prefix"


@pytest.mark.parametrize("separator", ["\n", "\n\n", ""])
def test_lines_that_identify_a_client_are_no_part_of_a_prefix(separator: str) -> None:
    lines = [f"x-anthropic-billing-header: cc_version=2.1; cch={turn}" for turn in ("97bd6;", "24c2d;")]
    bodies = [
        json.dumps({"messages": [{"role": "system", "content": f"{line}{separator}{LONG}"}]}).encode() for line in lines
    ]
    assert shared(*bodies) == len(LONG) // BLOCK_BYTES


@pytest.mark.parametrize("name", ["messages", "input"])
def test_a_conversation_goes_on_where_it_began(name: str) -> None:
    turns = [{"role": "user", "content": LONG}]
    before = json.dumps({name: turns}).encode()
    after = json.dumps({name: [*turns, {"role": "assistant", "content": LONG}]}).encode()
    assert shared(before, after) >= len(hash_prefixes(before)) - 1


@pytest.mark.parametrize(
    ("path", "root_path", "status"),
    [("/-/routes", "", 404), ("/p/-/routes", "/p", 404), ("/-/healthz", "", 200), ("/t/acme/-/routes", "", 200)],
)
async def test_the_proxy_does_not_tell_what_routes_there_are(path: str, root_path: str, status: int) -> None:
    app: Any = PlainTextResponse("Ray's own")
    for middleware in proxy_middlewares():  # in the order in which Serve applies them
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
        answer = await client.get(path)
    assert (answer.status_code, "Ray" in answer.text) == (status, status == 200)


async def through_middleware(messages: list[dict[str, Any]], **scope: Any) -> tuple[str | None, list[dict[str, Any]]]:
    """Return (the header that the application gets, the messages that it reads)."""
    seen: list[Any] = []
    waiting = iter(messages)

    async def app(scope: Any, receive: Any, _send: Any) -> None:
        value = dict(scope["headers"]).get(SESSION_HEADER.encode())
        seen.append((None if value is None else value.decode(), [await receive() for _ in messages]))

    async def receive() -> Any:
        return next(waiting)

    scope = {"type": "http", "method": "POST", "path": "/app/generate", "headers": [], **scope}
    await PrefixHeaderMiddleware(app)(scope, receive, None)
    return seen[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/t/a/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("header", [b"authorization", b"x-api-key"])
async def test_a_tenant_finds_its_own_prefixes_on_every_route(path: str, header: bytes) -> None:
    messages = [{"type": "http.request", "body": body(LONG), "more_body": False}]
    found = [(await through_middleware(messages, path=path, headers=[(header, key)]))[0] for key in (b"one", b"other")]
    assert found == [".".join(hash_prefixes(body(LONG), key)) for key in (b"one", b"other")]


async def test_the_body_passes_unchanged_and_only_its_beginning_is_waited_for() -> None:
    whole = body(LONG * 40)
    parts = [whole[at : at + 5000] for at in range(0, len(whole), 5000)]
    messages = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
    assert await through_middleware(messages) == (".".join(hash_prefixes(whole)), messages)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/t/acme/chat/health", "/health/"])
async def test_a_probe_is_answered_while_no_replica_is_ready(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Serve holds the probe it is answered 503; once a replica answers, its answer is passed on."""
    ended: list[bool] = []

    async def held(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def client(app: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(ProbeMiddleware(app)), base_url="http://serve")

    monkeypatch.setattr(prefixes, "PROBE_TIMEOUT_S", 0.01)
    loading = await client(held).request(method, path)
    await asyncio.sleep(0)  # lets the cancelled request end
    assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
    assert ended, "the held request is cancelled"
    assert method == "HEAD" or loading.json()["code"] == "loading"
    monkeypatch.undo()
    ready = await client(PlainTextResponse("ok")).request(method, path)
    assert ready.status_code == 200


async def test_what_asks_for_nothing_or_brings_a_session_is_left_alone() -> None:
    message = {"type": "http.request", "body": body(LONG), "more_body": False}
    assert await through_middleware([message], method="GET") == (None, [message])
    assert await through_middleware([message], path="/app/tokenize") == (None, [message])
    own = [(SESSION_HEADER.encode(), b"mine")]
    assert await through_middleware([message], headers=own) == ("mine", [message])
    gone = {"type": "http.disconnect"}
    assert await through_middleware([gone]) == ("", [gone])


class Router(PrefixRouter):
    """A router whose queue lengths a test sets, instead of Serve's cache of them."""

    def __init__(self, queues: dict[str, int]) -> None:
        self.queues = queues
        self.initialize_state()

    def _get_load(self, replica: Any) -> int:
        return self.queues[replica.replica_id.unique_id]

    async def route(self, header: str) -> str:
        request = SimpleNamespace(metadata=SimpleNamespace(session_id=header))
        replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in self.queues]
        [[chosen], *_] = await self.choose_replicas(replicas, request)
        self.on_request_routed(request, chosen.replica_id, None)
        name: str = chosen.replica_id.unique_id
        self.queues[name] += 1
        return name


async def test_a_prefix_stays_with_its_replica_while_that_is_not_too_busy() -> None:
    router = Router({"one": 0, "two": 1})
    assert await router.route("a.b") == "one"
    router.queues = {"one": 4, "two": 0}
    assert await router.route("a.b.c") == "one"
    assert await router.route("a.b.d") == "two", "one is five requests busier"
    router.queues = {"one": 3, "two": 2}
    assert await router.route("a.b.c") == "one", "one has more of this prompt"
    router.queues = {"two": 0}
    assert await router.route("a.b.c") == "two", "one is gone"


async def test_the_prefix_seen_least_recently_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_PREFIXES", 2)
    router = Router({"one": 0, "two": 1})
    await router.route("a")
    for header, expected in (("b", "two"), ("a", "one"), ("c", "two"), ("b", "two"), ("a", "two")):
        router.queues = {"one": 1, "two": 0}
        assert await router.route(header) == expected


@pytest.mark.parametrize("header", ["", "a.b"])
async def test_skew_starves_nobody(header: str) -> None:
    router = Router({"one": 0, "two": 0, "three": 0})
    for _ in range(60):
        await router.route(header)
    assert max(router.queues.values()) - min(router.queues.values()) <= 5


@pytest.mark.parametrize(
    ("value", "prints"),
    [
        ("", []),
        ("a.b", ["a", "b"]),
        ("user-7f3.session 9", ["user-7f3.session 9"]),
        ("x" * MAX_SESSION_LENGTH, ["x" * MAX_SESSION_LENGTH]),
        ("x" * (MAX_SESSION_LENGTH + 1), []),
        (".".join(["0123456789ab"] * MAX_BLOCKS), ["0123456789ab"] * MAX_BLOCKS),
        (".".join(["0123456789ab"] * (MAX_BLOCKS + 1)), []),
    ],
)
def test_the_header_carries_prints_or_a_callers_session_unless_too_long(value: str, prints: list[str]) -> None:
    assert parse_session_header(value) == prints


@pytest.mark.parametrize(
    "variable", ["RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_ENABLE_DIRECT_INGRESS", "RAY_SERVE_THROUGHPUT_OPTIMIZED"]
)
def test_a_serve_without_its_own_proxy_is_refused(variable: str) -> None:
    build = "from swiftkv_platform.serve.app import build_app; build_app({'id': 'dep_1'})"
    options = {"capture_output": True, "text": True, "check": False, "env": {**os.environ, variable: "1"}}
    built = subprocess.run([sys.executable, "-c", build], **options)
    assert built.returncode == 1
    assert f"{variable}" in built.stderr.splitlines()[-1]
