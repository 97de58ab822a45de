"""A control plane in its own process on a real Ray, which tests kill and restart. Unless a test names another
entrypoint, only the training is fake.

The fake training uses the real attempt channel and publishes through the real store. It waits for a file where a test
wants to act in between, and records each of its starts in a ledger.

A process that has imported everything forks the control planes, so a restart takes a tenth of a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from swiftkv_platform.client import Client
from swiftkv_platform.client.errors import UnreachableError
from swiftkv_platform.local.ray_head import RayHead, make_auth_environment
from tests.support.rays import free_port
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]

ZYGOTE = """
import os, signal, sys
from dataclasses import replace
import uvicorn
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.wiring import build_components
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.control_plane.ray import Entrypoint
from swiftkv_platform.settings import Settings

def serve():
    configure_logging()
    settings = Settings()
    parts = build_components(settings)
    entrypoint = Entrypoint((sys.executable, *sys.argv[1:]), parts.objects.uri, {"OMP_NUM_THREADS": "1"})
    app = create_app(settings, components=replace(parts, entrypoint=entrypoint))
    uvicorn.run(app, host=settings.host, port=settings.port, access_log=False)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.stdin.close()
        try:
            serve()
        finally:
            os._exit(0)
    print(child, flush=True)
"""

READ_REQUEST = """
import argparse, os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
arguments = argparse.ArgumentParser()
for name, kind in (("--job-id", str), ("--attempt", int), ("--store", str), ("--protocol", int)):
    arguments.add_argument(name, type=kind)
given = arguments.parse_args()
store = open_store(given.store)
attempts = AttemptStore(store)
attempt = AttemptId(given.job_id, given.attempt)
request = attempts.read_request(attempt)
"""
"""First lines of a program that replaces an attempt: parse its arguments, and read its request."""

ATTEMPT = (
    READ_REQUEST
    + """
from tests.support.fakes.attempt_store import FakeWorker
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
    if attempts.is_pause_requested(attempt):
        worker.say("status", "paused", time=time.time(), status="paused")
        sys.exit(0)
    time.sleep(0.05)
worker.step(2, 3, time=time.time(), total=3)
worker.say("status", "evaluating", time=time.time(), status="evaluating")
worker.artifact()
print("done", flush=True)
"""
)


@dataclass(frozen=True)
class RayCluster:
    url: str
    env: dict[str, str]
    """Environment variables that a process needs to talk to it."""

    @classmethod
    def of(cls, head: RayHead) -> RayCluster:
        """Wait until the head takes jobs."""
        auth = make_auth_environment(head.token_file)
        home = {"HOME": str(head.temp_dir), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ""}
        eventually(lambda: takes_jobs(head), "Ray takes jobs", seconds=180.0)
        return cls(head.dashboard_url, {**os.environ, **home, **auth})


def takes_jobs(head: RayHead) -> bool:
    """Whether the node's agent, which starts after the dashboard, has registered."""
    headers = {"Authorization": f"Bearer {head.token_file.read_text()}"}
    response = httpx.post(
        f"{head.dashboard_url}/api/jobs/", json={"entrypoint": "true"}, headers=headers, timeout=60.0, trust_env=False
    )
    return response.is_success


class Plane:
    """A control plane process that can be killed and started again.

    Args:
        settings: more `SWIFTKV_*` variables, besides those for home, port and Ray.
        entrypoint: arguments of Python that run an attempt instead of the fake training, e.g. `("-m",
        "swiftkv_platform.jobs.distill")`.
    """

    def __init__(
        self,
        directory: Path,
        ray_cluster: RayCluster,
        settings: Mapping[str, str] | None = None,
        *,
        entrypoint: Sequence[str] | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.gates, self.home, script = directory / "gates", directory / "home", directory / "attempt.py"
        self.gates.mkdir()
        script.write_text(ATTEMPT.format(root=str(ROOT), gates=str(self.gates)))
        self._log = (directory / "server.log").open("ab")
        self._port = free_port()
        self._env = {
            **ray_cluster.env,
            "SWIFTKV_HOME": str(self.home),
            "SWIFTKV_PORT": str(self._port),
            "SWIFTKV_RAY_DASHBOARD_URL": ray_cluster.url,
            "SWIFTKV_RECONCILE_INTERVAL_S": "0.2",
            "SWIFTKV_MAX_RUNNING_JOBS": "4",
            **(settings or {}),
        }
        self.url = f"http://127.0.0.1:{self._port}"
        self.client = Client(self.url, outage_s=60.0)
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE, *(entrypoint or [str(script)])],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._pid: int | None = None

    def begin(self) -> None:
        """Start the process; it takes requests a little later."""
        assert self._pid is None, "the control plane is already running"
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write("\n")
        self._zygote.stdin.flush()
        self._pid = int(self._zygote.stdout.readline())

    def start(self) -> None:
        self.begin()
        eventually(self._is_up, "the control plane answers")

    def kill(self) -> None:
        assert self._pid is not None
        pid, self._pid = self._pid, None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), "the killed process is gone")

    def stop(self) -> None:
        if self._pid is not None:
            pid, self._pid = self._pid, None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            eventually(lambda: not Path(f"/proc/{pid}").exists(), "the stopped process is gone")
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(60)
        self.client.close()
        self._log.close()

    def starts(self) -> list[list[str]]:
        """Return the ledger: job, attempt, process id and resumed checkpoint of each start."""
        path = self.gates / "ledger"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def ledger(self, job_id: str) -> list[list[str]]:
        """Return the starts of a job's attempts: attempt, process id, resumed checkpoint."""
        return [start[1:] for start in self.starts() if start[0] == job_id]

    def submit(self, **metadata: str) -> str:
        return self.client.jobs.create(spec(**metadata)).id

    def wait_for_step(self, job_id: str, step: int) -> None:
        def reached() -> bool:
            progress = self.client.jobs.get(job_id).progress
            return progress is not None and progress.step >= step

        eventually(reached, f"job {job_id} is at step {step}")

    def _is_up(self) -> bool:
        assert Path(f"/proc/{self._pid}").exists(), "the control plane has ended; see server.log"
        try:
            return self.client.health()["status"] == "ok"
        except UnreachableError:
            return False


def spec(**metadata: str) -> dict[str, Any]:
    """Return a job for the fake training: `wait` names the file to wait for, `fail` the attempt that fails."""
    return {"name": "test", "model": {"name_or_path": "org/teacher"}, "metadata": metadata}
