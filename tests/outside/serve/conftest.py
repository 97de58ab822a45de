"""vLLM's engine on a CPU, for the HTTP tests that the native engine also passes (`tests/unit/serve`)."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from swiftkv_platform.engine import EngineConfig, SamplingParams
from swiftkv_platform.serve.vllm_engine import VLLMEngine, load_vllm
from tests.support.rays import become_a_driver

become_a_driver()
pytest.register_assert_rewrite("tests.contract.serving")


@pytest.fixture(scope="session")
def variables() -> dict[str, str]:
    """Extra environment of the tests' Ray: none, since no object store is needed."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path, engine_config: EngineConfig) -> AsyncIterator[VLLMEngine]:
    """An engine in processes of its own, without compilation, so that it starts in seconds."""
    engine = await asyncio.to_thread(load_vllm, model_dir, engine_config, enforce_eager=True)
    yield engine
    await engine.aclose()


@pytest.fixture
def idle(engine: VLLMEngine) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        """Wait until vLLM's cache is empty; a short request makes its scheduler report the usage."""
        while engine.llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.001)
        outputs = [output async for output in await engine.submit([9], SamplingParams(max_tokens=1, ignore_eos=True))]
        assert outputs[-1].finished
        assert engine.llm.get_num_unfinished_requests() == engine.num_requests == 0
        while engine._stats.kv_cache_usage:
            await asyncio.sleep(0.001)

    return wait
