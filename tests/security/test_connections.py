"""Connections and long answers are bounded for each key, each tenant and all; none may be silent for long."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.serve.openai.outputs import make_event_stream
from swiftkv_platform.web.server import ConnectionLimits, make_server_options
from tests.security.test_slow_clients import connect, wait_for_end
from tests.support.servers import serving
from tests.support.waiting import eventually
from tests.unit.control_plane.routes.conftest import Start

pytestmark = pytest.mark.slow("starts an application for each test")

PATIENCE_S = 30.0
ENDED = threading.Event()


class Endless:
    """An application that answers until its client is gone."""

    async def __call__(self, _scope: ASGIScope, receive: Receive, send: Send) -> None:
        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.create_task(leave())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            await asyncio.sleep(0)  # uvicorn's `send` returns at once when the client is gone
        ENDED.set()


@pytest.fixture
def served() -> Iterator[ExitStack]:
    ENDED.clear()
    with ExitStack() as stack:
        yield stack


def begin(served: ExitStack, **limits: Any) -> str:
    """Start a small application with the product's own server options; return its address."""
    app = Starlette(routes=[Route("/endless", Endless())])
    return served.enter_context(serving(app, **make_server_options(ConnectionLimits(**limits))))


ENDLESS = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"


def test_pieces_of_a_head_win_no_time(served: ExitStack) -> None:
    with connect(begin(served, head_s=0.2), ENDLESS[:-2]) as slow, suppress(ConnectionError):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            slow.sendall(b"a: b\r\n")
            time.sleep(0.01)
        pytest.fail("a head that never ends is read for ever")


def test_a_second_head_without_an_end_is_cut_off_during_the_first_answer(served: ExitStack) -> None:
    with connect(begin(served), ENDLESS + b"GET / HTTP/1.1\r\nA: ") as growing:
        with suppress(ConnectionError):
            for _ in range(10_000):
                growing.sendall(b"x" * 1000)
            pytest.fail("10 MB of a head were read")
        assert ENDED.wait(PATIENCE_S)


def fill_with_requests(opened: ExitStack, url: str) -> list[socket.socket]:
    """Open two connections with endless answers, and check that this address gets no third one. Returns the two."""
    busy = [opened.enter_context(connect(url, ENDLESS)) for _ in range(2)]
    for each in busy:
        assert each.recv(12) == b"HTTP/1.1 200"
    wait_for_end(opened.enter_context(connect(url)))
    return busy


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (lambda: StreamingResponse(iter(["a", "", "bc"])), b"abc"),
        (lambda: StreamingResponse(iter([])), b""),
        (lambda: StreamingResponse(iter(["x" * 70_000] * 3)), b"x" * 210_000),
        (lambda: make_event_stream(_make_events()), b"data: 1\n\ndata: 2\n\n"),
        (lambda: PlainTextResponse("abc"), b"abc"),
        (lambda: Response(status_code=204), b""),
    ],
)
@pytest.mark.parametrize(
    ("method", "version", "connection"),
    [
        *((b"GET", b"1.0", b""), (b"HEAD", b"1.0", b""), (b"GET", b"1.0", b"Connection: keep-alive\r\n")),
        (b"GET", b"1.1", b"Connection: close\r\n"),
    ],
)
def test_a_client_of_http_1_0_gets_no_chunks(
    served: ExitStack,
    response: Callable[[], Response],
    body: bytes,
    method: bytes,
    version: bytes,
    connection: bytes,
) -> None:
    """Nor two `Connection` headers; the end of the connection is the end of the body."""

    async def endpoint(_request: Request) -> Response:
        return response()

    app = Starlette(routes=[Route("/", endpoint)])
    url = served.enter_context(serving(app, **make_server_options(ConnectionLimits())))
    client = served.enter_context(connect(url))
    client.sendall(method + b" / HTTP/" + version + b"\r\nHost: x\r\n" + connection + b"\r\n")
    received = b""
    while piece := client.recv(1 << 16):
        received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
    assert len(names) == len(set(names))
    assert b"connection: close" in head.lower()
    if version == b"1.0":
        assert b"transfer-encoding" not in names
        assert rest == (b"" if method == b"HEAD" else body)


async def _make_events() -> AsyncIterator[dict[str, str]]:
    yield {"data": "1"}
    yield {"data": "2"}


def test_an_address_takes_half_of_the_connections_and_closes_none_that_is_answered(served: ExitStack) -> None:
    url = begin(served, max_connections=4, head_s=600.0)  # nothing but the number closes a connection
    with ExitStack() as opened:
        busy = fill_with_requests(opened, url)
        assert all(each.recv(1 << 10) for each in busy)
        address = urlsplit(url)
        other = socket.create_connection((address.hostname, address.port), PATIENCE_S, ("127.0.0.2", 0))
        opened.enter_context(other).sendall(ENDLESS)
        assert other.recv(12) == b"HTTP/1.1 200"


def test_who_reads_nothing_is_given_up(served: ExitStack) -> None:
    with connect(begin(served, unread_s=0.05), ENDLESS):
        assert ENDED.wait(PATIENCE_S)


def test_long_answers_are_bounded_for_each_key_each_tenant_and_all(start: Start, tmp_path: Path) -> None:
    keys, reads = tmp_path / "keys.json", frozenset({Scope.ADMIN})
    tokens = {
        name: {"Authorization": f"Bearer {create_key(keys, name=name, tenant=tenant, scopes=reads)}"}
        for name, tenant in (("ann", "acme"), ("al", "acme"), ("bob", "other"), ("cy", "third"))
    }
    limits = {"max_streams_of_key": 1, "max_streams_of_tenant": 2, "max_streams": 3}
    built = start(api_keys_file=keys, **limits)
    app = create_app(built.settings.model_copy(update={"reconcile_interval_s": 1e6}), components=built.parts)
    with (
        serving(app) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client,
        ExitStack() as on,
    ):
        jobs = {
            name: client.post("/jobs", json={"name": "x", "model": {"name_or_path": "o/t"}}, headers=key).json()["id"]
            for name, key in tokens.items()
        }

        def follow(name: str, job: str) -> int:
            stream = client.stream(
                "GET", f"/jobs/{job}/events", headers={**tokens[name], "accept": "text/event-stream"}
            )
            return on.enter_context(stream).status_code

        assert [follow("ann", jobs["ann"]), follow("ann", jobs["ann"])] == [200, 429]
        for method, path in (
            ("GET", f"/jobs/{jobs['ann']}/logs"),
            ("GET", f"/jobs/{jobs['ann']}/logs?follow=true"),
            ("GET", f"/jobs/{jobs['ann']}/artifacts/a"),
            ("GET", f"/jobs/{jobs['ann']}/tracking/a"),
            ("GET", "/v1/files/file-1/content"),
            ("POST", "/deployments/dep_1/generate"),
            ("POST", "/deployments/dep_1/chat/completions"),
        ):
            refused = client.request(method, path, json={}, headers=tokens["ann"])
            assert (refused.status_code, "key 'ann' would have 2 streams" in refused.text) == (429, True), path
            assert int(refused.headers["retry-after"]) >= 1
        assert client.get(f"/jobs/{jobs['ann']}/events", headers=tokens["ann"]).status_code == 200, "not a stream"
        assert [follow("al", jobs["al"]), follow("bob", jobs["bob"]), follow("cy", jobs["cy"])] == [200, 200, 429]
        on.close()
        eventually(lambda: not app.state.streams.total_held, "clients that left hold no stream")
        assert follow("ann", jobs["ann"]) == 200
