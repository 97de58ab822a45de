"""Headers of any bytes, as Serve's proxy hands them over: no answer of 500, and the engine goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.security.credentials import open_credentials
from swiftkv_platform.security.keys import Scope as KeyScope
from swiftkv_platform.security.keys import create_key
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.prefixes import PrefixHeader
from swiftkv_platform.serve.tracing import Tracing
from tests.fakes.oidc_issuer import run_issuer
from tests.servers import serving
from tests.unit.engine.tiny_models import save_swiftkv

pytestmark = pytest.mark.slow  # a request, and its answer's spans, for each example

NUM_EXAMPLES = 5000 if "SWIFTKV_SOAK" in os.environ else 100
MODEL = "mdl_1"
HANGS_AFTER_S = 60.0
ENGINE = EngineConfig(max_num_seqs=16, max_num_waiting=256, kv_cache_bytes=1 << 20)

Header = tuple[bytes, bytes]


@dataclass
class Handed:
    """Puts what the test hands over in the place of what an HTTP client would not send."""

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
    """A replica behind what hands requests over."""

    url: str
    handed: Handed
    engine: AsyncLLMEngine
    credentials: list[bytes]
    """Values of `authorization` that open it."""


@pytest.fixture(scope="module", params=["open", "closed"])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica that traces its requests, with keys and an issuer of tokens or without."""
    directory = tmp_path_factory.mktemp("replica")
    engine = LLMEngine.from_pretrained(save_swiftkv(directory / "model"), ENGINE)
    engine.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    served = AsyncLLMEngine(engine)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    card = ModelCard(deployment="dep_1", model=MODEL, manifest_digest=None, swiftkv=None, max_model_len=64)
    current = Current(Version(served, card, created=1), observers=[Tracing(provider)])
    with run_issuer() as issuer:
        keys, issuers = directory / "keys.json", directory / "issuers.yaml"
        token = create_key(keys, name="ann", tenant="acme", scopes=frozenset({KeyScope.GENERATE}))
        issuers.write_text(yaml.safe_dump({"issuers": [issuer.config()]}))
        door = open_credentials(keys, issuers) if request.param == "closed" else None
        handed = Handed(PrefixHeader(create_http_app(current, key_ring=door)))
        opens = [f"Bearer {token}".encode(), f"Bearer {issuer.token()}".encode()]
        with serving(handed) as url:
            yield Replica(url, handed, served, opens)


COMMON = [
    b"",
    b" ",
    b"Bearer",
    b"Bearer a.b.c",
    b"Basic Og==",
    b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
    b"application/json",
    b"application/json; charset=utf-16",
    b'application/ld+json;;; a="',
    b"multipart/form-data",
    b"multipart/form-data; boundary=x",
    b"application/x-www-form-urlencoded",
    b"text/plain; charset=nonsense",
    b"0",
    b"-1",
    b"1e3",
    b"99999999999999999999",
    "Ünïcode, 名前".encode(),
    "Ünïcode".encode("latin-1"),
]
NAMES = [
    b"authorization",
    b"content-length",
    b"content-type",
    b"host",
    b"traceparent",
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
VALUES = st.sampled_from(COMMON) | TAMPERED | st.binary(max_size=64) | st.text(max_size=32).map(str.encode) | LONG
BODY: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hello", "max_tokens": 2, "temperature": 0},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}
LOOKED_AT = ["/health", "/metrics", "/v1/models", "/openapi.json", "/nothing"]


@given(
    st.sampled_from([*BODY, *LOOKED_AT]),
    st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=5),
    st.none() | st.integers(0, 1),
    st.booleans(),
)
@example("/generate", [(b"content-length", b"9" * 5000)], 0, False)
@example("/generate", [(b"x-session-id", b"s" * 70_000)], 0, True)
@settings(max_examples=NUM_EXAMPLES, deadline=None, database=None)
def test_no_header_breaks_the_server(
    replica: Replica, path: str, headers: list[Header], credential: int | None, stream: bool
) -> None:
    replica.handed.headers = list(headers)
    if credential is not None:
        replica.handed.headers.append((b"authorization", replica.credentials[credential]))
    with httpx.Client(base_url=replica.url, timeout=HANGS_AFTER_S, trust_env=False) as client:
        streams = {"stream": stream} if "max_tokens" in BODY.get(path, ()) else {}
        answer = client.post(path, json={**BODY[path], **streams}) if path in BODY else client.get(path)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        document = json.loads(answer.text)
        assert document["error"]["message"] if path.startswith("/v1/") else document["detail"]
    replica.engine.check_health()


def test_headers_that_mean_nothing_change_no_answer(replica: Replica) -> None:
    """Headers of a caller's own are none of the replica's business."""
    mine = [(b"authorization", replica.credentials[0])]
    texts = set()
    for value in ([], [b"\xff\xfe"], [b"x" * 100_000], ["名前".encode()]):
        headers = [(name, each) for each in value for name in (b"x-session-id", b"x-request-id", b"traceparent")]
        replica.handed.headers = [*mine, *headers]
        answer = httpx.post(f"{replica.url}/generate", json=BODY["/generate"], trust_env=False, timeout=HANGS_AFTER_S)
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1
