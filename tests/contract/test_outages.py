"""Outages while jobs run and end: an S3 that answers 503, a PostgreSQL that restarts, a full disk. Nothing crashes, and
accepted jobs and reported events are there afterwards.
"""

import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.errors import DatabaseUnavailableError, StorageError
from swiftkv_platform.jobs.attempt.events import EventReporter, MetricsBuffer
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import LocalObjectStore, open_store
from tests.support.components import make_components
from tests.support.requirements import missing, required_module
from tests.support.s3_servers import Front, client_environment, run_moto
from tests.unit.control_plane.routes.conftest import SPEC, Clock, Server, control_plane

OUTAGE_S = 600.0
"""Length of a store's outage in seconds of the control plane's clock."""


ROUNDS = 6
"""Least number of rounds of the control plane in an outage; each waits seconds for the store's client to retry."""


@contextmanager
def serving_jobs(parts: Components, home: Path) -> Iterator[Server]:
    """A control plane with room for three jobs."""
    settings = Settings(home=home, _env_file=None)
    with control_plane(parts, settings) as client:
        yield Server(client, parts, settings, max_running_jobs=3)


def begin(server: Server, name: str) -> str:
    """Submit a job and let it run; return its id."""
    job_id: str = server.submit(name=name)["id"]
    server.tick()
    server.worker(job_id).say("status", status="running")
    server.tick()
    assert status(server, job_id) == "running"
    return job_id


def finish(server: Server, job_id: str) -> None:
    server.worker(job_id, 1).artifact()
    end(server, job_id)


def end(server: Server, job_id: str) -> None:
    server.cluster.submissions[f"{job_id}-1"].log = "trained\n"
    server.cluster.finish(f"{job_id}-1", SubmissionStatus.SUCCEEDED)


def status(server: Server, job_id: str) -> str:
    found: str = server.get(f"/jobs/{job_id}")["status"]
    return found


def settle(server: Server, *job_ids: str) -> None:
    """Run the loops until the jobs have succeeded; check that their first attempt did."""
    for _ in range(50):
        server.tick()
        server.wait(60.0)
        if all(status(server, job_id) == "succeeded" for job_id in job_ids):
            break
    jobs = [server.get(f"/jobs/{job_id}") for job_id in job_ids]
    assert [(job["status"], job["attempt"]) for job in jobs] == [("succeeded", 1)] * len(jobs)
    for job_id in job_ids:
        assert "trained" in server.client.get(f"/jobs/{job_id}/logs").text


def steps(server: Server, job_id: str) -> list[int]:
    return [point["step"] for point in server.get(f"/jobs/{job_id}/metrics", limit=100)["data"]]


def through_an_outage(
    server: Server, *, begin_outage: Callable[[], object], end_outage: Callable[[str], object], lasting_s: float = 0.0
) -> None:
    """While the object store is away, end one job and let another report more; check that nothing is given up or lost.

    Args:
        end_outage: called with the id of the running job.
        lasting_s: how long the outage lasts in real seconds, at least.
    """
    ending, running = begin(server, "ending"), begin(server, "running")
    server.worker(ending).artifact()
    metrics = MetricsBuffer(EventReporter(server.parts.objects, AttemptId(running, 1), "rank0"), 20, interval_s=0.1)
    metrics.add_point({"step": 1})
    metrics.flush()

    begin_outage()
    back = time.monotonic() + lasting_s
    end(server, ending)
    waiting = server.submit(name="waiting")["id"]
    for number in itertools.count():
        if number < ROUNDS:
            metrics.add_point({"step": 2 + 2 * number})
            metrics.add_point({"step": 3 + 2 * number})
        elif time.monotonic() >= back:
            break
        server.tick()
        server.wait(OUTAGE_S / ROUNDS)
        assert status(server, ending) == status(server, running) == "running", "no job is given up"
    assert status(server, waiting) in {"queued", "starting"}
    assert server.client.get("/readyz/object_store").status_code == 503
    assert server.client.get("/readyz/database").status_code == 200

    end_outage(running)
    metrics.close()
    finish(server, running)
    settle(server, ending, running)
    assert sorted(steps(server, running)) == list(range(1, 2 * ROUNDS + 2))
    server.worker(waiting).say("status", status="running")
    finish(server, waiting)
    settle(server, waiting)


