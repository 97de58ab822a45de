"""A tenant's requests take turns: those that read, and those that submit."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.responses import StreamingResponse
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, field_validator

from swiftkv_platform.control_plane.access import callers
from swiftkv_platform.control_plane.access.callers import ReadingCaller, SubmittingCaller
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.errors import OverloadedError
from swiftkv_platform.settings import Settings
from swiftkv_platform.web import limiters
from swiftkv_platform.web.limiters import TenantConcurrencyLimiter

BOUNDED_OTHERWISE = {
    "POST /deployments/{deployment_id}/chat/completions": "streams",
    "POST /deployments/{deployment_id}/generate": "streams",
    "POST /models/import": "uploads",
    "POST /v1/files": "uploads",
}


class Body(BaseModel):
    item: int

    @field_validator("item")
    @classmethod
    def _checked_in_a_turn(cls, value: int) -> int:
        checked.append(place._value)
        return value


place = asyncio.Semaphore(0)
checked: list[int] = []


async def test_a_tenants_requests_of_a_kind_take_turns_and_keep_no_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def called(request: Request, *_: object) -> Any:
        return SimpleNamespace(tenant=request.headers["tenant"])

    monkeypatch.setattr(callers, "get_caller", called)
    monkeypatch.setattr(limiters, "PAUSE_RATIO", 0.0)
    app, running, most = FastAPI(), Counter[str](), Counter[str]()
    app.state.concurrency_limiter = taken = TenantConcurrencyLimiter()

    @app.get("/")
    async def items(request: Request, _caller: ReadingCaller) -> None:
        tenant = request.headers["tenant"]
        running[tenant] += 1
        most[tenant] = max(most[tenant], running[tenant])
        most["all"] = max(most["all"], running.total())
        await asyncio.sleep(0.01)
        running[tenant] -= 1

    @app.get("/streamed")
    async def streamed(_caller: ReadingCaller) -> StreamingResponse:
        async def numbers() -> AsyncIterator[str]:
            yield str((await client.get("/", headers={"tenant": "a"})).status_code)

        return StreamingResponse(numbers())

    @app.post("/")
    async def submitted(_body: Body, _caller: SubmittingCaller) -> int:
        return (await client.get("/", headers={"tenant": "a"})).status_code  # reads do not wait for submissions

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"tenant": "a"}) as client:
        assert (await client.post("/", json={"item": 1})).json() == 200
        monkeypatch.setitem(globals(), "place", taken._semaphores["a", "submitting"])
        for body, status in (({"item": 1}, 200), ({}, 422), ({"item": 1}, 200)):
            assert (await client.post("/", json=body)).status_code == status
        sent = [client.get("/", headers={"tenant": tenant}) for tenant in "ab" * 4]
        assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
        assert (await client.get("/streamed")).text == "200"
    assert most == {"a": 1, "b": 1, "all": 2}
    assert checked[1:] == [0, 0]


def test_every_route_with_a_key_takes_turns_or_is_bounded_otherwise(tmp_path: Path) -> None:
    """A stream is held before a turn is taken: one too many is refused at once, without reading its job."""
    without, streamed = set[str](), set[str]()
    for route in iter_route_contexts(create_app(Settings(home=tmp_path, _env_file=None)).routes):
        if (dependant := getattr(route, "dependant", None)) is None:
            continue
        calls = [{getattr(one.call, "__name__", "") for one in _inside(each)} for each in dependant.dependencies]
        names = set().union(*calls)
        if "get_caller" in names:
            without.update(f"{method} {route.path}" for method in route.methods)
        assert not {"get_caller", "hold_slot"} <= names, route.path
        held, taken = (
            [at for at, each in enumerate(calls) if name in each] for name in ("hold_stream_slot", "hold_slot")
        )
        if held and taken:
            streamed.add(route.path)
            assert held[0] < taken[0], route.path
    assert without == set(BOUNDED_OTHERWISE)
    assert {"/jobs/{job_id}/events", "/jobs/{job_id}/logs", "/v1/files/{file_id}/content"} <= streamed


def _inside(dependant: Dependant) -> list[Dependant]:
    return [dependant, *(one for each in dependant.dependencies for one in _inside(each))]


async def test_between_two_turns_of_a_tenant_others_have_twice_the_time() -> None:
    taken, loop = TenantConcurrencyLimiter(), asyncio.get_running_loop()
    async with taken.acquire("a", "reading"):
        began = loop.time()
        await asyncio.sleep(0.03)
        took = loop.time() - began
    ended = loop.time()
    async with taken.acquire("a", "reading"):
        assert loop.time() - ended >= (min(took, 0.03) - limiters.MIN_SECONDS_BEFORE_PAUSE) * 2 * 0.9


async def test_one_that_would_wait_behind_too_many_is_refused_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limiters, "MAX_QUEUED", 2)
    taken, done = TenantConcurrencyLimiter(), asyncio.Event()

    async def ask(tenant: str) -> None:
        async with taken.acquire(tenant, "reading"):
            await done.wait()

    asked = [asyncio.create_task(ask("a")) for _ in range(4)]
    refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [type(each.exception()) for each in refused] == [OverloadedError]
    other = asyncio.create_task(ask("b"))
    done.set()
    await asyncio.gather(*(each for each in asked if each not in refused), other)
