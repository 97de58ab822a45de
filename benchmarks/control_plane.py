"""Response times of the control plane with many jobs in its database, compared with an empty one in the same run.

    python -m benchmarks.control_plane [--jobs 10000] [--requests 300] [--postgres [URL]]

Two applications behind sockets, each on SQLite (or on a schema of PostgreSQL: a temporary server, or URL, whose
schemas `measured_*` are dropped); requests alternate between them. Jobs in the database have ended, except one in a
hundred, which waits; they belong to ten tenants and have three events each. There is no Ray, and no job starts
meanwhile.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
from sqlalchemy import insert, text

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import EventRow, JobRow
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason, make_status_event, transition
from swiftkv_platform.control_plane.jobs.repository import make_job_columns
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.components import make_components
from tests.support.postgres import postgres_server
from tests.support.servers import serving

JOB_SPEC = {"name": "measured", "model": {"name_or_path": "org/teacher"}}
NUM_TENANTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--postgres", nargs="?", const="", metavar="URL", help="use PostgreSQL; without URL, a temporary server"
    )
    options = parser.parse_args()
    configure_logging(level=logging.WARNING)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(postgres_server()) if options.postgres == "" else options.postgres
        clients = {}
        # start an application per database
        for name, jobs in (("empty", 0), ("full", options.jobs)):
            database = open_database(name, directory, postgres)
            insert_jobs(database, jobs)
            settings = Settings(home=directory, reconcile_interval_s=1.0, max_running_jobs=1, _env_file=None)
            parts = make_components(database, LocalObjectStore(directory / name))
            url = stack.enter_context(serving(create_app(settings, components=parts)))
            clients[name] = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=60))
        print(
            json.dumps(
                {"jobs": options.jobs, "requests": options.requests, **compare_latencies(clients, options.requests)}
            )
        )


def open_database(name: str, directory: Path, postgres: str | None) -> Database:
    url = f"sqlite:///{directory / name}.db"
    if postgres is not None:
        admin, name = Database(postgres), f"measured_{name}"
        with admin.begin_write() as session:
            session.execute(text(f"DROP SCHEMA IF EXISTS {name} CASCADE"))
            session.execute(text(f"CREATE SCHEMA {name}"))
        admin.close()
        url = f"{postgres}{'&' if '?' in postgres else '?'}options=-csearch_path%3D{name}"
    database = Database(url)
    database.upgrade()
    return database


def insert_jobs(database: Database, count: int) -> None:
    spec = JobSpec.model_validate(JOB_SPEC)
    jobs, events = [], []
    for number in range(count):
        tenant = f"tenant-{number % NUM_TENANTS}" if number % NUM_TENANTS else "default"
        job = Job(new_id("job"), tenant, "ann", spec, 1000 + number)
        job_events = [make_status_event(job, now=job.created_at)]
        if number % 100:
            for status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
                job, event = transition(job, status, now=1000 + number, reason=Reason("cancelled", "enough"))
                job_events.append(event)
        jobs.append(make_job_columns(job))
        events += [vars(event) for event in job_events]
    with database.begin_write() as session:
        if jobs:
            session.execute(insert(JobRow), jobs)
            session.execute(insert(EventRow), events)


def compare_latencies(clients: dict[str, httpx.Client], requests: int) -> dict[str, dict[str, float]]:
    calls: dict[str, Callable[[httpx.Client, int], httpx.Response]] = {
        "list": lambda client, _: client.get("/jobs"),
        "list_by_status": lambda client, _: client.get("/jobs", params={"status": "cancelled"}),
        "submit": lambda client, number: client.post(
            "/jobs", json=JOB_SPEC, headers={"Idempotency-Key": f"{number}-{time.monotonic_ns()}"}
        ),
    }
    figures = {}
    for name, call in calls.items():
        latencies: dict[str, list[float]] = {which: [] for which in clients}
        for number in range(-20, requests):  # warm-up first
            for which, client in clients.items():
                started = time.perf_counter()
                call(client, number).raise_for_status()
                if number >= 0:
                    latencies[which].append(1000 * (time.perf_counter() - started))
        p95 = {which: statistics.quantiles(times, n=20)[-1] for which, times in latencies.items()}
        figures[name] = {
            "empty_p95_ms": round(p95["empty"], 2),
            "full_p95_ms": round(p95["full"], 2),
            "ratio": round(p95["full"] / p95["empty"], 2),
        }
    return figures


if __name__ == "__main__":
    main()
