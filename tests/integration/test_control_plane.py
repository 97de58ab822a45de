"""The control plane as a process, on a real Ray: killed, restarted, cancelled. Only the training is a stand-in.

The stand-in talks through the real attempt channel and waits for a file where a test wants to act in between.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.client import Client
from swiftkv_platform.client.errors import UnreachableError
from swiftkv_platform.cluster.ray_jobs import RayJobs
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.local.ray_head import RayHead, auth_environment
from swiftkv_platform.orchestration.ports import JobCluster, SubmissionStatus
from tests.fakes.cluster import FakeCluster
from tests.rays import free_port, ray_head

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

SERVER = """
import sys
from dataclasses import replace
import uvicorn
from swiftkv_platform.api.app import create_app
from swiftkv_platform.api.dependencies import build_components
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.orchestration.reconciler import Entrypoint
from swiftkv_platform.settings import Settings
configure_logging()
settings = Settings()
parts = build_components(settings)
entrypoint = Entrypoint((sys.executable, sys.argv[1]), parts.objects.uri, {"OMP_NUM_THREADS": "1"})
app = create_app(settings, components=replace(parts, entrypoint=entrypoint))
uvicorn.run(app, host=settings.host, port=settings.port, access_log=False)
"""

ATTEMPT = """
import argparse, os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
from tests.fakes.attempt_store import FakeWorker
arguments = argparse.ArgumentParser()
for name, kind in (("--job-id", str), ("--attempt", int), ("--store", str)):
    arguments.add_argument(name, type=kind)
given = arguments.parse_args()
store = open_store(given.store)
request = AttemptStore(store).read_request(given.job_id, given.attempt)
gates = Path({gates!r})
with (gates / "ledger").open("a") as ledger:
    ledger.write(f"{{given.job_id}} {{given.attempt}} {{os.getpid()}} {{request.resume_from}}\\n")
print("attempt", given.attempt, flush=True)
worker = FakeWorker(store, given.job_id, given.attempt)
worker.say("status", "running", time=time.time(), status="running")
worker.step(1, time=time.time(), total=3)
worker.checkpoint(1)
if request.spec.metadata.get("fail") == str(given.attempt):
    worker.say("error", "the node died", time=time.time(), code="worker_lost", retryable=True)
    sys.exit(1)
while request.spec.metadata.get("wait") and not (gates / request.spec.metadata["wait"]).exists():
    time.sleep(0.05)
worker.step(2, 3, time=time.time(), total=3)
worker.say("status", "evaluating", time=time.time(), status="evaluating")
worker.artifact()
print("done", flush=True)
"""


def eventually(condition: Callable[[], Any], what: str, *, seconds: float = 60.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return value


@dataclass(frozen=True)
class RayCluster:
    url: str
    env: dict[str, str]
    """What a process needs to talk to it."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with ray_head({"PYTHONPATH": str(ROOT)}, num_cpus=4) as head:
        auth = auth_environment(head.token_file)
        home = {"HOME": str(head.temp_dir), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ""}
        eventually(lambda: takes_jobs(head), "Ray takes jobs", seconds=180.0)
        yield RayCluster(head.dashboard_url, {**os.environ, **home, **auth})


def takes_jobs(head: RayHead) -> bool:
    """Whether the node's agent, which comes up after the dashboard, has registered."""
    headers = {"Authorization": f"Bearer {head.token_file.read_text()}"}
    response = httpx.post(
        f"{head.dashboard_url}/api/jobs/", json={"entrypoint": "true"}, headers=headers, timeout=60.0, trust_env=False
    )
    return response.is_success


