"""Middleware: delays of refusals, the more of them a caller has under way."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swiftkv_platform.web.middleware import LARGE_BODY_BYTES, RefusalBackoff


async def test_who_sends_many_waits_for_each_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: dict[str, list[float]] = {"eve": [], "ann": []}
    sleep, all_wait = asyncio.sleep, asyncio.Event()

    async def wait(seconds: float) -> None:
        waits[str(asyncio.current_task().get_name())].append(round(seconds, 3))  # type: ignore[union-attr]
        if sum(map(len, waits.values())) == 32:
            all_wait.set()
        await all_wait.wait()

    async def answer(request: Request) -> Response:
        return Response(status_code=int(request.path_params["status"]))

    app = Starlette(routes=[Route("/{status}", answer)])
    app.add_middleware(RefusalBackoff, statuses=(413, 429))
    monkeypatch.setattr("swiftkv_platform.web.middleware.asyncio.sleep", wait)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:

        def ask(name: str, status: int, body: bytes = b"") -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {name}"}
            asked = client.request("GET", f"/{status}", headers=headers, content=body)
            return asyncio.create_task(asked, name=name)

        others = [ask("eve", status) for status in (200, 401, 404, 422)]
        refused = [ask("eve", status) for status in (429, 413) * 15]
        await sleep(0)
        assert [(await task).status_code for task in others] == [200, 401, 404, 422]
        refused += [ask("ann", 429), ask("ann", 422, b" " * (LARGE_BODY_BYTES + 1))]
        assert [(await task).status_code for task in refused] == [429, 413] * 15 + [429, 422]
    assert waits["eve"] == [round(min(0.1 * number, 2.0), 3) for number in range(1, 31)]
    assert waits["ann"] == [0.1, 0.2]
