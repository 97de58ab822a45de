"""Callers and probes are told when the processes of vLLM die."""

from __future__ import annotations

import asyncio

import httpx

from swiftkv_platform.serve.vllm_engine import VLLMEngine
from tests.contract.serving.generate import app, check_death, client, ended, engine_config, model_dir, post

__all__ = ["app", "client", "ended", "engine_config", "model_dir"]


async def test_a_dead_engine_is_unhealthy_and_says_so(client: httpx.AsyncClient, engine: VLLMEngine) -> None:
    assert (await post(client, prompt=[1], max_tokens=2)).status_code == 200
    [process] = engine.llm.engine_core.resources.engine_manager.processes

    async def kill_while_it_answers() -> None:
        while not engine.state.num_running:
            await asyncio.sleep(0)
        process.kill()

    killing = asyncio.create_task(kill_while_it_answers())
    await check_death(client)
    await killing