class Plane:
    """A control plane process that can be killed and started again."""

    def __init__(self, directory: Path, ray_cluster: RayCluster) -> None:
        self.gates = directory / "gates"
        self.gates.mkdir()
        self._script = directory / "attempt.py"
        self._script.write_text(ATTEMPT.format(root=str(ROOT), gates=str(self.gates)))
        self._log = (directory / "server.log").open("ab")
        self._port = free_port()
        self._env = {
            **ray_cluster.env,
            "SWIFTKV_HOME": str(directory / "home"),
            "SWIFTKV_PORT": str(self._port),
            "SWIFTKV_RAY_DASHBOARD_URL": ray_cluster.url,
            "SWIFTKV_RECONCILE_INTERVAL_S": "0.2",
            "SWIFTKV_MAX_RUNNING_JOBS": "4",
        }
        self.client = Client(f"http://127.0.0.1:{self._port}", outage_s=60.0)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, str(self._script)]
        self._process = subprocess.Popen(command, env=self._env, stdout=self._log, stderr=self._log)
        eventually(self._is_up, "the control plane answers")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
        self.client.close()
        self._log.close()

    def ledger(self, job_id: str) -> list[list[str]]:
        """What each start of an attempt has written: attempt, process, checkpoint gone on from."""
        path = self.gates / "ledger"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(f"{job_id} ")]

    def submit(self, **metadata: str) -> str:
        spec = {"name": "test", "model": {"name_or_path": "org/teacher"}, "metadata": metadata}
        return self.client.jobs.create(spec).id

    def wait_for_step(self, job_id: str, step: int) -> None:
        def reached() -> bool:
            progress = self.client.jobs.get(job_id).progress
            return progress is not None and progress.step >= step

        eventually(reached, f"job {job_id} is at step {step}")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the control plane has ended; see server.log"
        try:
            return self.client.health()["status"] == "ok"
        except UnreachableError:
            return False


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, ray_cluster: RayCluster) -> Iterator[Plane]:
    plane = Plane(tmp_path_factory.mktemp("plane"), ray_cluster)
    plane.start()
    yield plane
    plane.stop()


def test_a_killed_control_plane_follows_its_jobs_to_their_end(plane: Plane) -> None:
    job_id = plane.submit(wait="killed")
    followed: list[Any] = []
    follower = threading.Thread(target=lambda: followed.extend(plane.client.jobs.events(job_id)))
    follower.start()
    plane.wait_for_step(job_id, 1)

    plane.kill()
    (plane.gates / "killed").touch()  # the run goes on, and perhaps to its end, while nobody looks
    plane.start()
    job = plane.client.jobs.wait(job_id, timeout=60)
    follower.join(60)

    assert job.status == "succeeded"
    assert [attempt for attempt, *_ in plane.ledger(job_id)] == ["1"], "submitted exactly once"
    events = list(plane.client.jobs.events(job_id, follow=False))
    assert [event.id for event in followed] == [event.id for event in events], "followed over the kill, each event once"
    statuses = [event.data["status"] for event in events if event.type == "status"]
    assert statuses == ["queued", "starting", "running", "evaluating", "succeeded"]
    assert [event.type for event in events].count("metrics") == 2
    assert [point.step for point in plane.client.jobs.metrics(job_id)] == [1, 2, 3]
    assert list(plane.client.jobs.logs(job_id))[-2:] == ["attempt 1", "done"]
    assert job.distilled_model is not None
    assert plane.client.models.get(job.distilled_model).job_id == job_id


def test_a_failed_attempt_is_followed_by_one_that_goes_on_from_its_checkpoint(plane: Plane, tmp_path: Path) -> None:
    job_id = plane.submit(fail="1")
    job = plane.client.jobs.wait(job_id, timeout=60)
    assert (job.status, job.attempt) == ("succeeded", 2)
    first, second = plane.ledger(job_id)
    assert (first[0], first[2]) == ("1", "None")
    assert (second[0], second[2]) == ("2", f"jobs/{job_id}/attempts/1/checkpoints/step-00000001")
    assert "==== attempt 2 ====" in list(plane.client.jobs.logs(job_id, follow=True))
    files = {file.path: file for file in plane.client.jobs.artifacts(job_id)}
    downloaded = plane.client.jobs.download(job_id, "data.bin", tmp_path / "data.bin")
    assert downloaded.stat().st_size == files["data.bin"].size


