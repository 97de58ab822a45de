"""Versions served by vLLM: fetched and verified before it loads them, swapped live, and their processes ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import swiftkv_platform.serve.vllm_engine
from swiftkv_platform.errors import ModelError
from swiftkv_platform.serve.args import ReplicaArgs, ServedConfig
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState
from swiftkv_platform.serve.versions import VersionSwapper, load_version
from tests.contract.serving.generate import greedy
from tests.contract.serving.replicas import artifact, asgi_client, digest
from tests.unit.engine.tiny_models import save_swiftkv

__all__ = ["artifact"]

ENGINE = {"backend": "vllm", "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_bytes": 4 << 20}
LONG = {"prompt": [1, 2, 3], "max_tokens": 50, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve versions without compilation, so that they start in seconds."""
    load: Callable[..., Any] = swiftkv_platform.serve.vllm_engine.load_vllm
    monkeypatch.setattr(swiftkv_platform.serve.vllm_engine, "load_vllm", lambda *args: load(*args, enforce_eager=True))


async def load(served: ServedConfig) -> ModelVersion:
    return await load_version(ReplicaArgs(id="dep_1"), served)


def document(artifact: Path, name: str, **engine: Any) -> dict[str, Any]:
    return {"model": name, "artifact_uri": str(artifact), "revision": name, "engine": engine}


async def test_a_version_is_swapped_from_engine_to_engine_under_a_running_request(
    artifact: Path, tmp_path: Path, eager: None
) -> None:
    current = ReplicaState()
    swaps, client = VersionSwapper(current, load), asgi_client(create_http_app(current))
    expected = greedy(LONG["prompt"], tmp_path / "model", LONG["max_tokens"])

    async def ask() -> tuple[str, list[int]]:
        answer = (await client.post("/generate", json=LONG)).raise_for_status().json()
        return answer["model"], answer["choices"][0]["token_ids"]

    await swaps.request_version(document(artifact, "one", **ENGINE))
    assert current.version.engine.backend == "vllm"
    health = (await client.get("/health")).json()
    assert health["manifest_digest"] == digest(artifact)
    assert health["swiftkv"] == {"num_hidden_layers": 4, "num_key_value_layers": 2, "key_value_group_size": 2}
    for name, engine in (("two", {"backend": "native"}), ("three", {**ENGINE, "max_num_seqs": 2})):
        before = current.version
        await swaps.request_version(document(artifact, name, **engine))
        answers = []
        while current.version is before:
            answers.append(await ask())
            await asyncio.sleep(0.1)
        assert current.swap.status == "done", current.swap.message
        assert (await ask()) == (name, expected)
        assert answers
        assert all(model in (before.model_info.model, name) and tokens == expected for model, tokens in answers)
        while before.engine.num_requests or before.engine._failure is None:
            await asyncio.sleep(0.05)
    await swaps.request_version(document(artifact, "bad", **ENGINE, max_model_len=65))
    while current.swap.status == "loading":
        await asyncio.sleep(0.05)
    assert (current.swap.status, current.version.model_info.model) == ("refused", "three")
    assert "max_model_len is 65" in current.swap.message
    await current.version.drain()
    processes = psutil.Process().children()
    assert not [one for one in processes if one.status() == psutil.STATUS_ZOMBIE], "old versions leave no zombies"


async def test_a_device_that_vllm_was_not_built_for_is_refused(artifact: Path) -> None:
    with pytest.raises(ModelError, match="built for 'cpu'") as caught:
        await VersionSwapper(ReplicaState(), load).request_version(document(artifact, "one", **ENGINE, device="cuda"))
    assert caught.value.field == "engine.device"


HOLD = """
import sys, time
from pathlib import Path
from swiftkv_platform.serve.vllm_engine import load_vllm
from swiftkv_platform.engine import EngineConfig

if __name__ == "__main__":
    config = EngineConfig(max_num_batched_tokens=64, kv_cache_bytes=4 << 20)
    engine = load_vllm(Path(sys.argv[1]), config, enforce_eager=True)
    [process] = engine.llm.engine_core.resources.engine_manager.processes
    print("started", process.pid, flush=True)
    time.sleep(600)
"""


def test_vllms_processes_end_with_a_replica_that_is_killed(tmp_path: Path) -> None:
    save_swiftkv(tmp_path / "model")
    (tmp_path / "hold.py").write_text(HOLD)
    command = [sys.executable, str(tmp_path / "hold.py"), str(tmp_path / "model")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as replica:
        assert replica.stdout is not None
        line = next(line for line in replica.stdout if line.startswith("started"))
        core = int(line.split()[1])
        os.kill(core, 0)
        replica.send_signal(signal.SIGKILL)
    while _runs(core):
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
