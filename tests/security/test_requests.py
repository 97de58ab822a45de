"""Hostile requests to a replica: refused by their size, before they are tokenized and beside the engine's thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from transformers import PreTrainedTokenizerFast

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from tests.unit.engine.tiny_models import CONTEXT, save_swiftkv

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MODEL = "mdl_1"
LONG = "x" * 300_000
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"properties": {"a": DEEP}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


@pytest_asyncio.fixture
async def engine(model_dir: Path) -> AsyncIterator[AsyncLLMEngine]:
    config = EngineConfig(max_num_seqs=4, max_num_waiting=4, stream_interval_s=0.0)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, config))
    tokenizer: Any = engine.engine.tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    yield engine
    await engine.aclose()


@pytest.fixture
def current(engine: AsyncLLMEngine) -> Current:
    card = ModelCard(deployment="dep_1", model=MODEL, manifest_digest=None, swiftkv=None, max_model_len=CONTEXT)
    return Current(Version(engine, card, created=1))


@pytest_asyncio.fixture
async def client(current: Current) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_http_app(current))
    async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
        yield client


@pytest.fixture
def encoded_by(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads in which texts were tokenized, one entry a call; the tokenizer itself is the real one."""
    return _recorded(monkeypatch, "_encode_plus")


@pytest.fixture
def decoded_by(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same of token ids that were made text."""
    return _recorded(monkeypatch, "_decode")


def _recorded(monkeypatch: pytest.MonkeyPatch, method: str) -> list[str]:
    names: list[str] = []
    original = getattr(PreTrainedTokenizerFast, method)

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(threading.current_thread().name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, method, recording)
    return names


def text_of_many(count: int, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": "a"}] * count


def field_of(response: httpx.Response) -> str:
    document = response.json()
    return str(document["error"]["param"] if "error" in document else document["errors"][0]["field"])


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"prompt": LONG}, "prompt"),
    ("/generate", {"prompt": ["short", LONG]}, "prompt"),
    ("/generate", {"prompt": ["short", ""]}, "prompt"),
    ("/generate", {"prompt": [1] * 50_000}, "prompt"),
    ("/generate", {"prompt": [[1], [1] * 50_000]}, "prompt"),
    ("/generate", {"prompt": ["a"] * 10_000}, "prompt"),
    ("/generate", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/generate", {"messages": [{"role": "user", "content": "x" * 200}] * 2}, "messages"),
    ("/generate", {"messages": text_of_many(5000)}, "messages"),
    ("/generate", {"messages": [{"role": LONG, "content": ""}]}, "messages"),
    ("/v1/completions", {"prompt": LONG, "echo": True}, "prompt"),
    ("/v1/completions", {"prompt": [1] * 50_000, "echo": True, "logprobs": 5}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/chat/completions", {"messages": text_of_many(5000)}, "messages"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/detokenize", {"tokens": [1] * 50_000}, "tokens"),
    ("/detokenize", {"tokens": ["a"] * 20_000}, "tokens"),
    ("/generate", {"prompt": "a", "stop": [f"{number}" for number in range(20_000)]}, "stop"),
    ("/generate", {"prompt": "a", "stop": ["a", LONG]}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": LONG}, "stop"),
    ("/generate", {"prompt": "a", "stop_token_ids": [1] * 20_000}, "stop_token_ids"),
    ("/generate", {"prompt": "a", "logit_bias": {str(number): 1.0 for number in range(10_000)}}, "logit_bias"),
    ("/generate", {"prompt": "a", "n": 64}, "n"),
    ("/generate", {"prompt": ["a"] * 64, "n": 64}, "n"),
    ("/v1/completions", {"prompt": ["a"] * 64, "n": 64}, "n"),
    (
        "/generate",
        {"prompt": "a", "structured_outputs": {"choice": [f"{number}" for number in range(20_000)]}},
        "structured_outputs.choice",
    ),
    ("/generate", {"prompt": "a", "structured_outputs": {"choice": ["a", LONG]}}, "structured_outputs.choice"),
    ("/generate", {"prompt": "a", "structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
    ("/generate", {"prompt": "a", "structured_outputs": {"json": json.dumps(DEEP)}}, "structured_outputs.json"),
    ("/generate", {"prompt": "a", "structured_outputs": {"json": {"enum": [LONG]}}}, "structured_outputs.json"),
    ("/generate", {"prompt": "a", "structured_outputs": {"regex": LONG}}, "structured_outputs.regex"),
    ("/generate", {"prompt": "a", "structured_outputs": {"grammar": LONG}}, "structured_outputs.grammar"),
]


@pytest.mark.parametrize(("path", "body", "field"), HOSTILE, ids=lambda value: str(value)[:60])
async def test_what_is_too_large_is_refused_before_it_is_tokenized(
    client: httpx.AsyncClient,
    engine: AsyncLLMEngine,
    encoded_by: list[str],
    decoded_by: list[str],
    path: str,
    body: dict[str, Any],
    field: str,
) -> None:
    body = {"model": MODEL, **body} if path.startswith("/v1") else body
    response = await client.post(path, json=body)
    assert response.status_code in (400, 422), response.text[:500]
    # What is nested too deeply is named by a place inside.
    assert f"{field_of(response)}.".startswith(f"{field}."), response.text[:500]
    assert len(response.content) < 4096, "a refusal does not send back what it was sent"
    assert encoded_by == decoded_by == []
    assert engine.num_requests == 0


async def test_a_refusal_of_a_long_text_names_what_it_has_and_what_fits(client: httpx.AsyncClient) -> None:
    [error] = (await client.post("/generate", json={"prompt": LONG})).json()["errors"]
    # The longest token of this vocabulary is `</s>`, of four bytes.
    assert f"{len(LONG)} bytes" in error["message"]
    assert f"{4 * CONTEXT} bytes" in error["message"]
    longest = "</s>" * (CONTEXT - 1)
    assert (await client.post("/generate", json={"prompt": longest, "max_tokens": 1})).status_code == 200


async def test_texts_are_read_beside_the_engine_and_the_event_loop(
    client: httpx.AsyncClient, encoded_by: list[str], decoded_by: list[str]
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    short = {"max_tokens": 2, "ignore_eos": True}
    logprobs = {"echo": True, "logprobs": 3, "model": MODEL, **short}
    for path, body in (
        ("/generate", {"prompt": ["one", "two"], **short}),
        ("/generate", {"messages": messages, **short}),
        ("/v1/chat/completions", {"messages": messages, "model": MODEL, "logprobs": True, "top_logprobs": 3, **short}),
        ("/v1/completions", {"prompt": "hello", **logprobs}),
        ("/v1/completions", {"prompt": "hello", "stream": True, **logprobs}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
    assert len(encoded_by) == 7
    assert all(name.startswith("reader") for name in encoded_by), encoded_by
    assert threading.main_thread().name not in decoded_by
    assert {"engine", "reader"} >= {name.split("_")[0].split("-")[0] for name in decoded_by}


async def test_the_engine_steps_on_while_a_text_is_read(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer stands still until another caller's answer has ended."""
    may_read, original = threading.Event(), PreTrainedTokenizerFast._encode_plus

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert may_read.wait(60.0)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", waiting)
    reading = asyncio.create_task(engine.submit("text"))
    await asyncio.sleep(0.01)
    answer = [output async for output in engine.generate([1, 2, 3])]
    assert answer[-1].finished
    assert not reading.done()
    may_read.set()
    assert [output async for output in await reading][-1].finished


async def test_a_body_of_many_values_is_not_parsed(client: httpx.AsyncClient, encoded_by: list[str]) -> None:
    for body in (b'{"prompt": [' + b"1," * 450_000 + b"1]}", b'{"a": [' + b'"",' * 300_000 + b'""]}'):
        response = await client.post("/generate", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert "values" in response.json()["detail"]
    assert encoded_by == []


async def test_a_body_may_be_as_large_as_the_context_needs(client: httpx.AsyncClient) -> None:
    """Sixteen MiB are for models that can read them."""
    response = await client.post("/generate", content=b" " * (8 << 20), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    padded = b'{"prompt": [1], "max_tokens": 1' + b" " * 500_000 + b"}"
    response = await client.post("/generate", content=padded, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


class Keyed:
    """A replica that asks for keys."""

    def __init__(self, current: Current, path: Path) -> None:
        self.path = path
        self._current = current

    def create(self, name: str, **limits: Any) -> dict[str, str]:
        token = create_key(self.path, name=name, tenant=name, scopes=frozenset({Scope.GENERATE}), **limits)
        return {"Authorization": f"Bearer {token}"}

    def client(self) -> httpx.AsyncClient:
        app = create_http_app(self._current, key_ring=KeyRing(self.path))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve")


@pytest.fixture
def keyed(current: Current, tmp_path: Path) -> Keyed:
    return Keyed(current, tmp_path / "keys.json")


async def test_a_refusal_is_not_free(keyed: Keyed) -> None:
    headers = keyed.create("ann", requests_per_minute=3) | {"Content-Type": "application/json"}
    async with keyed.client() as client:
        for content in (b" " * (20 << 20), b"{", json.dumps({"prompt": LONG}).encode()):
            assert (await client.post("/generate", content=content, headers=headers)).status_code in (413, 422)
        assert (await client.post("/generate", json={"prompt": [1]}, headers=headers)).status_code == 429


async def test_a_text_that_was_read_and_refused_costs_its_tokens(keyed: Keyed) -> None:
    headers = keyed.create("ann", tokens_per_minute=1000)
    async with keyed.client() as client:
        response = await client.post("/generate", json={"prompt": "x" * 200, "max_tokens": 1}, headers=headers)
        assert response.status_code == 422
        assert "200 tokens" in response.json()["detail"]
        assert int(response.headers["x-ratelimit-remaining-tokens"]) <= 951


async def test_a_body_without_a_key_is_not_read(keyed: Keyed) -> None:
    keyed.create("ann")
    read = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(4):
            read.append(1)
            yield b" " * 1000

    async with keyed.client() as client:
        response = await client.post("/generate", content=body())
    assert response.status_code == 401
    assert read == []


async def test_a_key_may_not_push_in(keyed: Keyed) -> None:
    ordinary, urgent = keyed.create("ann"), keyed.create("bob", max_priority=-5)
    async with keyed.client() as client:

        async def status(priority: int, headers: dict[str, str], path: str = "/generate") -> int:
            body = {"prompt": [1], "max_tokens": 1, "priority": priority}
            body |= {"model": MODEL} if path.startswith("/v1") else {}
            return (await client.post(path, json=body, headers=headers)).status_code

        assert [await status(priority, ordinary) for priority in (-1, 0, 7)] == [403, 200, 200]
        assert await status(-(1 << 62), ordinary, "/v1/completions") == 403
        assert [await status(priority, urgent) for priority in (-6, -5, 0)] == [403, 200, 200]


async def test_admission_counts_samples(client: httpx.AsyncClient, engine: AsyncLLMEngine) -> None:
    """The engine takes eight sequences, four of them waiting."""
    body = {"prompt": [[1], [2]], "n": 3, "max_tokens": 40, "ignore_eos": True, "seed": 1}
    first = asyncio.create_task(client.post("/generate", json=body))
    while engine.num_requests < 2:
        await asyncio.sleep(0)
    refused = await client.post("/generate", json={"prompt": [3], "n": 3})
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    assert (await client.post("/generate", json={"prompt": [3], "n": 2})).status_code == 200
    assert len((await first).json()["choices"]) == 6
    assert engine.num_requests == 0
