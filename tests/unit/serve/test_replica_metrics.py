"""A deployment's metrics through the control plane: real pages of real replicas, behind a proxy that takes any."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from swiftkv_platform.cluster.replica_metrics import read_replica_metrics
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from tests.rays import free_port
from tests.servers import serving
from tests.unit.engine.tiny_models import save_swiftkv


def replica(name: str, directory: Path) -> FastAPI:
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(directory, EngineConfig(max_num_seqs=2)))
    card = ModelCard(deployment="dep_1", model="mdl_1", manifest_digest=None, swiftkv=None, max_model_len=64)
    return create_http_app(Current(Version(engine, card, created=1), replica=name))


def proxy(*replicas: str) -> FastAPI:
    """Each request goes to the next replica."""
    app, turns = FastAPI(), itertools.cycle(replicas)

    @app.get("/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{next(turns)}/{path}")
        return Response(answer.content, answer.status_code)

    return app


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """A proxy and the two replicas behind it."""
    directory = save_swiftkv(tmp_path_factory.mktemp("swiftkv"))
    with (
        serving(replica("one", directory)) as first,
        serving(replica("two", directory)) as second,
        serving(proxy(first, first, second)) as front,
    ):
        yield front, first, second


async def test_every_replica_is_asked_and_told_apart(urls: tuple[str, str, str]) -> None:
    front, _, second = urls
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
    assert httpx.post(f"{second}/generate", json=body, timeout=60).status_code == 200
    found = {metrics.replica: metrics.values for metrics in await read_replica_metrics(front, 2)}
    assert found.keys() == {"one", "two"}
    assert [found[name]["generation_tokens_total"] for name in ("one", "two")] == [0, 5]
    assert [found[name]["time_to_first_token_seconds_count"] for name in ("one", "two")] == [0, 1]
    assert found["two"]["request_success_total"] == 1
    assert found["one"]["kv_cache_usage_perc"] == 0
    assert not any("bucket" in name for name in found["one"])


async def test_fewer_replicas_than_thought_end_the_search(urls: tuple[str, str, str]) -> None:
    _, first, _ = urls
    assert [metrics.replica for metrics in await read_replica_metrics(first, 3)] == ["one"]


async def test_nobody_there_is_an_error_that_names_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ClusterUnavailableError, match=url):
        await read_replica_metrics(url, 1)
