"""Hostile requests to a replica: refused by their size, before they are tokenized and beside the engine's thread."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
MANY = [str(number) for number in range(20_000)]
JSON = {"Content-Type": "application/json"}

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


def text_of_many(count: int, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": "a"}] * count


@dataclass
class Threads:
    """Names of the threads in which texts were tokenized and token ids made text, one entry a call."""

    encoded: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)


@pytest.fixture
def threads(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The tokenizer itself is the real one."""
    threads = Threads()
    for method, names in (("_encode_plus", threads.encoded), ("_decode", threads.decoded)):
        original = getattr(PreTrainedTokenizerFast, method)

        def recording(self: Any, *args: Any, of: Any = original, into: list[str] = names, **kwargs: Any) -> Any:
            into.append(threading.current_thread().name)
            return of(self, *args, **kwargs)

        monkeypatch.setattr(PreTrainedTokenizerFast, method, recording)
    return threads


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
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
    ("/v1/chat/completions", {"messages": text_of_many(5000)}, "messages"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/detokenize", {"tokens": [1] * 50_000}, "tokens"),
    ("/detokenize", {"tokens": ["a"] * 20_000}, "tokens"),
    ("/generate", {"prompt": "a", "stop": MANY}, "stop"),
    ("/generate", {"prompt": "a", "stop": ["a", LONG]}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": LONG}, "stop"),
    ("/generate", {"prompt": "a", "stop_token_ids": [1] * 20_000}, "stop_token_ids"),
    ("/generate", {"prompt": "a", "logit_bias": dict.fromkeys(MANY, 1.0)}, "logit_bias"),
    ("/generate", {"prompt": "a", "n": 64}, "n"),
    ("/v1/completions", {"prompt": ["a"] * 64, "n": 64}, "n"),
    ("/generate", {"prompt": "a", "structured_outputs": {"choice": MANY}}, "structured_outputs.choice"),
    ("/generate", {"prompt": "a", "structured_outputs": {"choice": ["a", LONG]}}, "structured_outputs.choice"),
    ("/generate", {"prompt": "a", "structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
    ("/generate", {"prompt": "a", "structured_outputs": {"json": json.dumps(DEEP)}}, "structured_outputs.json"),
    ("/generate", {"prompt": "a", "structured_outputs": {"json": {"enum": [LONG]}}}, "structured_outputs.json"),
    ("/generate", {"prompt": "a", "structured_outputs": {"regex": LONG}}, "structured_outputs.regex"),
    ("/generate", {"prompt": "a", "structured_outputs": {"grammar": LONG}}, "structured_outputs.grammar"),
]


async def test_what_is_too_large_is_refused_before_it_is_tokenized(
    client: httpx.AsyncClient, engine: AsyncLLMEngine, threads: Threads
) -> None:
    for path, body, field_name in HOSTILE:
        sent = {"model": MODEL, **body} if path.startswith("/v1") else body
        response = await client.post(path, json=sent)
        assert response.status_code in (400, 422), response.text[:500]
        answer = response.json()
        found = answer["error"]["param"] if "error" in answer else answer["errors"][0]["field"]
        # What is nested too deeply is named by a place inside.
        assert f"{found}.".startswith(f"{field_name}."), response.text[:500]
        assert len(response.content) < 4096, "a refusal does not send back what it was sent"
    for raw in (b'{"prompt": [' + b"1," * 450_000 + b"1]}", b'{"a": [' + b'"",' * 300_000 + b'""]}', b" " * (8 << 20)):
        response = await client.post("/generate", content=raw, headers=JSON)
        assert response.status_code == 413, "too many values, or bytes, for a model of this context: it is not parsed"
    assert threads.encoded == threads.decoded == []
    assert engine.num_requests == 0
    padded = b'{"prompt": [1], "max_tokens": 1' + b" " * 500_000 + b"}"
    assert (await client.post("/generate", content=padded, headers=JSON)).status_code == 200


async def test_a_refusal_of_a_long_text_names_what_it_has_and_what_fits(client: httpx.AsyncClient) -> None:
    [error] = (await client.post("/generate", json={"prompt": LONG})).json()["errors"]
    # The longest token of this vocabulary is `</s>`, of four bytes.
    assert f"{len(LONG)} bytes" in error["message"]
    assert f"{4 * CONTEXT} bytes" in error["message"]
    longest = "</s>" * (CONTEXT - 1)
    assert (await client.post("/generate", json={"prompt": longest, "max_tokens": 1})).status_code == 200


async def test_texts_are_read_beside_the_engine_and_the_event_loop(client: httpx.AsyncClient, threads: Threads) -> None:
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
    assert len(threads.encoded) == 7
    assert all(name.startswith("reader") for name in threads.encoded), threads.encoded
    assert threading.main_thread().name not in threads.decoded
    assert {"engine", "reader"} >= {name.split("_")[0].split("-")[0] for name in threads.decoded}


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
    headers = keyed.create("ann", requests_per_minute=3) | JSON
    read = keyed.create("bob", tokens_per_minute=1000)
    async with keyed.client() as client:
        for content in (b" " * (20 << 20), b"{", json.dumps({"prompt": LONG}).encode()):
            assert (await client.post("/generate", content=content, headers=headers)).status_code in (413, 422)
        assert (await client.post("/generate", json={"prompt": [1]}, headers=headers)).status_code == 429
        response = await client.post("/generate", json={"prompt": "x" * 200, "max_tokens": 1}, headers=read)
        assert (response.status_code, "200 tokens" in response.json()["detail"]) == (422, True)
        assert int(response.headers["x-ratelimit-remaining-tokens"]) <= 951, "what was read costs its tokens"


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
