"""Hostile requests to a replica: refused by size before they are tokenized, and never in the engine's thread."""

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

from swiftkv_platform.contract.autoscaling import REVISION_HEADER
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState, SwapState
from tests.contract.serving.replicas import asgi_client, save_chat_model, version_of
from tests.unit.engine.tiny_models import CONTEXT

pytestmark = pytest.mark.slow("starts an application for each test")

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
    return save_chat_model(tmp_path_factory.mktemp("swiftkv"), CONTEXT, CHAT_TEMPLATE)


@pytest_asyncio.fixture
async def engine(model_dir: Path) -> AsyncIterator[AsyncLLMEngine]:
    config = EngineConfig(max_num_seqs=4, max_num_waiting=4, stream_interval_s=0.0)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, config))
    yield engine
    await engine.aclose()


@pytest.fixture
def current(engine: AsyncLLMEngine) -> ReplicaState:
    return ReplicaState(version_of(engine))


@pytest.fixture
def client(current: ReplicaState) -> httpx.AsyncClient:
    return asgi_client(create_http_app(current))


def text_of_many(count: int, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": "a"}] * count


@dataclass
class Threads:
    """Names of the threads that tokenized text or decoded token ids, one for each call."""

    encoded: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)


@pytest.fixture
def threads(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Record the threads that use the tokenizer, which is the real one."""
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
        # Nesting that is too deep is reported at a place inside of the field.
        assert f"{found}.".startswith(f"{field_name}."), response.text[:500]
        assert len(response.content) < 4096, "a refusal does not repeat the request"
    for raw in (b'{"prompt": [' + b"1," * 450_000 + b"1]}", b'{"a": [' + b'"",' * 300_000 + b'""]}', b" " * (8 << 20)):
        response = await client.post("/generate", content=raw, headers=JSON)
        assert response.status_code == 413, "too long for this context: it is not parsed"
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
    """While the tokenizer blocks on one caller's text, another caller's answer ends."""
    may_read, original = threading.Event(), PreTrainedTokenizerFast._encode_plus

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert may_read.wait(60.0)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", waiting)
    reading = asyncio.create_task(engine.submit("text"))
    await asyncio.sleep(0.01)
    answer = [output async for output in await engine.submit([1, 2, 3])]
    assert answer[-1].finished
    assert not reading.done()
    may_read.set()
    assert [output async for output in await reading][-1].finished


class Keyed:
    """A replica that asks for keys."""

    def __init__(self, current: ReplicaState, path: Path) -> None:
        self.path = path
        self._current = current

    def create(self, name: str, **options: Any) -> dict[str, str]:
        chosen = {"scopes": frozenset({Scope.GENERATE}), **options}
        return {"Authorization": f"Bearer {create_key(self.path, name=name, tenant=name, **chosen)}"}

    def client(self, tenant: str | None = None) -> httpx.AsyncClient:
        return asgi_client(create_http_app(self._current, key_ring=KeyRing(self.path), tenant=tenant))


@pytest.fixture
def keyed(current: ReplicaState, tmp_path: Path) -> Keyed:
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
        assert int(response.headers["x-ratelimit-remaining-tokens"]) <= 951, "the tokens that were read are charged"


async def test_what_is_served_is_shown_to_its_tenant_alone(keyed: Keyed, current: ReplicaState) -> None:
    current.swap = SwapState(status="refused", revision="0123456789abcdef", message="ModelError: secret")
    own, other = keyed.create("ann", scopes=frozenset({Scope.JOBS_READ})), keyed.create("bob")
    async with keyed.client(tenant="ann") as client:
        whole = (await client.get("/health", headers=own)).json()
        assert (whole["model"], whole["swap"]["message"]) == (MODEL, "ModelError: secret")
        wanted = {REVISION_HEADER: "0123456789abcdef"}
        assert (await client.get("/health", headers=wanted)).json() == whole, "asked as the control plane asks"
        assert (await client.get("/metrics", headers=own)).text.startswith("#")
        for headers, status in (({}, 401), (other, 403), ({"Authorization": "Bearer skv_x"}, 401)):
            for asked in ({}, {REVISION_HEADER: ""}, {REVISION_HEADER: "0123456789abcde"}, {REVISION_HEADER: "é"}):
                answer = await client.get("/health", headers=httpx.Headers({**headers, **asked}, encoding="utf-8"))
                assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
            for path in ("/metrics", "/v1/models", f"/v1/models/{MODEL}"):
                answer = await client.get(path, headers=headers)
                assert (answer.status_code, "max_model_len" in answer.text) == (status, False), answer.text
    current.swap = SwapState()
    async with keyed.client(tenant="ann") as client:
        assert (await client.get("/health", headers={REVISION_HEADER: ""})).json() == {"status": "ok"}


HOSTS = [
    *(("serve", 200), ("127.0.0.1:8001", 200), ("[::1]:8001", 200), ("10.2.3.4", 200), ("localhost", 200)),
    *(("swiftkv-serve-serve-svc.swiftkv.svc.cluster.local:8001", 200), ("Models.example.org", 200)),
    *(("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example:8001", 403), ("", 403)),
    *(("models.example.org.evil.example", 403), ("[::1", 403), ("a:b", 403)),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
async def test_a_replica_without_keys_answers_to_no_other_name(current: ReplicaState, host: str, status: int) -> None:
    async with asgi_client(create_http_app(current, allowed_hosts=("models.example.org",))) as client:
        for path in ("/health", "/metrics", "/v1/models", "/openapi.json"):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status_code == status, answer.text
        asked = await client.post("/generate", json={"prompt": [1], "max_tokens": 1}, headers={"Host": host})
        assert (asked.status_code, "allowed_hosts" in asked.text) == (status, status == 403)


async def test_a_replica_with_keys_answers_to_any_name(keyed: Keyed) -> None:
    headers = keyed.create("ann") | {"Host": "models.example"}
    async with keyed.client() as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


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
