"""Control planes that are frozen and go on, whose ticks outlast their lease: no limit is passed, nothing starts twice.

Two processes reconcile on one database and one object store; Ray is a directory.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicy, Tenants
from swiftkv_platform.control_plane.base import Page
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.jobs.job import Job
from swiftkv_platform.control_plane.jobs.polling import SPARING, PollSchedule
from swiftkv_platform.control_plane.jobs.ports import Entrypoint, Submission, SubmissionStatus
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.loops.leadership import Leadership
from swiftkv_platform.control_plane.loops.loop import ControlLoop
from swiftkv_platform.control_plane.loops.rows import Leases
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore
from tests.fakes.attempt_store import FakeWorker
from tests.fakes.cluster import FakeCluster
from tests.records import make_job, store

ROUNDS = 100

JOBS, RUNNING = 10, 4

LEASE_S = 0.4

TICK_S = 0.1
"""A request to Ray: with four jobs a tick takes as long as the lease, with its requests to start others longer."""

LONGEST_FREEZE_S = 1.0

ROUND_DEADLINE_S = 120.0

QUOTAS = {"a": TenantPolicy(max_running_jobs=2), "b": TenantPolicy(max_running_jobs=3)}


class Granted(Tenants):
    def policy(self, tenant: str) -> TenantPolicy:
        return QUOTAS[tenant]


class DirectoryCluster(FakeCluster):
    """A Ray that several processes share. Like Ray it starts nothing under an id that it knows.

    A submission is a file with the time of its start and of its end.
    """

    def __init__(self, root: Path, objects: LocalObjectStore) -> None:
        super().__init__()
        self._root = root
        self._objects = objects

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        time.sleep(TICK_S)
        path = self._root / submission_id
        job_id, _, attempt = submission_id.rpartition("-")
        # All that the attempt says is there before it starts: the process that starts it may be frozen right after.
        worker = FakeWorker(self._objects, job_id, int(attempt), f"driver-{os.getpid()}")
        worker.say("status", status="running", time=time.time())
        worker.artifact()
        began = time.time()
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(f"{began} {began + random.uniform(0.1, 0.6)}", encoding="utf-8")
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            pass
        finally:
            draft.unlink()

    def status(self, submission_id: str) -> Submission | None:
        time.sleep(TICK_S)
        path = self._root / submission_id
        if not path.exists():
            return None
        over = float(path.read_text(encoding="utf-8").split()[1]) <= time.time()
        return Submission(SubmissionStatus.SUCCEEDED if over else SubmissionStatus.RUNNING)

    def stop(self, submission_id: str) -> None:
        raise AssertionError(f"nothing ends {submission_id}")

    def logs(self, submission_id: str, *, tail_lines: int | None = None) -> Iterator[bytes]:
        return iter(())


def reconcile(url: str, root: Path, holder: str) -> None:
    """Program of a control plane: one loop, until it is killed."""
    configure_logging()
    database, objects = Database(url), LocalObjectStore(root / "store")
    leadership = Leadership(Leases(database), "jobs", holder, time.time, lease_s=LEASE_S)
    reconciler = Reconciler(
        jobs=JobRepository(database),
        cluster=DirectoryCluster(root / "ray", objects),
        store=AttemptStore(objects),
        digest=manifest_digest,
        clock=time.time,
        entrypoint=Entrypoint(("python",), objects.uri),
        max_running_jobs=RUNNING,
        policies=Granted(),
        interval_s=0.05,
        polls=PollSchedule(SPARING),
        concurrency=2,
        lease=leadership,
    )
    ControlLoop("jobs", leadership.guard(reconciler.tick), interval_s=0.02, clock=time.time).start()
    signal.pause()


@contextmanager
def two_planes(url: str, root: Path) -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    planes = [context.Process(target=reconcile, args=(url, root, name), daemon=True) for name in ("first", "second")]
    for plane in planes:
        plane.start()
    try:
        yield planes
    finally:
        for plane in planes:
            plane.kill()
            plane.join()


def freeze(plane: BaseProcess, seconds: float) -> None:
    assert plane.pid is not None
    assert plane.is_alive()
    os.kill(plane.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(plane.pid, signal.SIGCONT)


def most_at_once(runs: list[tuple[float, float]]) -> int:
    changes = sorted([(began, 1) for began, _ in runs] + [(ended, -1) for _, ended in runs])
    held = [0]
    for _, change in changes:
        held.append(held[-1] + change)
    return max(held)


JOBS, RUNNING = 10, 4


@pytest.mark.soak("freezes processes, a hundred times")
def test_frozen_control_planes_pass_no_limit_and_submit_nothing_twice(database: Database, tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.mkdir()
    rng = random.Random(os.environ.get("SWIFTKV_SEED", "1"))
    jobs, url = JobRepository(database), database._engine.url.render_as_string(hide_password=False)
    with two_planes(url, tmp_path) as planes:
        for number in range(ROUNDS):
            told = [store(jobs, make_job(tenant=rng.choice("ab"))) for _ in range(JOBS)]
            deadline = time.monotonic() + ROUND_DEADLINE_S
            while jobs.live_among([job.id for job in told]):
                assert time.monotonic() < deadline, f"round {number}: {jobs.count_by_status()}"
                freeze(rng.choice(planes), rng.uniform(0.1, LONGEST_FREEZE_S))
                time.sleep(rng.uniform(0.0, 0.3))
            check_round(jobs, told, ray)


def check_round(jobs: JobRepository, told: list[Job], ray: Path) -> None:
    ids = {job.id for job in told}
    started = [path.name for path in ray.iterdir() if path.name.rpartition("-")[0] in ids]
    assert sorted(started) == sorted(f"{job_id}-1" for job_id in ids)
    times = {name: tuple(map(float, (ray / name).read_text(encoding="utf-8").split())) for name in started}
    runs = {job.id: (times[f"{job.id}-1"][0], times[f"{job.id}-1"][1]) for job in told}
    assert most_at_once(list(runs.values())) <= RUNNING
    for tenant, policy in QUOTAS.items():
        own = [runs[job.id] for job in told if job.tenant == tenant]
        assert most_at_once(own) <= (policy.max_running_jobs or 0)
    for job in told:
        history = jobs.events(job.id, Page(limit=100, order="asc")).items
        statuses = [event.data["status"] for event in history if event.type == "status"]
        assert statuses == ["queued", "starting", "running", "succeeded"]