def test_cancelling_ends_the_process(plane: Plane) -> None:
    job_id = plane.submit(wait="never")
    plane.wait_for_step(job_id, 1)
    [[_, process, _]] = plane.ledger(job_id)
    assert Path(f"/proc/{process}").exists()
    plane.client.jobs.cancel(job_id)
    job = plane.client.jobs.wait(job_id, timeout=60)
    assert job.status == "cancelled"
    eventually(lambda: not Path(f"/proc/{process}").exists(), "the process is gone")
    assert job.error is None


def test_one_key_gives_one_job(plane: Plane) -> None:
    spec = {"name": "test", "model": {"name_or_path": "org/teacher"}}
    first = plane.client.jobs.create(spec, idempotency_key="once")
    again = plane.client.jobs.create(spec, idempotency_key="once")
    assert first.id == again.id
    plane.client.jobs.wait(first.id, timeout=60)
    assert len(plane.ledger(first.id)) == 1


def test_readiness_sees_every_part(plane: Plane) -> None:
    assert plane.client.ready()["checks"] == {"database": "ok", "ray": "ok", "object_store": "ok"}


class FakeWithProcesses(FakeCluster):
    """Ends every submission as its command would: `exit N`."""

    def submit(self, submission_id: str, entrypoint: str, env: Any) -> None:
        known = submission_id in self.submissions
        super().submit(submission_id, entrypoint, env)
        if not known and "exit" in entrypoint:
            self.submissions[submission_id].log = "hello\n"
            ended = SubmissionStatus.SUCCEEDED if "exit 0" in entrypoint else SubmissionStatus.FAILED
            self.finish(submission_id, ended, "command failed with exit code 3")


@pytest.fixture(params=["fake", "ray"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> JobCluster:
    if request.param == "fake":
        return FakeWithProcesses()
    ray_cluster: RayCluster = request.getfixturevalue("ray_cluster")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, ray_cluster.env[name])
    return RayJobs(ray_cluster.url)


def ended(cluster: JobCluster, submission_id: str) -> SubmissionStatus:
    def status() -> SubmissionStatus | None:
        found = cluster.status(submission_id)
        assert found is not None
        return found.status if found.status.is_terminal else None

    outcome: SubmissionStatus = eventually(status, f"{submission_id} has ended")
    return outcome


def test_cluster_contract_an_id_starts_one_command(cluster: JobCluster, tmp_path: Path) -> None:
    cluster.check()
    for _ in range(2):
        cluster.submit("once", 'echo hello; test "$WORD" = there && exit 0', {"WORD": "there"})
    assert ended(cluster, "once") is SubmissionStatus.SUCCEEDED
    assert "hello" in cluster.logs("once").splitlines()
    cluster.stop("once")
    assert ended(cluster, "once") is SubmissionStatus.SUCCEEDED


def test_cluster_contract_a_failure_says_so(cluster: JobCluster) -> None:
    cluster.submit("failing", "echo hello; exit 3", {})
    assert ended(cluster, "failing") is SubmissionStatus.FAILED
    found = cluster.status("failing")
    assert found is not None
    assert "exit code 3" in found.message


def test_cluster_contract_a_stopped_submission_ends(cluster: JobCluster) -> None:
    cluster.submit("stopped", "sleep 1000", {})
    cluster.stop("stopped")
    assert ended(cluster, "stopped") is SubmissionStatus.STOPPED


def test_cluster_contract_an_unknown_id_is_none_and_harmless(cluster: JobCluster) -> None:
    assert cluster.status("unknown") is None
    assert cluster.logs("unknown") == ""
    cluster.stop("unknown")


def test_a_cluster_that_is_away_is_said_to_be() -> None:
    cluster = RayJobs(f"http://127.0.0.1:{free_port()}")
    for call in (cluster.check, lambda: cluster.status("x"), lambda: cluster.submit("x", "true", {})):
        with pytest.raises(ClusterUnavailableError, match="SWIFTKV_RAY_DASHBOARD_URL"):
            call()
