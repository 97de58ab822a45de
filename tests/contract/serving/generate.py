"""`/generate` and related routes over ASGI, on the real engine of the fixtures `engine` and `idle`."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

import swiftkv_platform.model  # noqa: F401  # registers the SwiftKV classes
from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.collector import OutputCollector
from tests.contract.serving.replicas import application, asgi_client, version_of
from tests.unit.engine.tiny_models import save_swiftkv

GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 60}
CARD: dict[str, Any] = {"manifest_digest": "abc", "swiftkv": {"num_key_value_layers": 2}}
CARD["load_seconds"] = {"fetch": 1.5, "load": 2.0, "check": 0.25}

Idle = Callable[[], Awaitable[None]]
"""Returns when the engine holds nothing for any request."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    return EngineConfig(max_num_seqs=1, max_num_waiting=1, stream_interval_s=0.0, kv_cache_bytes=4 << 20)


class Ended:
    """Observer that records finished answers."""

    def __init__(self) -> None:
        self.collectors: list[OutputCollector] = []

    def on_request_ended(self, collector: OutputCollector, card: object) -> None:
        self.collectors.append(collector)

    def on_request_refused(self, *_: object) -> None:
        """Ignore refused requests."""


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def app(engine: EngineFrontend, ended: Ended) -> FastAPI:
    return application(version_of(engine, **CARD), observers=[ended])


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    return asgi_client(app)


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/generate", json=body)


