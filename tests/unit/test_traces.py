"""Traces of jobs, received over OTLP: one trace from POST /jobs to the phases of the attempt."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.jobs import driver
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import LocalObjectStore
from swiftkv_platform.traces import SpanRecorder, get_job_span_recorder, open_provider, parse_traceparent
from tests.support.components import make_components
from tests.support.fakes.cluster import FakeCluster
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.unit.control_plane.routes.conftest import SPEC, URL, control_plane

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        get_job_span_recorder.cache_clear()
        yield receiver
        get_job_span_recorder().close()
        get_job_span_recorder.cache_clear()


@pytest.mark.parametrize(
    ("route", "body"),
    [("/jobs", SPEC), ("/v1/fine_tuning/jobs", {"model": "org/teacher", "training_file": "builtin:python-stdlib"})],
)
def test_submission_queue_and_the_attempts_phases_are_one_trace(
    receiver: OtlpReceiver, sqlite_database: Database, tmp_path: Path, route: str, body: dict[str, Any]
) -> None:
    parts = make_components(sqlite_database, LocalObjectStore(tmp_path / "store"))
    began = time.time()
    assert isinstance(parts.cluster, FakeCluster)
    settings = Settings(home=tmp_path, reconcile_interval_s=0.05, _env_file=None)
    with TestClient(create_app(settings, components=parts), base_url=URL) as client:
        job = client.post(route, json=body, headers={"traceparent": TRACEPARENT}).json()
        while not parts.cluster.submissions:
            time.sleep(0.01)
    request = parts.attempts.read_request(AttemptId(job["id"], 1))
    with driver._trace_phase(request, "prepare"):
        pass
    with driver._trace_phase(request, "evaluate", rank=1):
        pass

    spans = receiver.by_name()
    name_of_post = f"POST {route}"
    assert spans.keys() == {name_of_post, "queue wait", "submit", "prepare"}, "one for each phase, by the first worker"
    post = spans[name_of_post]
    assert post.parent_id == CALLER
    assert request.traceparent == f"00-{TRACE}-{post.span_id}-01"
    assert {span.trace_id for span in spans.values()} == {TRACE}
    assert {span.parent_id for name, span in spans.items() if span is not post} == {post.span_id}
    assert {name: span.service for name, span in spans.items()} == {
        name_of_post: "swiftkv-control-plane",
        "queue wait": "swiftkv-control-plane",
        "submit": "swiftkv-control-plane",
        "prepare": "swiftkv-job",
    }
    for name, span in spans.items():
        assert int(began) <= span.began <= span.ended <= time.time()
        if span is not post:
            assert (span.attributes["swiftkv.job_id"], span.attributes["swiftkv.attempt"]) == (job["id"], 1), name


def test_without_an_endpoint_the_callers_trace_reaches_the_workers_all_the_same(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    parts = make_components(sqlite_database, LocalObjectStore(tmp_path / "store"))
    with control_plane(parts, Settings(home=tmp_path, _env_file=None)) as client:
        jobs = [
            client.post("/jobs", json=SPEC, headers=headers).json()
            for headers in ({"traceparent": TRACEPARENT}, {"traceparent": "nonsense"}, {})
        ]
        stored = [parts.jobs.get(job["id"], tenant=job["tenant"]).traceparent for job in jobs]
    assert stored == [TRACEPARENT, None, None]


def test_a_phase_that_fails_is_an_error(receiver: OtlpReceiver) -> None:
    spans = SpanRecorder(open_provider("x"))
    with pytest.raises(ValueError, match="no"), spans.span("phase", TRACEPARENT, job_id="j"):
        raise ValueError("no")
    spans.close()
    [span] = receiver.spans
    assert (span.is_error, span.trace_id) == (True, TRACE)


def test_opentelemetry_is_not_imported_where_no_endpoint_is_set() -> None:
    code = """
import sys
from swiftkv_platform.traces import SpanRecorder, open_provider
with SpanRecorder(open_provider("x")).span("a", None) as context:
    assert context is None
print(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    environment = {"PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment, cwd=Path.cwd()
    )
    assert done.stdout.strip() == "False"


def test_a_header_that_is_no_traceparent_is_ignored_and_older_workers_read_requests_without_one() -> None:
    assert parse_traceparent(TRACEPARENT) == TRACEPARENT
    for header in (
        None,
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        TRACEPARENT.upper(),
        f"ff-{TRACE}-{CALLER}-01",
        TRACEPARENT + "\n",
    ):
        assert parse_traceparent(header) is None
    request = AttemptRequest(job_id="j", attempt=1, spec=JobSpec.model_validate(SPEC), run_id="j")
    assert b"traceparent" not in request.to_json()
    traced = request.model_copy(update={"traceparent": TRACEPARENT})
    assert AttemptRequest.model_validate_json(traced.model_dump_json()) == traced
