"""How the control plane answers with many jobs in its database, beside an empty one in the same run.

    python -m benchmarks.control_plane [--jobs 10000] [--requests 300] [--postgres URL]

Two applications behind sockets, SQLite each (or two schemas of a PostgreSQL, whose tables are dropped); requests go to
them in turns. Jobs in the database have ended, one in a hundred waits; they are of ten tenants and have three events
each. No Ray: nothing is started while it is measured.
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

from swiftkv_platform.api.app import create_app
from swiftkv_platform.database.repository import _columns
from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import EventRow, JobRow
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.orchestration.job import Job, JobStatus, Reason, new_id, status_event, transition
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.local_store import LocalObjectStore
from tests.components import make_components
from tests.servers import serving

SPEC = {"name": "measured", "model": {"name_or_path": "org/teacher"}}
TENANTS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--postgres", help="SQLAlchemy URL of a PostgreSQL; its schemas `empty` and `full` are dropped")
    options = parser.parse_args()
    configure_logging(level=logging.WARNING)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = {}
        for name, jobs in (("empty", 0), ("full", options.jobs)):
            database = open_database(name, directory, options.postgres)
            fill(database, jobs)
            settings = Settings(home=directory, reconcile_interval_s=1.0, max_running_jobs=1, _env_file=None)
            parts = make_components(database, LocalObjectStore(directory / name))
            url = stack.enter_context(serving(create_app(settings, components=parts)))
            clients[name] = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=60))
        print(json.dumps({"jobs": options.jobs, "requests": options.requests, **compare(clients, options.requests)}))


def open_database(name: str, directory: Path, postgres: str | None) -> Database:
    if postgres is None:
        database = Database(f"sqlite:///{directory / name}.db")
    else:
        admin = Database(postgres)
        with admin.writing() as session:
            session.execute(text(f"DROP SCHEMA IF EXISTS {name} CASCADE"))
            session.execute(text(f"CREATE SCHEMA {name}"))
        admin.close()
        separator = "&" if "?" in postgres else "?"
        database = Database(f"{postgres}{separator}options=-csearch_path%3D{name}")
    database.upgrade()
    return database


def fill(database: Database, count: int) -> None:
    """Jobs as the service and the reconciler leave them."""
    spec = JobSpec.model_validate(SPEC)
    jobs, events = [], []
    for number in range(count):
        tenant = "default" if number % TENANTS == 0 else f"tenant-{number % TENANTS}"
        job = Job(new_id("job"), tenant, "ann", spec, 1000 + number)
        told = [status_event(job, now=job.created_at)]
        if number % 100:
            for status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
                job, event = transition(job, status, now=1000 + number, reason=Reason("cancelled", "enough"))
                told.append(event)
        jobs.append(_columns(job))
        events += [vars(event) for event in told]
    with database.writing() as session:
        if jobs:
            session.execute(insert(JobRow), jobs)
            session.execute(insert(EventRow), events)


def compare(clients: dict[str, httpx.Client], requests: int) -> dict[str, dict[str, float]]:
    calls: dict[str, Callable[[httpx.Client, int], httpx.Response]] = {
        "list": lambda client, _: client.get("/jobs"),
        "list_by_status": lambda client, _: client.get("/jobs", params={"status": "cancelled"}),
        "submit": lambda client, number: client.post(
            "/jobs", json=SPEC, headers={"Idempotency-Key": f"{number}-{time.monotonic_ns()}"}
        ),
    }
    figures = {}
    for name, call in calls.items():
        taken: dict[str, list[float]] = {where: [] for where in clients}
        for number in range(-20, requests):  # the first ones warm up
            for where, client in clients.items():
                started = time.perf_counter()
                call(client, number).raise_for_status()
                if number >= 0:
                    taken[where].append(1000 * (time.perf_counter() - started))
        p95 = {where: statistics.quantiles(times, n=20)[-1] for where, times in taken.items()}
        figures[name] = {
            "empty_p95_ms": round(p95["empty"], 2),
            "full_p95_ms": round(p95["full"], 2),
            "ratio": round(p95["full"] / p95["empty"], 2),
        }
    return figures


if __name__ == "__main__":
    main()
