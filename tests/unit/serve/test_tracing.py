"""Spans of real requests: below the caller's trace, one after another, and marked where something failed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.tracing import Tracing, configured_tracing
from tests.unit.engine.tiny_models import save_swiftkv

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest_asyncio.fixture
async def client(model_dir: Path, exporter: InMemorySpanExporter) -> AsyncIterator[httpx.AsyncClient]:
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir))
    card = ModelCard(deployment="dep_1", model="mdl_1", manifest_digest=None, swiftkv=None, max_model_len=64)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_http_app(Current(Version(engine, card, created=1), observers=[Tracing(provider)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve") as client:
        yield client
    await engine.aclose()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def test_a_request_is_a_span_of_the_callers_trace_with_its_phases_in_turn(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    await client.post("/generate", json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    spans = by_name(exporter)
    request = spans["POST /generate"]
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    attributes = request.attributes or {}
    assert attributes["gen_ai.request.model"] == "mdl_1"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 4)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent is not None and phase.parent.span_id == request.context.span_id for phase in phases)
    times = [request.start_time, *(time for phase in phases for time in (phase.start_time, phase.end_time))]
    known = [time for time in times if time is not None]
    assert len(known) == 7
    assert known == sorted(known)


async def test_a_request_without_a_trace_begins_one_and_a_late_answer_is_an_error(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    late = await client.post("/generate", json={"prompt": [1], "max_tokens": 60, "ignore_eos": True, "timeout_s": 1e-6})
    assert late.status_code == 504
    request = by_name(exporter)["POST /generate"]
    assert request.parent is None
    assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, "deadline_exceeded")


def test_nothing_is_traced_where_no_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert configured_tracing() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing = configured_tracing()
    assert tracing is not None
    tracing.shutdown()
