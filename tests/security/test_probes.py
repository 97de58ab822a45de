"""`/readyz` and `/metrics` need no key, so asking often costs little; and they tell of loops that get nowhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from swiftkv_platform.api.app import create_app
from swiftkv_platform.orchestration.loop import ControlLoop
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import URL, Clock, Server, control_plane, make_parts


@pytest.fixture(autouse=True)
def _short_logs() -> Iterator[None]:
    """Without configuration, structlog draws each traceback with all variables, which takes seconds."""
    with capture_logs():
        yield


class StillClock(Clock):
    """Stands still unless it is told."""

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    parts = replace(make_parts(tmp_path, empty_database), clock=StillClock())
    settings = Settings(home=tmp_path, _env_file=None)
    with control_plane(parts, settings) as client:
        yield Server(client, parts, settings)


def later(server: Server, seconds: float) -> None:
    clock = server.parts.clock
    assert isinstance(clock, StillClock)
    clock.now += seconds


def test_probes_that_come_at_once_look_once(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = replace(make_parts(tmp_path, empty_database), clock=StillClock())
    calls: list[str] = []

    def counted(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call() -> object:
            calls.append(name)
            return real()

        monkeypatch.setattr(owner, name, call)

    counted(parts.objects, "ping")
    counted(parts.cluster, "check")
    counted(parts.jobs, "count_by_status")
    counted(parts.outbox, "count_by_status")
    settings = Settings(home=tmp_path, _env_file=None)
    with control_plane(parts, settings) as client:
        server = Server(client, parts, settings)
        later(server, 3600)
        calls.clear()
        for _ in range(20):
            assert client.get("/readyz").status_code == 200
            assert client.get("/metrics").status_code == 200
        assert sorted(calls) == ["check", "count_by_status", "count_by_status", "ping"]
        later(server, 60)
        client.get("/readyz")
        assert calls.count("ping") == 2


def test_an_outage_is_told_within_seconds(server: Server) -> None:
    assert server.client.get("/readyz").status_code == 200
    server.cluster.away = True
    later(server, 5)
    assert [error["field"] for error in server.client.get("/readyz").json()["errors"]] == ["ray"]
    server.cluster.away = False
    later(server, 5)
    assert server.client.get("/readyz").status_code == 200


def test_a_loop_that_gets_nowhere_is_told(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = replace(make_parts(tmp_path, empty_database), clock=StillClock())
    failed = threading.Event()

    def broken() -> object:
        failed.set()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(parts.jobs, "on_cluster", broken)
    settings = Settings(home=tmp_path, reconcile_interval_s=0.01, _env_file=None)
    with TestClient(create_app(settings, components=parts), base_url=URL) as client:
        server = Server(client, parts, settings)
        assert failed.wait(30)
        assert client.get("/readyz").status_code == 200, "it may be mended by its next turn"
        later(server, 300)
        response = client.get("/readyz")
        assert response.status_code == 503
        assert "loop jobs" in [error["field"] for error in response.json()["errors"]]
        assert 'swiftkv_loop_stalled{loop="jobs"} 1.0' in client.get("/metrics").text


def test_a_loop_in_the_middle_of_a_step_stalls_as_well() -> None:
    clock, entered, leave = StillClock(), threading.Event(), threading.Event()

    def hanging() -> None:
        entered.set()
        leave.wait(30)

    loop = ControlLoop("test", hanging, interval_s=1.0, clock=clock)
    stalled = [loop.is_stalled]
    loop.start()
    assert entered.wait(30)
    stalled.append(loop.is_stalled)
    clock.now += 3600
    stalled.append(loop.is_stalled)
    leave.set()
    loop.stop(30)
    stalled.append(loop.is_stalled)
    assert stalled == [False, False, True, False]


def test_jobs_that_are_put_off_show_in_a_metric(server: Server) -> None:
    assert "swiftkv_jobs_put_off 0.0" in server.client.get("/metrics").text
