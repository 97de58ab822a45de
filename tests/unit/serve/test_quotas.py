"""Limits of keys: even refill, settled reservations, separate tenants; over HTTP with a tiny model."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from swiftkv_platform.engine import AsyncLLMEngine
from swiftkv_platform.errors import RateLimitedError
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.access import Quota
from swiftkv_platform.serve.tracing import RequestLogger
from tests.contract.serving.replicas import application, asgi_client, version_of

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_fill_evenly_and_one_too_many_does_not_count() -> None:
    clock = Clock()
    quota = Quota("ann", 6, None, clock)
    for _ in range(6):
        quota.count_request()
    for _ in range(2):
        with pytest.raises(RateLimitedError, match=r"6 requests per minute; try again in 10.0 s") as caught:
            quota.count_request()
        assert caught.value.retry_after_s == pytest.approx(10.0)
    clock.now += 10.0
    quota.count_request()
    with pytest.raises(RateLimitedError):
        quota.count_request()
    clock.now += 3600.0
    full = {"limit": "6", "remaining": "6", "reset": "0.000s"}
    assert quota.make_rate_limit_headers() == {f"x-ratelimit-{name}-requests": value for name, value in full.items()}


def test_tokens_are_held_until_it_is_known_what_an_answer_took() -> None:
    clock = Clock()
    quota = Quota("ann", None, 100, clock)
    first = quota.reserve_tokens(80)
    with pytest.raises(RateLimitedError, match="100 tokens per minute"):
        quota.reserve_tokens(40)
    first.settle(30)
    first.settle(0)
    assert quota.make_rate_limit_headers()["x-ratelimit-remaining-tokens"] == "70"
    quota.reserve_tokens(70).settle(130)
    with pytest.raises(RateLimitedError) as caught:
        quota.reserve_tokens(1)
    assert caught.value.retry_after_s == pytest.approx(0.6 * 61), "the balance is negative"
    clock.now += 60.0
    quota.reserve_tokens(40)


def test_an_answer_longer_than_a_minutes_worth_waits_for_a_full_bucket() -> None:
    clock = Clock()
    quota = Quota("ann", None, 100, clock)
    quota.reserve_tokens(1000).settle(200)
    with pytest.raises(RateLimitedError) as caught:
        quota.reserve_tokens(1000)
    clock.now += caught.value.retry_after_s
    quota.reserve_tokens(1000)


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """A limited key and another one, of two tenants."""
    path, limits = tmp_path / "keys.json", {"requests_per_minute": 4, "tokens_per_minute": 40}
    tenants = {"limited": ("ann", "a", limits), "free": ("bob", "b", {})}
    generate = frozenset({Scope.GENERATE})
    return {
        token: create_key(path, name=name, tenant=tenant, scopes=generate, **limits)
        for token, (name, tenant, limits) in tenants.items()
    }


@pytest.fixture
def client(engine: AsyncLLMEngine, tmp_path: Path, tokens: dict[str, str]) -> httpx.AsyncClient:
    version = version_of(engine, manifest_digest="abc")
    return asgi_client(application(version, observers=[RequestLogger()], key_ring=KeyRing(tmp_path / "keys.json")))


async def complete(client: httpx.AsyncClient, token: str, **body: Any) -> httpx.Response:
    body = {"model": "mdl_1", "prompt": [1], **GREEDY, **body}
    return await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {token}"})


async def test_a_key_that_has_spent_its_minute_is_told(client: httpx.AsyncClient, tokens: dict[str, str]) -> None:
    first = await complete(client, tokens["limited"])
    limits = {"limit-requests": "4", "remaining-requests": "3", "limit-tokens": "40"}
    assert first.status_code == 200
    assert {name: first.headers[f"x-ratelimit-{name}"] for name in limits} == limits
    assert (await complete(client, tokens["limited"], max_tokens=30)).status_code == 200
    refused = await complete(client, tokens["limited"], max_tokens=30)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limited")
    # 9 + 31 of 40 tokens are spent, and 31 are asked for.
    assert 1 <= int(refused.headers["retry-after"]) <= 47
    assert refused.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await complete(client, tokens["free"])).status_code == 200, "another tenant is not held back"
    assert "x-ratelimit-limit-requests" not in (await complete(client, tokens["free"])).headers


async def test_requests_count_on_every_route_and_streams_settle_their_tokens(
    client: httpx.AsyncClient, tokens: dict[str, str]
) -> None:
    headers = {"Authorization": f"Bearer {tokens['limited']}"}
    body = {"prompt": "a", "stop_token_ids": list(range(258)), **GREEDY, "max_tokens": 38}
    for _ in range(2):  # each reserves 38 tokens and spends 2
        streamed = await client.post("/generate", json={**body, "stream": True}, headers=headers)
        assert streamed.status_code == 200
    for _ in range(2):
        assert (await client.post("/tokenize", json={"prompt": "a"}, headers=headers)).status_code == 200
    assert (await client.get("/v1/models", headers=headers)).status_code == 200
    refused = await client.post("/generate", json=body, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
    assert "4 requests per minute" in refused.json()["detail"]


async def test_what_is_not_admitted_takes_no_tokens(client: httpx.AsyncClient, tokens: dict[str, str]) -> None:
    assert (await complete(client, tokens["limited"], prompt=[999], max_tokens=38)).status_code == 400
    assert (await complete(client, tokens["limited"], max_tokens=39)).status_code == 200


async def test_a_request_is_a_log_line_without_its_text(client: httpx.AsyncClient, tokens: dict[str, str]) -> None:
    with structlog.testing.capture_logs() as lines:
        await complete(client, tokens["free"], prompt="secret")
        await complete(client, tokens["free"], prompt=[999])
        await complete(client, tokens["free"], user="me", best_of=1)
    finished, refused, last = [line for line in lines if line["event"] == "request"]
    assert "ignored_fields" not in finished
    assert last["ignored_fields"] == ("user", "best_of")
    expected = {"outcome": "finished", "finish_reasons": ["length"], "tenant": "b", "path": "/v1/completions"}
    expected |= {"model": "mdl_1", "manifest_digest": "abc"}
    expected |= {"prompt_tokens": 6, "completion_tokens": 8, "early_exit_tokens": 0}
    assert {name: finished[name] for name in expected} == expected
    assert 0 <= finished["queue_ms"] <= finished["ttft_ms"] <= finished["total_ms"]
    assert (refused["outcome"], refused["field"], refused["tenant"]) == ("invalid_input", "prompt", "b")
    assert "secret" not in str(lines)
