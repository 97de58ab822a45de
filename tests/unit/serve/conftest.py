"""The native engine for the tests of the HTTP surface, which vLLM passes as well (`tests/outside/serve`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine

pytest.register_assert_rewrite("tests.surface")


@pytest_asyncio.fixture
async def engine(model_dir: Path, engine_config: EngineConfig) -> AsyncIterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, engine_config))
    yield engine
    await engine.aclose()


@pytest.fixture
def idle(engine: AsyncLLMEngine) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        while engine.engine.has_unfinished_requests:
            await asyncio.sleep(0.001)
        assert engine.engine.num_free_blocks == engine.engine.num_blocks
        assert engine.num_requests == 0

    return wait
