"""One key cannot take a replica: whatever it keeps busy, another key's requests are answered, on every route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from tests.contract.serving.replicas import application, save_chat_model, version_of

CONTEXT = 2048
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = {"model": "mdl_1", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
PATIENCE_S = 60.0
NUM_ATTACKERS = 80
"""Requests at a time, more than the 72 places of one caller."""
PATHS: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True},
    "/v1/completions": {"model": "mdl_1", "prompt": [1, 2], "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "mdl_1", "input": "a", "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {key: value for key, value in CHAT.items() if key != "max_tokens"},
    "/tokenize": {"prompt": "a b c"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""A small request for each route that takes part in a replica's work."""
TEXT = "a few words, again and again " * 60


def schema(number: int) -> dict[str, Any]:
    """A constraint that no other request has, so that it must be compiled."""
    return {"structured_outputs": {"regex": f"(a|b)*{number}"}}


ATTACKS: dict[str, Callable[[int], tuple[str, dict[str, Any]]]] = {
    "samples": lambda _: ("/generate", {"prompt": [1], "n": 32, "max_tokens": 2000, "ignore_eos": True}),
    "samples of nearly all places": lambda _: (
        "/generate",
        {"prompt": [1], "n": 64, "max_tokens": 2000, "ignore_eos": True},
    ),
    "prompts": lambda _: ("/v1/completions", {"model": "mdl_1", "prompt": [[1]] * 72, "max_tokens": 2000}),
    "long prompts": lambda at: ("/generate", {"prompt": [at % 250] * 2000, "max_tokens": 40, "ignore_eos": True}),
    "streams": lambda _: ("/generate", {"prompt": [1], "n": 8, "max_tokens": 2000, "ignore_eos": True, "stream": True}),
    "texts": lambda _: ("/tokenize", {"prompt": TEXT}),
    "tokens": lambda _: ("/detokenize", {"tokens": [100] * 2000}),
    "chats": lambda _: ("/v1/messages/count_tokens", {**PATHS["/v1/messages/count_tokens"], "system": TEXT}),
    "grammars": lambda at: ("/generate", {"prompt": [1, 2], "max_tokens": 4, **schema(at)}),
}
"""Requests of which one key sends as many as it can."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat"), CONTEXT, TEMPLATE)


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[AsyncLLMEngine]:
    config = EngineConfig(max_num_seqs=8, max_num_waiting=64, max_num_batched_tokens=256, kv_cache_bytes=8 << 20)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, config))
    yield engine
    await engine.aclose()


Clients = dict[str, httpx.AsyncClient]


@pytest.fixture(params=["tenants", "keys", "addresses"])
def clients(engine: AsyncLLMEngine, tmp_path: Path, request: pytest.FixtureRequest) -> Clients:
    """Two callers: keys of two tenants, keys of one tenant, or addresses without keys."""
    if request.param == "addresses":
        app = application(version_of(engine, context=CONTEXT))
        return {
            name: client_of(app, address, {}) for name, address in (("eve", "198.51.100.1"), ("ann", "198.51.100.2"))
        }
    path, scopes = tmp_path / "keys.json", frozenset({Scope.GENERATE})
    tokens = {
        name: create_key(path, name=name, tenant=name if request.param == "tenants" else "acme", scopes=scopes)
        for name in ("eve", "ann")
    }
    app = application(version_of(engine, context=CONTEXT), key_ring=KeyRing(path))
    return {name: client_of(app, "198.51.100.1", {"authorization": f"Bearer {key}"}) for name, key in tokens.items()}


def client_of(app: Any, address: str, headers: dict[str, str]) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers, timeout=PATIENCE_S)


async def keep_sending(client: httpx.AsyncClient, attack: str, number: int) -> None:
    while True:
        path, body = ATTACKS[attack](number)
        answer = await client.post(path, json=body)
        assert answer.status_code in (200, 429), answer.text
        number += NUM_ATTACKERS
        await asyncio.sleep(1.0 if answer.status_code == 429 else 0.0)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_one_caller_cannot_keep_another_out(clients: Clients, engine: AsyncLLMEngine, attack: str) -> None:
    attacking = [asyncio.create_task(keep_sending(clients["eve"], attack, at)) for at in range(NUM_ATTACKERS)]
    try:
        await asyncio.sleep(0.3)
        for path, body in PATHS.items():
            answers = await within_patience(asyncio.gather(*(clients["ann"].post(path, json=body) for _ in range(2))))
            assert [answer.status_code for answer in answers] == [200] * 2, (path, answers[0].text)
        constrained = {"prompt": [1, 2], "max_tokens": 4, **schema(7)}
        answer = await within_patience(clients["ann"].post("/generate", json=constrained))
        assert answer.status_code == 200, answer.text
        assert not any(task.done() for task in attacking), "the attack has ended"
    finally:
        for task in attacking:
            task.cancel()
        await asyncio.gather(*attacking, return_exceptions=True)


async def within_patience(answering: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(answering, PATIENCE_S)


async def test_a_refusal_names_the_share_that_is_used_up(clients: Clients) -> None:
    body = {"prompt": [1], "n": 60, "max_tokens": 2000, "ignore_eos": True}
    first = asyncio.create_task(clients["eve"].post("/generate", json=body))
    await asyncio.sleep(0.2)
    refused = await clients["eve"].post("/generate", json=body)
    assert (refused.status_code, "60 of 72 sequences of caller" in refused.text) == (429, True), refused.text
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
