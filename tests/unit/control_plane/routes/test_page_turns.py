"""Pages of lists: one at a time for each tenant."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse

from swiftkv_platform.control_plane.http.lists import NewestFirst, PageTurns


def called(request: Request) -> None:
    request.state.caller = SimpleNamespace(tenant=request.headers["tenant"])


async def test_a_tenants_pages_take_turns_and_keep_no_other_tenant_waiting() -> None:
    app, running, most = FastAPI(dependencies=[Depends(called)]), Counter[str](), Counter[str]()
    app.state.page_turns = PageTurns()

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

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        sent = [client.get("/?limit=7", headers={"tenant": tenant}) for tenant in "ab" * 4]
        answers = await asyncio.gather(*sent)
        refused = await client.get("/?limit=0", headers={"tenant": "a"})
        after = await client.get("/streamed", headers={"tenant": "a"})
    assert [answer.json() for answer in answers] == [7] * 8
    assert most == {"a": 1, "b": 1, "all": 2}
    assert (refused.status_code, after.json()) == (422, 20)
