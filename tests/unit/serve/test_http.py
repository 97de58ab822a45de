"""The native engine behind `/generate` and its like, and what only it lets a test see."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from swiftkv_platform.engine import AsyncLLMEngine
from tests.surface.generate import *  # noqa: F403
from tests.surface.generate import Idle, check_death, leave_a_stream


async def test_a_dead_engine_is_unhealthy_and_says_so(
    client: httpx.AsyncClient, engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = iter(range(3)), engine.engine.step

    def failing_step() -> Any:
        if next(steps, None) is None:
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(engine.engine, "step", failing_step)
    await check_death(client, num_tokens=3)


async def test_no_step_is_made_for_a_client_that_has_left(
    app: FastAPI, engine: AsyncLLMEngine, idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [], engine.engine.step

    def counted_step() -> Any:
        steps.append(1)
        return step()

    monkeypatch.setattr(engine.engine, "step", counted_step)
    await leave_a_stream(app)
    await idle()
    assert len(steps) < 60
