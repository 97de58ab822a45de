"""Limits of keys: even refill, reservations that are settled, tenants apart; over HTTP with a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import structlog

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.errors import RateLimitedError
from swiftkv_platform.security.keys import ApiKey, KeyRing, Scope, create_key
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.quotas import Quota, Quotas
from swiftkv_platform.serve.request_logs import RequestLog
from tests.unit.engine.tiny_models import save_swiftkv

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(**limits: int) -> ApiKey:
    return ApiKey(name="ann", scopes=frozenset({Scope.GENERATE}), sha256="0" * 64, **limits)


def test_requests_fill_evenly_and_one_too_many_does_not_count() -> None:
    clock = Clock()
    quota = Quota(key(requests_per_minute=6), clock)
    for _ in range(6):
        quota.count_request()
    for _ in range(2):
        with pytest.raises(RateLimitedError, match=r"6 requests a minute; try again in 10.0 s") as caught:
            quota.count_request()
        assert caught.value.retry_after_s == pytest.approx(10.0)
    clock.now += 10.0
    quota.count_request()
    with pytest.raises(RateLimitedError):
        quota.count_request()
    clock.now += 3600.0
    assert quota.headers() == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "6",
        "x-ratelimit-reset-requests": "0.000s",
    }


def test_tokens_are_held_until_it_is_known_what_an_answer_took() -> None:
    clock = Clock()
    quota = Quota(key(tokens_per_minute=100), clock)
    first = quota.reserve_tokens(80)
    with pytest.raises(RateLimitedError, match="100 tokens a minute"):
        quota.reserve_tokens(40)
    first.settle(30)
    first.settle(0)
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "70"
    quota.reserve_tokens(70).settle(130)
    with pytest.raises(RateLimitedError) as caught:
        quota.reserve_tokens(1)
    assert caught.value.retry_after_s == pytest.approx(0.6 * 61), "more was taken than there was"
    clock.now += 60.0
    quota.reserve_tokens(40)


def test_an_answer_longer_than_a_minutes_worth_waits_for_a_full_bucket() -> None:
    clock = Clock()
    quota = Quota(key(tokens_per_minute=100), clock)
    quota.reserve_tokens(1000).settle(200)
    with pytest.raises(RateLimitedError) as caught:
        quota.reserve_tokens(1000)
    clock.now += caught.value.retry_after_s
    quota.reserve_tokens(1000)


def test_a_key_keeps_its_quota_until_its_limits_change() -> None:
    quotas = Quotas(Clock())
    assert quotas.of(key()) is None
    assert quotas.of(key(requests_per_minute=1)) is quotas.of(key(requests_per_minute=1))
    assert quotas.of(key(requests_per_minute=1)) is not quotas.of(key(requests_per_minute=2))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """A limited key and another one, of two tenants."""
    path = tmp_path / "keys.json"
    generate = frozenset({Scope.GENERATE})
    limited = create_key(path, name="ann", tenant="a", scopes=generate, requests_per_minute=4, tokens_per_minute=40)
    return {"limited": limited, "free": create_key(path, name="bob", tenant="b", scopes=generate)}


@pytest_asyncio.fixture
async def client(model_dir: Path, tmp_path: Path, tokens: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, EngineConfig(max_num_seqs=4)))
    card = ModelCard(deployment="dep_1", model="mdl_1", manifest_digest="abc", swiftkv=None, max_model_len=64)
    current = Current(Version(engine, card, created=1), observers=[RequestLog()])
    app = create_http_app(current, key_ring=KeyRing(tmp_path / "keys.json"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve") as client:
        yield client
    await engine.aclose()


async def complete(client: httpx.AsyncClient, token: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return await client.post(
        "/v1/completions", json={"model": "mdl_1", "prompt": [1], **GREEDY, **body}, headers=headers
    )


async def test_a_key_that_has_spent_its_minute_is_told_when_to_come_again(
    client: httpx.AsyncClient, tokens: dict[str, str]
) -> None:
    first = await complete(client, tokens["limited"])
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "4"
    assert first.headers["x-ratelimit-remaining-requests"] == "3"
    assert first.headers["x-ratelimit-limit-tokens"] == "40"
    assert (await complete(client, tokens["limited"], max_tokens=30)).status_code == 200
    refused = await complete(client, tokens["limited"], max_tokens=30)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert refused.json()["error"]["code"] == "rate_limited"
    # 9 + 31 of 40 tokens are gone, 31 are wanted.
    assert 1 <= int(refused.headers["retry-after"]) <= 47
    assert refused.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await complete(client, tokens["free"])).status_code == 200, "another tenant is not held back"
    assert "x-ratelimit-limit-requests" not in (await complete(client, tokens["free"])).headers


async def test_requests_count_on_every_route_and_streams_settle_their_tokens(
    client: httpx.AsyncClient, tokens: dict[str, str]
) -> None:
    headers = {"Authorization": f"Bearer {tokens['limited']}"}
    body = {"prompt": "a", "stop_token_ids": list(range(258)), **GREEDY, "max_tokens": 38}
    for _ in range(2):  # each holds 38 tokens and takes 2
        streamed = await client.post("/generate", json={**body, "stream": True}, headers=headers)
        assert streamed.status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "a"}, headers=headers)).status_code == 200
    assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert (await client.post("/tokenize", json={"prompt": "a"}, headers=headers)).status_code == 200
    refused = await client.post("/generate", json=body, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert "4 requests a minute" in refused.json()["detail"]


async def test_what_is_not_admitted_takes_no_tokens(client: httpx.AsyncClient, tokens: dict[str, str]) -> None:
    assert (await complete(client, tokens["limited"], prompt=[999], max_tokens=38)).status_code == 400
    assert (await complete(client, tokens["limited"], max_tokens=39)).status_code == 200


async def test_a_request_is_one_line_of_the_log_without_its_text(
    client: httpx.AsyncClient, tokens: dict[str, str]
) -> None:
    with structlog.testing.capture_logs() as lines:
        await complete(client, tokens["free"], prompt="secret")
        await complete(client, tokens["free"], prompt=[999])
        await complete(client, tokens["free"], user="me", best_of=1)
    finished, refused, last = [line for line in lines if line["event"] == "request"]
    assert "ignored_fields" not in finished
    assert last["ignored_fields"] == ("user", "best_of")
    assert (finished["outcome"], finished["finish_reasons"]) == ("finished", ["length"])
    assert (finished["tenant"], finished["path"]) == ("b", "/v1/completions")
    assert (finished["model"], finished["manifest_digest"]) == ("mdl_1", "abc")
    assert (finished["prompt_tokens"], finished["completion_tokens"], finished["early_exit_tokens"]) == (6, 8, 0)
    assert 0 <= finished["queue_ms"] <= finished["ttft_ms"] <= finished["total_ms"]
    assert (refused["outcome"], refused["field"], refused["tenant"]) == ("invalid_input", "prompt", "b")
    assert "secret" not in str(lines)
