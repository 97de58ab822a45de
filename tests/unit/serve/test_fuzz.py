"""Every route with any body, field or header, allowed by the OpenAPI document or not: none is answered 500."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from schemathesis.schemas import APIOperation
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.security.keys import Scope as KeyScope
from swiftkv_platform.security.keys import create_key, open_credentials
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.openai.fields import FIELDS
from swiftkv_platform.serve.prefixes import PrefixHeaderMiddleware
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.serve.tracing import RequestTracer
from tests.contract.serving.replicas import application, version_of
from tests.support.fakes.oidc_issuer import run_issuer
from tests.support.servers import serving

SOAK = "SWIFTKV_SOAK" in os.environ
NUM_BODIES, NUM_FIELDS, NUM_HEADERS = (500, 2000, 5000) if SOAK else (8, 40, 40)
"""Numbers of examples: bodies of each operation, fields of OpenAI's routes, headers."""
HANGS_AFTER_S = 60.0
"""Far more than the longest answer of the tiny model takes on a busy machine."""
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a"}]
BODY: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hello", "max_tokens": 2, "temperature": 0},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
    "/v1/completions": {"model": "mdl_1", "prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"model": "mdl_1", "messages": CHAT, "max_tokens": 2},
    "/v1/responses": {"model": "mdl_1", "input": CHAT, "max_output_tokens": 2},
    "/v1/messages": {"model": "mdl_1", "messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "mdl_1", "messages": CHAT},
}
Header = tuple[bytes, bytes]


@dataclass
class Handed:
    """Puts `headers` into each request, like Serve's proxy, also such as no HTTP client would send."""

    app: ASGIApp
    headers: list[Header] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            names = {name for name, _ in self.headers}
            sent = [(name, value) for name, value in scope["headers"] if name not in names]
            scope = {**scope, "headers": [*sent, *self.headers]}
        await self.app(scope, receive, send)


@dataclass(frozen=True)
class Replica:
    """A replica behind `Handed`, on a port of its own."""

    url: str
    handed: Handed
    engine: AsyncLLMEngine
    credentials: list[bytes]
    """Values of `authorization` that open it."""

    def ask(self, path: str, body: dict[str, Any] | None, *headers: Header) -> httpx.Response:
        self.handed.headers = list(headers)
        method = "GET" if body is None else "POST"
        with httpx.Client(base_url=self.url, timeout=HANGS_AFTER_S, trust_env=False) as client:
            answer = client.request(method, path, json=body)
        self.engine.check_health()
        return answer


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> AsyncLLMEngine:
    config = EngineConfig(max_num_seqs=16, max_num_waiting=256, kv_cache_bytes=1 << 20)
    engine = LLMEngine.from_pretrained(model_dir, config)
    engine.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return AsyncLLMEngine(engine)


@pytest.fixture(scope="module")
def replicas(engine: AsyncLLMEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Replica]]:
    """Two replicas that trace their requests: `closed` with keys and an issuer of tokens, `open` without."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    directory = tmp_path_factory.mktemp("replica")
    keys, issuers = directory / "keys.json", directory / "issuers.yaml"
    with run_issuer() as issuer:
        token = create_key(keys, name="ann", tenant="acme", scopes=frozenset({KeyScope.GENERATE}))
        issuers.write_text(yaml.safe_dump({"issuers": [issuer.config()]}))
        opens = [f"Bearer {each}".encode() for each in (token, issuer.token())]
        handed = {
            name: Handed(
                PrefixHeaderMiddleware(
                    application(version_of(engine), observers=[RequestTracer(provider)], key_ring=door)
                )
            )
            for name, door in (("open", None), ("closed", open_credentials(keys, issuers)))
        }
        with serving(handed["open"]) as url, serving(handed["closed"]) as closed_url:
            yield {
                name: Replica(address, handed[name], engine, opens)
                for name, address in (("open", url), ("closed", closed_url))
            }


OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(create_http_app(ReplicaState()).openapi()).get_all_operations()
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_request_breaks_the_server(operation: APIOperation, replicas: dict[str, Replica]) -> None:
    replica = replicas["open"]
    replica.handed.headers = []

    @settings(max_examples=NUM_BODIES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "mdl_1"  # else OpenAI's routes answer 404 and look at nothing else
        response = case.call(base_url=replica.url, timeout=HANGS_AFTER_S)
        late = isinstance(case.body, dict) and case.body.get("timeout_s") is not None and response.status_code == 504
        assert response.status_code < 500 or late, response.text
        if response.status_code in (400, 422):
            check_names_a_field(case.path, response.json())
        replica.engine.check_health()

    ask()


def check_names_a_field(path: str, document: Any) -> None:
    if path.startswith("/v1/"):
        assert document["error"]["message"]
        assert document["error"]["param"]
    else:
        assert document["errors"], document
        assert all(error["field"] and error["message"] for error in document["errors"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 100) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
PARTS = [field.name.removeprefix("stream_options.") for field in FIELDS if field.name.startswith("stream_options.")]
NAMES = st.sampled_from(sorted({field.name for field in FIELDS} - {"model", "prompt", "messages", "input"}))


@given(
    st.sampled_from([path for path in BODY if path.startswith("/v1/")]),
    st.dictionaries(NAMES | st.text(max_size=12), VALUES, min_size=1, max_size=4),
    st.none() | st.dictionaries(st.sampled_from(PARTS) | st.text(max_size=12), VALUES, max_size=3),
    st.booleans(),
)
@settings(max_examples=NUM_FIELDS, deadline=None, database=None)
def test_any_value_of_any_field_is_answered_or_refused_by_name(
    replicas: dict[str, Replica], path: str, fields: dict[str, Any], stream_options: Any, stream: bool
) -> None:
    """Fields are those that the routes serve, ignore or refuse, and unknown ones."""
    own = {name: value for name, value in BODY[path].items() if not name.startswith("max_")}
    body = {**BODY[path], **fields, "stream": stream, "stream_options": stream_options, **own}
    response = replicas["open"].ask(path, body)
    assert response.status_code in (200, 400, 403, 429) or "timeout_s" in fields, response.text
    if response.status_code == httpx.codes.BAD_REQUEST:
        assert response.json()["error"]["param"], response.text
    assert response.headers.get("x-swiftkv-ignored-fields", "").isascii()


COMMON = [
    *(b"", b" ", b"0", b"-1", b"1e3", b"99999999999999999999", b"Bearer", b"Bearer a.b.c", b"Basic Og=="),
    b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
    *(b"application/json", b"application/json; charset=utf-16", b'application/ld+json;;; a="', b"multipart/form-data"),
    *(b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded", b"text/plain; charset=nonsense"),
    *("Ünïcode, 名前".encode(), "Ünïcode".encode("latin-1")),
]
HEADERS = [
    b"authorization",
    b"content-length",
    b"content-type",
    b"host",
    b"traceparent",
    b"x-api-key",
    b"x-request-id",
    b"x-session-id",
]
LONG = st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=3), st.integers(1, 1 << 15))
TAMPERED = st.builds(
    lambda value, piece, at: value[:at] + piece + value[at:],
    st.sampled_from(COMMON),
    st.binary(max_size=4),
    st.integers(0, 60),
)
HEADER_VALUES = (
    st.sampled_from(COMMON) | TAMPERED | st.binary(max_size=64) | st.text(max_size=32).map(str.encode) | LONG
)


@pytest.mark.parametrize("door", ["open", "closed"])
@given(
    st.sampled_from([*BODY, "/health", "/metrics", "/v1/models", "/openapi.json", "/nothing"]),
    st.lists(st.tuples(st.sampled_from(HEADERS), HEADER_VALUES), max_size=5),
    st.none() | st.integers(0, 1),
    st.booleans(),
)
@example("/generate", [(b"content-length", b"9" * 5000)], 0, False)
@example("/generate", [(b"content-length", b"0" * 5000)], 0, False)
@example("/generate", [(b"x-session-id", b"s" * 70_000)], 0, True)
@settings(max_examples=NUM_HEADERS, deadline=None, database=None)
def test_no_header_breaks_the_server(
    replicas: dict[str, Replica], door: str, path: str, headers: list[Header], credential: int | None, stream: bool
) -> None:
    opening = [] if credential is None else [(b"authorization", replicas[door].credentials[credential])]
    body = BODY.get(path)
    if body is not None and "max_tokens" in body:
        body = {**body, "stream": stream}
    answer = replicas[door].ask(path, body, *headers, *opening)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        document = json.loads(answer.text)
        assert document["error"]["message"] if path.startswith("/v1/") else document["detail"]
