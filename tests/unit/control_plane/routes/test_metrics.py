"""`/metrics` and `/readyz`: counts are right, asking often costs little, and stalled loops are reported."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from swiftkv_platform.control_plane import health
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.settings import Settings
from tests.support.fakes.attempt_store import FakeWorker
from tests.unit.control_plane.routes.conftest import SPEC, URL, Start, StillClock, make_parts, refusal

pytestmark = pytest.mark.slow("starts an application for each test")

DEADLINE_S = 60.0


@pytest.fixture
def parts(tmp_path: Path, empty_database: Path) -> Components:
    return replace(make_parts(tmp_path, empty_database), clock=time.time)  # leases are renewed by it while a step runs


@pytest.fixture
def client(tmp_path: Path, parts: Components) -> Iterator[TestClient]:
    """A control plane whose own loops run."""
    settings = Settings(home=tmp_path, reconcile_interval_s=0.01, _env_file=None)
    with TestClient(create_app(settings, components=parts), base_url=URL) as client:
        yield client


def samples(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values of the metrics page, by name and labels."""
    page = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def wait_for(client: httpx.Client, name: str, at_least: float, **labels: str) -> float:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        value = samples(client).get((name, tuple(sorted(labels.items()))), 0.0)
        if value >= at_least:
            return value
        assert time.monotonic() < deadline, f"{name} is {value}"
        time.sleep(0.05)


def test_waits_and_lags_are_counted_once_for_each_attempt_and_event(client: TestClient, parts: Components) -> None:
    job_id = client.post("/jobs", json=SPEC).json()["id"]
    assert wait_for(client, "swiftkv_job_queue_wait_seconds_count", 1) == 1
    worker = FakeWorker(parts.objects, job_id, 1)
    worker.say("status", status="running")
    worker.step(1, 2, time=parts.clock() - 7)
    assert wait_for(client, "swiftkv_event_lag_seconds_count", 2) == 2
    found = samples(client)
    assert found["swiftkv_event_lag_seconds_sum", ()] >= 7
    assert found["swiftkv_job_queue_wait_seconds_count", ()] == 1
    for loop in ("jobs", "deployments", "webhooks"):
        assert wait_for(client, "swiftkv_loop_tick_duration_seconds_count", 1, loop=loop) >= 1


def test_requests_are_counted_by_template_and_never_by_path(client: TestClient) -> None:
    for number in range(30):
        assert client.get(f"/jobs/job_{number}").status_code == 404
        assert client.get(f"/nowhere/{number}").status_code == 404
        assert client.request(f"X{number}", "/jobs").status_code == 405
    assert client.get("/jobs").status_code == 200
    name = "swiftkv_http_request_duration_seconds_count"
    counted = {labels: value for (each, labels), value in samples(client).items() if each == name}
    assert counted[("method", "GET"), ("route", "/jobs/{job_id}"), ("status", "4xx")] == 30
    assert counted[("method", "GET"), ("route", "/jobs"), ("status", "2xx")] == 1
    assert counted[("method", "GET"), ("route", "unmatched"), ("status", "4xx")] == 30
    assert {dict(labels)["method"] for labels in counted} == {"GET", "other"}
    assert len(counted) < 10, "labels hold routes, not paths"