def greedy(prompt: list[int], model_dir: Path, count: int = 12) -> list[int]:
    """Return the most probable tokens by the project's own forward pass, without an engine."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    generated = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    answer: list[int] = generated[0, len(prompt) :].tolist()
    return answer


async def test_the_answer_has_the_documented_shape(client: httpx.AsyncClient, model_dir: Path) -> None:
    response = await post(client, prompt=[1, 2, 3], **GREEDY)
    token_ids = greedy([1, 2, 3], model_dir)
    answer = response.json()
    timings = answer.pop("timings")
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": "length"}
    choice |= {"text": AutoTokenizer.from_pretrained(model_dir).decode(token_ids)}
    usage = {"prompt_tokens": 3, "completion_tokens": 12, "cached_tokens": 0}
    assert answer == {
        "id": answer["id"],
        "model": "mdl_1",
        "choices": [{**choice, "num_exited_tokens": 0, "num_accepted_tokens": 0}],
        "usage": {**usage, "prefill_layers_skipped_tokens": 2, "early_exit_tokens": 0},
    }
    assert 0 <= timings["queue_ms"] <= timings["ttft_ms"] <= timings["total_ms"]
    assert timings["tpot_ms"] > 0


async def test_text_prompts_stop_strings_and_seeds_reach_the_engine(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "max_tokens": 30, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "ignore_eos": True}
    whole, again, other = [(await post(client, **body, seed=seed)).json()["choices"][0] for seed in (1, 1, 2)]
    assert whole == again
    assert whole["text"] != other["text"]
    stop = whole["text"][5:7]
    stopped = (await post(client, **body, seed=1, stop=stop)).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]


async def test_log_probabilities_are_those_of_the_model(client: httpx.AsyncClient, model_dir: Path) -> None:
    answer = (await post(client, prompt=[1, 2, 3], logprobs=2, **GREEDY)).json()["choices"][0]
    token_ids = answer["token_ids"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_dir)(torch.tensor([[1, 2, 3, *token_ids]])).logits[0, 2:-1]
    for token, row, found in zip(token_ids, logits.log_softmax(-1), answer["logprobs"], strict=True):
        top = row.topk(2)
        expected = dict(zip(map(str, top.indices.tolist()), top.values.tolist(), strict=True))
        assert found == pytest.approx(expected, abs=1e-3)
        assert str(token) in found


def stream_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream that ended well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_a_stream_joins_to_the_answer(client: httpx.AsyncClient) -> None:
    whole = (await post(client, prompt=[1, 2, 3], **GREEDY)).json()
    events = stream_events(await post(client, prompt=[1, 2, 3], stream=True, **GREEDY))
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["choices"][0]["token_ids"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * 11 + ["length"]
    assert [event.keys() for event in events[:-1]] == [{"id", "model", "choices"}] * 11
    assert events[-1]["usage"] == whole["usage"]
    assert events[-1]["timings"].keys() == whole["timings"].keys()


async def test_tokens_of_an_interval_come_in_one_event(client: httpx.AsyncClient) -> None:
    whole = (await post(client, prompt=[1, 2, 3], **GREEDY)).json()
    response = await post(client, prompt=[1, 2, 3], stream=True, stream_interval_s=10.0, **GREEDY)
    choices = [event["choices"][0] for event in stream_events(response)]
    assert len(choices) <= 2  # what is there at once, and the rest; a slow event loop finds more at once
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]


async def test_a_full_queue_says_when_to_come_again(client: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(post(client, prompt=[i], **LONG) for i in range(3)))
    *_, refused = sorted(answers, key=lambda response: response.status_code)
    assert sorted(response.status_code for response in answers) == [200, 200, 429]
    assert int(refused.headers["retry-after"]) >= 1, "the expected wait is at least a second"
    assert refused.json()["code"] == "queue_full"


async def test_an_answer_that_comes_too_late_is_given_up(client: httpx.AsyncClient, idle: Idle) -> None:
    late = {"prompt": [1], **LONG, "timeout_s": 0.001}
    response = await post(client, **late)
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    streamed = await post(client, **late, stream=True)
    assert '"deadline_exceeded"' in streamed.text.split("\n\n")[-2]
    in_openais_shape = await client.post("/v1/completions", json={"model": "mdl_1", **late})
    assert in_openais_shape.json()["error"]["code"] == "deadline_exceeded"
    await idle()
    assert (await post(client, prompt=[1], timeout_s=60, **GREEDY)).status_code == 200


async def test_health_says_what_is_served(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {
        "status": "ok",
        "deployment": "dep_1",
        "model": "mdl_1",
        **CARD,
        "max_model_len": 64,
        "candidate": None,
        "adapters": None,
        "replica": "",
        "swap": {"status": "done", "revision": "", "message": ""},
    }


async def check_death(client: httpx.AsyncClient, num_tokens: int | None = None) -> None:
    """Check that callers and probes are told when the engine fails, after `num_tokens` of the next answer."""
    streamed = await post(client, prompt=[1], stream=True, **LONG)
    blocks = [block for block in streamed.text.split("\n\n") if block]
    assert num_tokens is None or len(blocks) == num_tokens + 1
    event, data = blocks[-1].split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["code"] == "engine_dead"
    for response in (await post(client, prompt=[1]), await client.get("/health")):
        assert (response.status_code, response.json()["code"]) == (503, "engine_dead")


async def leave_a_stream(app: FastAPI) -> None:
    """Ask for 60 tokens over bare ASGI and leave after the first event; httpx's transport would read the whole
    answer."""
    gone = asyncio.Event()
    body = json.dumps({"prompt": [1], "stream": True, **LONG}).encode()
    request = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(request, None)
        if message is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            gone.set()

    headers = [(b"host", b"serve"), (b"content-type", b"application/json")]
    addresses = {"server": ("serve", 80), "client": ("client", 1)}
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers, "scheme": "http", **addresses}
    await app({**scope, "query_string": b"", "root_path": "", "http_version": "1.1"}, receive, send)


async def test_a_client_that_leaves_a_stream_frees_the_engine(app: FastAPI, idle: Idle, ended: Ended) -> None:
    await leave_a_stream(app)
    await idle()
    [collector] = ended.collectors
    assert collector.outcome == "left"
    assert 0 < collector.num_tokens - 1 < 60


async def test_the_api_reference_comes_from_the_replica(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert "docs/assets/vendor/swagger-ui-bundle.js" in page.text
    assert (await client.get("/docs/assets/vendor/swagger-ui-bundle.js")).status_code == 200


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/generate", "text/plain"), ("/v1/completions", "application/x-www-form-urlencoded"), ("/tokenize", None)],
)
async def test_a_body_of_another_type_is_told_so(client: httpx.AsyncClient, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await client.post(path, content=b'{"prompt": "a", "model": "mdl_1"}', headers=headers)
    assert answer.status_code == 415
    assert f"content-type is {kind or ''!r}; the body must be JSON, of type application/json" in answer.text


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/mdl_1", "/openapi.json"])
async def test_a_probe_by_head_is_answered_as_get_without_the_body(client: httpx.AsyncClient, path: str) -> None:
    head, whole = await client.head(path), await client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await client.head("/generate")).status_code == (await client.get("/generate")).status_code == 405


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/models/", "/v1/models//mdl_1/", "//health//"])
async def test_slashes_too_many_are_one(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(f"http://serve{path}")).status_code == 200
    body = {"model": "mdl_1", "prompt": "a", "max_tokens": 1}
    assert (await client.post("/v1//completions/", json=body)).status_code == 200


PAGE = "https://chat.example.org"


@pytest.mark.parametrize("allowed", [(), ("https://other.example.org",), (PAGE,), ("*",)], ids=str)
async def test_pages_of_origins_that_a_deployment_names_may_ask(
    engine: EngineFrontend, allowed: tuple[str, ...], tmp_path: Path
) -> None:
    version = version_of(engine)
    version.cors_origins = frozenset(allowed)
    create_key(tmp_path / "keys.json", name="a", tenant="a", scopes=frozenset({Scope.GENERATE}))
    client = asgi_client(application(version, key_ring=KeyRing(tmp_path / "keys.json")))
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    asked = await client.options("/v1/completions", headers=asks)
    refused = await client.post("/v1/completions", json={}, headers={"origin": PAGE})
    assert refused.status_code == 401, "a page may read why it was refused"
    known = {PAGE, "*"} & {*allowed}
    assert asked.status_code == (200 if known else 400 if allowed else 405)
    for answer in (asked, refused, await client.get("/health", headers={"origin": PAGE})):
        assert answer.headers.get("access-control-allow-origin") in ((PAGE, "*") if known else (None,))
        assert "access-control-allow-credentials" not in answer.headers
    assert not known or asked.headers["access-control-allow-headers"] == "authorization"


@pytest.mark.parametrize(
    ("path", "encoding", "status"),
    [
        *((path, "gzip", 415) for path in ("/generate", "/tokenize", "/v1/completions", "/v1/chat/completions")),
        *(
            ("/generate", encoding, 415)
            for encoding in ("br", "deflate", "zstd", "X-GZIP", "identity, gzip", "gzip, br")
        ),
        *(("/v1/responses", "gzip", 415), ("/v1/messages", "gzip", 415), ("/v1/messages/count_tokens", "br", 415)),
        *(("/tokenize", encoding, 200) for encoding in ("identity", "", " Identity ")),
    ],
)
async def test_a_compressed_body_is_refused_with_a_cure(
    client: httpx.AsyncClient, path: str, encoding: str, status: int
) -> None:
    body = json.dumps({"prompt": "hello"}).encode()
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = await client.post(path, content=gzip.compress(body) if status == 415 else body, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert answer.headers["accept-encoding"] == "identity"
        assert "send the body uncompressed" in answer.text
