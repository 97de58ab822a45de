"""The native engine for the tests of the HTTP surface, which vLLM passes as well (`tests/outside/serve`)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from tests.unit.engine.tiny_models import save_swiftkv

pytest.register_assert_rewrite("tests.contract.serving")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share its engine, and so its event loop."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SwiftKV student with a context of 64 tokens."""
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    return EngineConfig(max_num_seqs=4, kv_cache_bytes=4 << 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
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