@pytest.mark.soak("ten minutes of an S3 that is away")
@pytest.mark.timeout(1200)
def test_jobs_run_and_end_while_s3_answers_503(
    tmp_path: Path, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_moto() as moto, closing(Front(moto.port)) as front:
        for name, value in client_environment(front.port).items():
            monkeypatch.setenv(name, value)
        objects = open_store(moto.uri("outage"), patient=False)
        with serving_jobs(make_components(sqlite_database, objects, clock=Clock()), tmp_path) as server:

            def end_outage(running: str) -> None:
                assert server.client.get(f"/jobs/{running}/checkpoints").status_code == 503
                assert front.refused > 0
                front.away = False

            begin_outage = partial(setattr, front, "away", True)
            through_an_outage(server, begin_outage=begin_outage, end_outage=end_outage, lasting_s=OUTAGE_S)


@pytest.mark.soak("starts a PostgreSQL of its own, over and over")
def test_jobs_go_on_when_postgresql_restarts(tmp_path: Path) -> None:
    pgserver = required_module("pgserver")
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        postgres = pgserver.get_server(directory, cleanup_mode=None)
        try:
            database = Database(f"postgresql+psycopg://postgres@/postgres?host={quote(directory, safe='')}")
            database.upgrade()
            objects = LocalObjectStore(tmp_path / "store")
            with closing(database), serving_jobs(make_components(database, objects, clock=Clock()), tmp_path) as server:
                _through_restarts(server, postgres)
        finally:
            postgres.cleanup_mode = "stop"
            postgres.cleanup()


def _through_restarts(server: Server, postgres: Any) -> None:
    running = begin(server, "running")
    for number, mode in enumerate(("fast", "immediate")):  # the second is like a crash
        _control(postgres, "stop", "-m", mode)
        key = {"Idempotency-Key": f"job-{number}"}
        refused = server.client.post("/jobs", json=SPEC, headers=key)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True), refused.text
        assert server.client.get("/healthz").status_code == 200
        server.worker(running).step(number + 1, time=1000.0 + number)
        with suppress(DatabaseUnavailableError):
            server.tick()
        _control(postgres, "start", "-w")
        accepted = server.client.post("/jobs", json=SPEC, headers=key)
        assert accepted.status_code == 201, accepted.text
        assert server.client.post("/jobs", json=SPEC, headers=key).json()["id"] == accepted.json()["id"]
        server.tick()
        server.worker(accepted.json()["id"]).say("status", status="running")
        finish(server, accepted.json()["id"])
        settle(server, accepted.json()["id"])
    finish(server, running)
    settle(server, running)
    assert steps(server, running) == [1, 2]


def _control(postgres: Any, *arguments: str) -> None:
    """Run `pg_ctl` with the server's own directory and user."""
    pgserver = required_module("pgserver")
    log = Path(postgres.pgdata) / "log"
    options = ["-o", f"-h '' -k {postgres.pgdata}"] if arguments[0] == "start" else []
    with suppress(subprocess.TimeoutExpired):
        pgserver.pg_ctl(
            ["-D", str(postgres.pgdata), "-l", str(log), *options, *arguments],
            pgdata=postgres.pgdata,
            user=postgres.system_user,
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        missing(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(directory: Path) -> Path:
    """Fill the disk of `directory` to the last byte; return the file that does."""
    filler = directory / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return filler


@pytest.mark.soak("fills a disk with jobs")
def test_nothing_accepted_is_lost_when_the_databases_disk_is_full(
    empty_database: Path, small_disk: Path, tmp_path: Path
) -> None:
    path = small_disk / "swiftkv.db"
    path.write_bytes(empty_database.read_bytes())
    objects = LocalObjectStore(tmp_path / "store")
    with (
        closing(Database(f"sqlite:///{path}")) as database,
        serving_jobs(make_components(database, objects, clock=Clock()), tmp_path) as server,
    ):
        running = begin(server, "running")
        filler = fill(small_disk)
        accepted: list[str] = []
        for number in range(200):
            answer = server.client.post("/jobs", json={**SPEC, "name": f"n{number}", "metadata": {"a": "x" * 4000}})
            if answer.status_code != 201:
                break
            accepted.append(answer.json()["id"])
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True), answer.text
        assert status(server, running) == "running", "stored rows can still be read"
        server.worker(running).step(1, time=1000.0)
        with suppress(DatabaseUnavailableError):
            server.tick()

        filler.unlink()
        for job_id in accepted:
            assert status(server, job_id) in {"queued", "starting", "running"}
        finish(server, running)
        settle(server, running)
        assert steps(server, running) == [1]


def test_jobs_run_and_end_while_the_stores_disk_is_full(
    sqlite_database: Database, small_disk: Path, tmp_path: Path
) -> None:
    objects = LocalObjectStore(small_disk / "store")

    def begin_outage() -> None:
        fill(small_disk)
        with pytest.raises(StorageError):
            objects.put_bytes("more", b"\0" * 8192)

    with serving_jobs(make_components(sqlite_database, objects, clock=Clock()), tmp_path) as server:
        through_an_outage(server, begin_outage=begin_outage, end_outage=lambda _: (small_disk / "filler").unlink())
