"""Checks before a body is parsed, in both applications: the caller, its rate, the size and the number of values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from swiftkv_platform.errors import OverloadedError
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.web import bodies
from swiftkv_platform.web.bodies import BodyReader, BodyRoute
from swiftkv_platform.web.limiters import ConcurrencyLimiter, ConcurrencyLimits
from tests.unit.control_plane.routes.conftest import Start, StillClock

pytestmark = pytest.mark.slow("starts an application for each test")

JSON = {"Content-Type": "application/json"}
MANY_LISTS = b"[" + b"[]," * 340_000 + b"[]]"


@dataclass
class House:
    """One of the two applications, with a key for it."""

    app: FastAPI
    key: dict[str, str]
    asks: str
    """A route that takes a body."""
    lives: str
    """A route that probes ask."""
    parsed: list[int]
    """Bytes of each body that was parsed."""

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1:8000")

    @property
    def held(self) -> int:
        found: BodyReader = self.app.state.bodies
        return found.limiter.total_held


@pytest.fixture(params=["control plane", "replica"])
def house(request: pytest.FixtureRequest, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> House:
    keys = tmp_path / "keys.json"
    scopes = frozenset({Scope.ADMIN})
    token = create_key(keys, name="ann", tenant="acme", scopes=scopes, requests_per_minute=100)
    parsed: list[int] = []
    real = bodies.load_json

    def parse(body: bytes, **options: Any) -> Any:
        parsed.append(len(body))
        return real(body, **options)

    monkeypatch.setattr(bodies, "load_json", parse)
    if request.param == "replica":
        app, asks, lives = create_http_app(ReplicaState(), key_ring=KeyRing(keys)), "/generate", "/openapi.json"
    else:
        plane = start(
            changed={"clock": StillClock()},
            api_keys_file=keys,
            requests_per_minute=1000,
            max_body_bytes_at_once=8 << 20,
        )
        app, asks, lives = plane.client.app, "/jobs", "/healthz"  # type: ignore[attr-defined]
    return House(app, {"Authorization": f"Bearer {token}"} | JSON, asks, lives, parsed)


async def unread(read: list[int]) -> AsyncIterator[bytes]:
    for _ in range(4):
        read.append(1)
        yield b" " * 1000


def routes(app: FastAPI) -> list[tuple[str, str, APIRoute]]:
    """Method, path and route of every documented operation."""
    found = [context.original_route for context in iter_route_contexts(app.routes)]
    return [(method, route.path, route) for route in found if isinstance(route, APIRoute) for method in route.methods]


async def test_nothing_is_read_of_who_shows_no_key(house: House) -> None:
    read: list[int] = []
    async with house.client() as client:
        for method, path, route in routes(house.app):
            assert route.body_field is None or isinstance(route, BodyRoute), path
            if path == "/session":
                continue
            for headers in ({}, {"Authorization": "Bearer skv_wrong"}):
                for kind in ("application/json", "multipart/form-data; boundary=x", "text/plain"):
                    sent = {**headers, "Content-Type": kind}
                    answer = await client.request(
                        method, path, content=unread(read if method != "GET" else []), headers=sent
                    )
                    assert answer.status_code == 401 or method == "GET", (method, path, answer.status_code)
                    assert read == [], (method, path, headers, kind)
        assert (read, house.parsed) == ([], [])


async def test_nothing_is_read_above_a_rate(house: House) -> None:
    read: list[int] = []
    async with house.client() as client:
        statuses = [(await client.post(house.asks, content=b"{}", headers=house.key)).status_code for _ in range(101)]
        assert (statuses[0] != 429, statuses[-1]) == (True, 429)
        refused = await client.post(house.asks, content=unread(read), headers=house.key)
    assert (refused.status_code, read) == (429, [])
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    "body",
    [
        MANY_LISTS[: 1 << 20],
        MANY_LISTS,
        b'{"a": [' + b'"",' * 200_000 + b'""]}',
        b"[" * (1 << 20),
        b"[" + b"1," * 400_000,
    ],
    ids=["cut", "lists", "strings", "deep", "numbers"],
)
async def test_what_has_too_many_values_is_not_parsed(house: House, body: bytes) -> None:
    async with house.client() as client:
        answer = await client.post(house.asks, content=body, headers=house.key)
    assert (answer.status_code, house.parsed, house.held) == (413, [], 0), answer.text[:300]


async def test_bodies_under_way_are_bounded(house: House) -> None:
    """Slow bodies of one key take only its share; probes are answered meanwhile; bodies that end free their bytes."""
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"name": "' + b"x" * 800_000
        await go_on.wait()
        yield b'"}'

    async with house.client() as client:
        waiting = [asyncio.create_task(client.post(house.asks, content=slow(), headers=house.key)) for _ in range(40)]
        while len(waiting) - sum(task.done() for task in waiting) > 20 or not house.held:
            await asyncio.sleep(0.001)
        assert (await client.get(house.lives)).status_code == 200
        assert house.held <= 16 << 20
        go_on.set()
        answers = [await task for task in waiting]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(refused) < len(answers)
    assert "key 'ann' would have" in refused[0].text
    assert house.held == 0


async def test_a_body_that_does_not_come_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_TIMEOUT_S", 0.01)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with house.client() as client:
        answer = await client.post(house.asks, content=never(), headers=house.key)
    assert (answer.status_code, house.held) == (408, 0)


def test_places_bound_each_key_each_tenant_and_all() -> None:
    limiter = ConcurrencyLimiter("streams", ConcurrencyLimits(per_key=2, per_tenant=3, total=4))
    with ExitStack() as held:
        for tenant, key, refuses in (
            ("a", "1", None),
            ("a", "1", None),
            ("a", "1", "key '1'"),
            ("a", "2", None),
            ("a", "3", "tenant 'a'"),
            ("b", "1", None),
            ("c", "1", "all callers"),
        ):
            if refuses is None:
                held.enter_context(limiter.hold(tenant, key))
            else:
                with pytest.raises(OverloadedError, match=refuses), limiter.hold(tenant, key):
                    pass
        assert limiter.total_held == 4
    assert limiter.total_held == 0
    with (
        ConcurrencyLimiter("bytes", ConcurrencyLimits(1, 2, 100)).hold("a", "1", 50) as allocation,
        pytest.raises(OverloadedError),
    ):
        allocation.grow(1)  # the first is let in at any size, but no second one
