"""The real application on a real database, with a cluster that a test commands and loops that a test turns."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from structlog.testing import capture_logs

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.reconciler import DeploymentReconciler
from swiftkv_platform.control_plane.deployments.rollout_steps import RolloutReconciler
from swiftkv_platform.control_plane.health import ControlPlaneHistograms
from swiftkv_platform.control_plane.jobs.reconciler import PollIntervals, PollSchedule, Reconciler
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.control_plane.webhooks import WebhookDeliverer, make_webhook_rules, send_webhook
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import LocalObjectStore
from swiftkv_platform.traces import DISABLED_SPAN_RECORDER
from tests.support.components import make_components
from tests.support.fakes.attempt_store import FakeWorker
from tests.support.fakes.cluster import FakeCluster
from tests.support.fakes.serve_cluster import FakeServeCluster
from tests.support.model_configs import llama_config
from tests.support.records import UNDISPUTED
from tests.support.servers import serving

URL = "http://127.0.0.1:8000"
SPEC: dict[str, Any] = {"name": "test", "model": {"name_or_path": "org/teacher"}}
"""A spec that passes without looking at anything."""


class Clock:
    """Advances by a fraction of a lease at every look, so that retries come soon and no step outlasts its lease."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


class StillClock(Clock):
    """Stands still until a test advances it."""

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    """A control plane behind a client. Its own loops sleep; `tick` runs a round of each."""

    client: httpx.Client
    parts: Components
    settings: Settings
    max_running_jobs: int = 1

    def __post_init__(self) -> None:
        assert isinstance(self.parts.cluster, FakeCluster)
        assert isinstance(self.parts.serving, FakeServeCluster)
        self.cluster, self.serving = self.parts.cluster, self.parts.serving
        settings = self.settings.model_copy(update={"max_running_jobs": self.max_running_jobs})
        polls = PollSchedule(PollIntervals(0.0, 0.0, 0.0))
        self._reconciler = Reconciler(
            self.parts,
            settings,
            UNDISPUTED,
            ControlPlaneHistograms(),
            DISABLED_SPAN_RECORDER,
            polls=polls,
            concurrency=1,
        )
        self._deployments = DeploymentReconciler(self.parts, settings, UNDISPUTED)
        self._rollouts = RolloutReconciler(self.parts, settings, UNDISPUTED)
        self._webhooks = WebhookDeliverer(
            self.parts.outbox, make_webhook_rules(self.settings), send_webhook, self.parts.clock
        )

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        assert isinstance(self.parts.clock, Clock)
        self.parts.clock.now += seconds

    def tick(self) -> None:
        self._reconciler.tick()
        self._deployments.tick()
        self._rollouts.tick()
        self._webhooks.tick()
        self._webhooks.wait_until_idle()

    def submit(self, **spec: Any) -> dict[str, Any]:
        response = self.client.post("/jobs", json={**SPEC, **spec})
        assert response.status_code == 201, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def get(self, path: str, **params: Any) -> Any:
        response = self.client.get(path, params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def worker(self, job_id: str, attempt: int = 1) -> FakeWorker:
        return FakeWorker(self.parts.objects, job_id, attempt)

    def run(self, job_id: str) -> FakeWorker:
        """Start the job's first attempt; its worker says that it runs."""
        self.tick()
        worker = self.worker(job_id)
        worker.say("status", status="running")
        return worker

    def end(self, job_id: str, status: SubmissionStatus = SubmissionStatus.SUCCEEDED, attempt: int = 1) -> None:
        self.cluster.finish(f"{job_id}-{attempt}", status)
        self.tick()

    def succeed(self, *, report: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
        """Run a job to its end and return it. `report`: fields to add to its model's report."""
        job_id = self.submit(**spec)["id"]
        worker = self.run(job_id)
        worker.step(1, 2, time=1001)
        worker.step(3, time=1002)
        worker.checkpoint(2)
        worker.artifact(**(report or {}))
        self.cluster.submissions[f"{job_id}-1"].log = "trained\n"
        self.end(job_id)
        job: dict[str, Any] = self.get(f"/jobs/{job_id}")
        assert job["status"] == "succeeded"
        return job


@pytest.fixture
def teacher(tmp_path: Path) -> dict[str, str]:
    """A model of 12 layers, as a spec names it."""
    directory = tmp_path / "teacher"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(llama_config(12)))
    return {"name_or_path": str(directory)}


def make_parts(directory: Path, empty_database: Path) -> Components:
    """Real database and object store in `directory`, clusters that a test commands."""
    database = Database(f"sqlite:///{shutil.copy(empty_database, directory / 'test.db')}")
    return make_components(database, LocalObjectStore(directory / "store"), clock=Clock())


@contextmanager
def control_plane(parts: Components, settings: Settings, url: str = URL) -> Iterator[TestClient]:
    """A client of the application, whose own loops have turned once and sleep from then on."""
    app = create_app(_asleep(settings), components=parts)
    with TestClient(app, base_url=url) as client:
        _first_turns(app)
        yield client


@contextmanager
def served_control_plane(parts: Components, settings: Settings) -> Iterator[str]:
    """The same on a port of its own, for clients that want a real socket."""
    app = create_app(_asleep(settings), components=parts)
    with serving(app) as url:
        _first_turns(app)
        yield url


def _asleep(settings: Settings) -> Settings:
    return settings.model_copy(update={"reconcile_interval_s": 1e6})


def _first_turns(app: FastAPI) -> None:
    """Wait until each loop has turned once: one that turned later would meet the test's jobs or not, by chance."""
    until = time.monotonic() + 60.0
    while waiting := [loop.name for loop in app.state.readiness.loops if loop.last_success is None]:
        assert time.monotonic() < until, f"loops that have not turned: {waiting}"
        time.sleep(0.001)


Start = Callable[..., Server]


@pytest.fixture
def parts(tmp_path: Path, empty_database: Path) -> Components:
    return make_parts(tmp_path, empty_database)


@pytest.fixture
def start(parts: Components, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a control plane on the test's database and store, with other parts and settings."""
    with ExitStack() as stack:

        def begin(url: str = URL, changed: Mapping[str, Any] | None = None, **settings: Any) -> Server:
            chosen = Settings(**{"home": tmp_path, "api_keys_file": None, "_env_file": None, **settings})
            here = replace(parts, **(changed or {}))
            return Server(stack.enter_context(control_plane(here, chosen, url)), here, chosen)

        yield begin


@pytest.fixture
def server(start: Start) -> Server:
    return start(max_request_bytes=4096)


def refusal(response: httpx.Response, status: int = 422) -> dict[str, Any]:
    """Check that the request was refused with this status; return the first error."""
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["errors"][0]
    return error


@pytest.fixture(autouse=True)
def short_logs() -> Iterator[None]:
    """Without configuration, structlog draws each traceback with all variables, which takes seconds."""
    with capture_logs():
        yield