def test_a_request_that_fails_is_counted_as_a_5xx(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    server.client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(server.parts.jobs, "get", broken)
    assert server.client.get("/jobs/job_x").status_code == 500
    labels = (("method", "GET"), ("route", "/jobs/{job_id}"), ("status", "5xx"))
    assert samples(server.client)["swiftkv_http_request_duration_seconds_count", labels] == 1


def test_probes_that_come_at_once_look_once(parts: Components, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call() -> object:
            calls.append(name)
            return real()

        monkeypatch.setattr(owner, name, call)

    counted(parts.objects, "ping")
    counted(parts.cluster, "check_alive")
    counted(parts.jobs, "count_by_status")
    counted(parts.outbox, "count_by_status")
    server = start(changed={"clock": StillClock()})
    server.wait(3600)
    calls.clear()
    for _ in range(20):
        assert server.client.get("/readyz").status_code == 200
        assert "swiftkv_jobs_put_off 0.0" in server.client.get("/metrics").text
    assert sorted(calls) == ["check_alive", "count_by_status", "count_by_status", "ping"]
    server.cluster.away = True
    server.wait(5)
    assert refusal(server.client.get("/readyz"), 503)["field"] == "ray", "reported within seconds"
    server.cluster.away = False
    server.wait(60)
    assert server.client.get("/readyz").status_code == 200
    assert calls.count("ping") == 2


PARTS = {"database": "database", "ray": "cluster", "object_store": "objects", "serving": "serving"}


@pytest.mark.parametrize("away", PARTS)
@pytest.mark.parametrize("how", ["fails", "is silent", "is broken"])
def test_metrics_tell_what_is_away_and_are_there_without_it(
    parts: Components, start: Start, monkeypatch: pytest.MonkeyPatch, away: str, how: str
) -> None:
    is_away, answers = threading.Event(), threading.Event()

    def replace_method(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            if not is_away.is_set():
                return real(*arguments, **options)
            if how == "is silent":
                answers.wait(30)
            raise DatabaseUnavailableError("away") if how == "fails" else ZeroDivisionError

        monkeypatch.setattr(owner, name, call)

    asked = {
        "database": ["begin_read", "check_available"],
        "ray": ["check_alive"],
        "object_store": ["ping"],
        "serving": ["list_states"],
    }
    for name in asked[away]:
        replace_method(getattr(parts, PARTS[away]), name)
    server = start(changed={"clock": StillClock()})
    with monkeypatch.context() as hasty:
        hasty.setattr(health, "_SCRAPE_TIMEOUT_S", 1.0 if how == "is silent" else 30.0)
        is_away.set()
        found = samples(server.client)
    told = {name: found["swiftkv_dependency_up", (("dependency", name),)] for name in PARTS}
    assert told == {name: float(name != away) for name in PARTS}
    assert ("swiftkv_jobs_put_off", ()) in found
    assert (("swiftkv_jobs", (("status", "queued"),)) in found) is (away != "database")
    is_away.clear()
    answers.set()
    server.wait(3600)
    wait_for(server.client, "swiftkv_dependency_up", 1, dependency=away)
    assert ("swiftkv_jobs", (("status", "queued"),)) in samples(server.client)


@pytest.fixture
def loops(parts: Components, tmp_path: Path) -> Iterator[tuple[TestClient, StillClock]]:
    """A control plane whose own loops run, by a clock that a test advances."""
    clock, settings = StillClock(), Settings(home=tmp_path, reconcile_interval_s=0.01, _env_file=None)
    with TestClient(create_app(settings, components=replace(parts, clock=clock)), base_url=URL) as client:
        yield client, clock


def test_a_loop_that_gets_nowhere_is_told(
    parts: Components, loops: tuple[TestClient, StillClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    (client, clock), failed = loops, threading.Event()

    def broken() -> object:
        failed.set()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(parts.jobs, "list_cluster_jobs", broken)
    assert failed.wait(30)
    assert client.get("/readyz").status_code == 200, "one failed turn is not a stalled loop"
    clock.now += 300
    response = client.get("/readyz")
    assert response.status_code == 503
    assert "loop jobs" in [error["field"] for error in response.json()["errors"]]
    assert 'swiftkv_loop_stalled{loop="jobs"} 1.0' in client.get("/metrics").text


def test_a_loop_that_hangs_is_no_living_process(
    parts: Components, loops: tuple[TestClient, StillClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    (client, clock), entered, leave = loops, threading.Event(), threading.Event()

    def hanging() -> object:
        entered.set()
        leave.wait(30)
        return ()

    monkeypatch.setattr(parts.jobs, "list_cluster_jobs", hanging)
    assert entered.wait(30)
    clock.now += 200
    assert client.get("/healthz").json() == {"status": "ok"}
    clock.now += 200
    while (answer := client.get("/healthz")).json()["errors"][1:]:
        pass  # until the first steps of the other loops have ended
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (503, "loop jobs")
    leave.set()
