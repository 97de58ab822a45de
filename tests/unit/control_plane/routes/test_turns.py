"""Requests that read rows, and such that submit: one at a time for each tenant."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

from swiftkv_platform.control_plane.http.lists import NewestFirst
from swiftkv_platform.control_plane.http.turns import SubmittingTurn, Turns


def called(request: Request) -> None:
    request.state.caller = SimpleNamespace(tenant=request.headers["tenant"])


async def test_a_tenants_pages_take_turns_and_keep_no_other_tenant_waiting() -> None:
    app, running, most = FastAPI(dependencies=[Depends(called)]), Counter[str](), Counter[str]()
    app.state.turns = Turns()

    @app.get("/")
    async def items(request: Request, page: NewestFirst) -> int:
        tenant = request.headers["tenant"]
        running[tenant] += 1
        most[tenant] = max(most[tenant], running[tenant])
        most["all"] = max(most["all"], running.total())
        await asyncio.sleep(0.01)
        running[tenant] -= 1
        return page.limit

    @app.get("/streamed")
    async def streamed(page: NewestFirst) -> StreamingResponse:
        async def numbers() -> AsyncIterator[str]:
            yield (await client.get("/", headers={"tenant": "a"})).text

        return StreamingResponse(numbers())

    @app.post("/")
    async def submitted(_turn: SubmittingTurn) -> str:
        return (await client.get("/", headers={"tenant": "a"})).text  # what reads waits for none that submits

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post("/", headers={"tenant": "a"})).is_success
        sent = [client.get("/?limit=7", headers={"tenant": tenant}) for tenant in "ab" * 4]
        answers = await asyncio.gather(*sent)
        refused = await client.get("/?limit=0", headers={"tenant": "a"})
        after = await client.get("/streamed", headers={"tenant": "a"})
    assert [answer.json() for answer in answers] == [7] * 8
    assert most == {"a": 1, "b": 1, "all": 2}
    assert (refused.status_code, after.json()) == (422, 20)


async def test_between_two_turns_of_a_tenant_others_have_as_much_time() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    async with turns.turn("a", "reading"):
        began = loop.time()
        await asyncio.sleep(0.03)
        took = loop.time() - began
    ended = loop.time()
    async with turns.turn("a", "reading"):
        assert loop.time() - ended >= min(took, 0.03) * 0.9
