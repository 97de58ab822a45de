"""A replica's metrics: on its own page, in Ray and in the control plane; and the spans of its requests."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from ray.util.metrics import Metric

from swiftkv_platform.control_plane.deployments.routes import read_replica_metrics
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.engine.outputs import EngineState
from swiftkv_platform.errors import ClusterUnavailableError, QueueFullError
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.metrics_export import RayMetricsExport
from swiftkv_platform.serve.tracing import RequestTracer, make_request_observers
from tests.contract.serving.replicas import application, asgi_client, version_of
from tests.support.rays import free_port
from tests.support.servers import serving

Record = tuple[str, float, dict[str, str]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Records in the order in which Ray gets them, after Ray's own check of their labels."""
    records: list[Record] = []

    def record(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
        final = self._get_final_tags(tags)
        self._validate_tags(final)
        assert set(final) == set(self._tag_keys)
        records.append((self.info["name"], value, final))

    monkeypatch.setattr(Metric, "_record", record)
    return records


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(RayMetricsExport("dep_1", "one"))
    model = SimpleNamespace(config=None, operators="PyTorch, float32")
    idle = SimpleNamespace(state=EngineState(0, 0, {}, 0, 0.0), model=model)
    metrics.version = version_of(idle, "mdl_now")
    return metrics


def test_counts_carry_deployment_replica_and_model(metrics: Metrics, recorded: list[Record]) -> None:
    constant = {"deployment": "dep_1", "replica": "one"}
    metrics.count_request("mdl_1")
    metrics.count_refusal(QueueFullError("full"), "mdl_candidate")
    metrics.count_swap("succeeded")
    assert recorded == [
        ("swiftkv_requests", 1, {**constant, "model": "mdl_1"}),
        ("swiftkv_rejected_requests", 1, {**constant, "model": "mdl_candidate", "reason": "queue_full"}),
        ("swiftkv_swaps", 1, {**constant, "model": "mdl_now", "outcome": "succeeded"}),
    ]
    page = metrics.render_page().decode()
    assert 'swiftkv:requests_total{model="mdl_1"} 1.0' in page
    assert 'swiftkv:rejected_requests_total{reason="queue_full"} 1.0' in page


VLLM_NAMES = {
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
    *("num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
}
"""vLLM's names of quantities that both servers have (vllm/v1/metrics/loggers.py, 0.32)."""


def test_quantities_that_vllm_has_too_have_its_names(metrics: Metrics) -> None:
    """Further names are those that docs/serving.md lists."""
    page = metrics.render_page().decode()
    found = set(re.findall(r"^# TYPE swiftkv:(\w+?)(?:_total)? (?:counter|gauge|histogram)$", page, re.MULTILINE))
    found = {name for name in found if not name.endswith("_created")}
    assert found >= VLLM_NAMES
    assert "swiftkv:prefix_cache_queries_total 0.0" in page
    assert "swiftkv:prefix_cache_hits_total 0.0" in page
    documented = Path("docs/serving.md").read_text()
    assert [name for name in sorted(found - VLLM_NAMES) if f"`{name}" not in documented] == []


@pytest.mark.parametrize(("prompt_logprobs", "queries"), [(None, 6), ([None, {1: -0.5}], 0)])
def test_the_cache_is_not_asked_about_prompts_that_need_hidden_states(
    metrics: Metrics, recorded: list[Record], prompt_logprobs: Any, queries: int
) -> None:
    times = SimpleNamespace(ttft=None, tpot=None, total=None)
    counts = {"num_exited_tokens": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "num_skipped_tokens": 0}
    for index in (0, 1):
        output = SimpleNamespace(
            index=index,
            prompt_token_ids=[1] * 6,
            token_ids=[2],
            num_cached_tokens=4 if queries else 0,
            prompt_logprobs=prompt_logprobs,
            finish_reason="stop",
            metrics=times,
            **counts,
        )
        metrics.record_output(cast("Any", output), "mdl_1")
    page = metrics.render_page().decode()
    assert f"swiftkv:prefix_cache_queries_total {queries}.0" in page
    assert f"swiftkv:prefix_cache_hits_total {4 if queries else 0}.0" in page


def test_a_replica_that_sees_many_models_stops_making_series(metrics: Metrics, recorded: list[Record]) -> None:
    for number in range(100):
        metrics.count_request(f"mdl_{number}")
    assert len({tags["model"] for _, _, tags in recorded}) == 33
    assert recorded[-1][2]["model"] == "other"
    metrics.count_request("mdl_3")
    assert recorded[-1][2]["model"] == "mdl_3"


async def test_gauges_are_set_again_and_outlive_an_engine_that_fails(
    recorded: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.serve.metrics_export._GAUGE_INTERVAL_S", 0.01)

    class Source(Metrics):
        calls = 0

        def read_gauges(self) -> list[tuple[str, str, float]]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the engine is being closed")
            return [("num_requests_running", "Running sequences.", float(self.calls))]

    following = asyncio.create_task(RayMetricsExport("dep_1", "one").export_gauges(Source()))
    while len(recorded) < 2:
        await asyncio.sleep(0.01)
    following.cancel()
    name = "swiftkv_num_requests_running"
    assert [(name, value) for name, value, _ in recorded[:2]] == [(name, 1.0), (name, 3.0)]


def proxy(*replicas: str) -> FastAPI:
    """A proxy that sends each request to the next replica."""
    app, turns = FastAPI(), itertools.cycle(replicas)

    @app.get("/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{next(turns)}/{path}")
        return Response(answer.content, answer.status_code)

    return app


@pytest.fixture(scope="module")
def urls(model_dir: Path) -> Iterator[tuple[str, str, str]]:
    """A proxy and the two replicas behind it."""
    one, two = (
        application(
            version_of(AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, EngineConfig(max_num_seqs=2)))), replica=name
        )
        for name in ("one", "two")
    )
    with serving(one) as first, serving(two) as second, serving(proxy(first, first, second)) as front:
        yield front, first, second


async def test_every_replica_is_asked_and_told_apart(urls: tuple[str, str, str]) -> None:
    front, first, second = urls
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
    assert httpx.post(f"{second}/generate", json=body, timeout=60).status_code == 200
    found = {metrics.replica: metrics.values for metrics in await read_replica_metrics(front, 2)}
    assert found.keys() == {"one", "two"}
    counts = {"generation_tokens_total": [0, 5], "time_to_first_token_seconds_count": [0, 1]}
    assert {name: [found[replica][name] for replica in ("one", "two")] for name in counts} == counts
    assert (found["two"]["request_success_total"], found["one"]["kv_cache_usage_perc"]) == (1, 0)
    assert not any("bucket" in name for name in found["one"])
    max_per_sender = await read_replica_metrics(first, 3)
    assert [metrics.replica for metrics in max_per_sender] == ["one"], "fewer replicas than expected end the search"


async def test_nobody_there_is_an_error_that_names_the_address() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ClusterUnavailableError, match=url):
        await read_replica_metrics(url, 1)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def traced(engine: AsyncLLMEngine, headers: dict[str, str], **body: Any) -> tuple[httpx.Response, dict[str, Any]]:
    """Send a request; return its answer and its spans by name."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    client = asgi_client(application(version_of(engine), observers=[RequestTracer(provider)]))
    answer = await client.post("/generate", json={"ignore_eos": True, **body}, headers=headers)
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return answer, {span.name: span for span in spans}


async def test_a_request_is_a_span_of_the_callers_trace_with_its_phases_in_turn(engine: AsyncLLMEngine) -> None:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    _, spans = await traced(engine, header, prompt=[1, 2, 3], max_tokens=4)
    request = spans["POST /generate"]
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    expected = {"request.model": "mdl_1", "usage.input_tokens": 3, "usage.output_tokens": 4}
    expected |= {"response.finish_reasons": ("length",)}
    assert {name: request.attributes[f"gen_ai.{name}"] for name in expected} == expected
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == request.context.span_id for phase in phases)
    times = [request.start_time, *(time for phase in phases for time in (phase.start_time, phase.end_time))]
    assert times == sorted(times)


async def test_a_request_without_a_trace_begins_one_and_a_late_answer_is_an_error(engine: AsyncLLMEngine) -> None:
    late, spans = await traced(engine, {}, prompt=[1], max_tokens=60, timeout_s=1e-6)
    assert late.status_code == 504
    request = spans["POST /generate"]
    assert request.parent is None
    assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, "deadline_exceeded")


def test_nothing_is_traced_where_no_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert len(make_request_observers(with_text=False)) == 1
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing: Any = make_request_observers(with_text=False)[1]
    tracing.shutdown()
