"""The native engine behind `/generate` and related routes, and what only this engine lets a test see."""

from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from tests.contract.serving.generate import *  # noqa: F403
from tests.contract.serving.generate import check_death
from tests.contract.serving.replicas import application, asgi_client, version_of


async def test_a_dead_engine_is_unhealthy_and_says_so(
    model_dir: Path, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, engine_config))
    steps, step = iter(range(3)), engine.engine.step

    def failing_step() -> Any:
        if next(steps, None) is None:
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(engine.engine, "step", failing_step)
    await check_death(asgi_client(application(version_of(engine))), num_tokens=3)
    await engine.aclose()
