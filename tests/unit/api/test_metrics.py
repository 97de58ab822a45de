"""`/metrics` of a control plane that does its work: requests, ticks, waits and lags are counted once each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from swiftkv_platform.api.app import create_app
from swiftkv_platform.api.dependencies import Components
from swiftkv_platform.settings import Settings
from tests.fakes.attempt_store import FakeWorker
from tests.unit.api.conftest import SPEC, URL, Start, make_parts

DEADLINE_S = 60.0


@pytest.fixture
def parts(tmp_path: Path, empty_database: Path) -> Components:
    return replace(make_parts(tmp_path, empty_database), clock=time.time)  # by which leases are held while a step runs


@pytest.fixture
def client(tmp_path: Path, parts: Components) -> Iterator[TestClient]:
    """A control plane whose own loops turn."""
    settings = Settings(home=tmp_path, reconcile_interval_s=0.01, _env_file=None)
    with TestClient(create_app(settings, components=parts), base_url=URL) as client:
        yield client


def samples(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values by name and labels."""
    page = client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def wait_for(client: TestClient, name: str, at_least: float, **labels: str) -> float:
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
    assert len(counted) < 10, "neither 'nowhere' nor 'job_1' is a route"


def test_a_request_that_fails_is_counted_as_a_5xx(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    server.client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(server.parts.jobs, "get", broken)
    assert server.client.get("/jobs/job_x").status_code == 500
    labels = (("method", "GET"), ("route", "/jobs/{job_id}"), ("status", "5xx"))
    assert samples(server.client)["swiftkv_http_request_duration_seconds_count", labels] == 1
