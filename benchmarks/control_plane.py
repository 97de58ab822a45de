"""Response times of the control plane with many jobs in its database, compared with an empty one in the same run.

    python -m benchmarks.control_plane [--jobs 10000] [--requests 300] [--followers 200] [--postgres [URL]]
    python -m benchmarks.control_plane --running 1000 [--waiting 10000] [--minutes 10] [--postgres [URL]]

With `--running` it measures only ticks, requests to the store and delays of events with that many jobs on the cluster
(`benchmarks.running_jobs`).

Two applications behind sockets, each on SQLite (or on a schema of a PostgreSQL: one started for this, or URL, whose
schemas `measured_*` are dropped); requests alternate between them. Jobs in the database have ended, except one in a
hundred, which waits; they belong to ten tenants and have three events each. There is no Ray, and no job starts
meanwhile. At the end, followers stream the events of a job in the full database, each over its own connection.
"""

from __future__ import annotations

import argparse
import asyncio
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

from benchmarks import running_jobs
from benchmarks.running_jobs import SPEC, tenant_of
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import EventRow, JobRow
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, Reason, status_event, transition
from swiftkv_platform.control_plane.jobs.rows import _columns
from swiftkv_platform.control_plane.parts import Components
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.components import make_components
from tests.postgres import postgres_server
from tests.servers import serving

EVENTS = 100
FOLLOWED_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--followers", type=int, default=200)
    parser.add_argument("--postgres", nargs="?", const="", metavar="URL", help="PostgreSQL; without URL one is started")
    parser.add_argument("--running", type=int, help="jobs on the cluster")
    parser.add_argument("--waiting", type=int, default=0, help="jobs in the queue")
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    configure_logging(level=logging.WARNING)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(postgres_server()) if options.postgres == "" else options.postgres
        if options.running is not None:
            url = database_url("running", directory, postgres)
            print(json.dumps(running_jobs.measure(url, options.running, options.waiting, options.minutes)))
            return
        clients = {}
        for name, jobs in (("empty", 0), ("full", options.jobs)):
            database = open_database(name, directory, postgres)
            fill(database, jobs)
            settings = Settings(home=directory, reconcile_interval_s=1.0, max_running_jobs=1, _env_file=None)
            parts = make_components(database, LocalObjectStore(directory / name))
            url = stack.enter_context(serving(create_app(settings, components=parts)))
            clients[name] = stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=60))
        print(json.dumps({"jobs": options.jobs, "requests": options.requests, **compare(clients, options.requests)}))
        print(json.dumps(asyncio.run(follow(url, parts, options.followers))))


def database_url(name: str, directory: Path, postgres: str | None) -> str:
    """Address of an empty database, or of an empty schema of the PostgreSQL."""
    if postgres is None:
        return f"sqlite:///{directory / name}.db"
    admin, name = Database(postgres), f"measured_{name}"
    with admin.writing() as session:
        session.execute(text(f"DROP SCHEMA IF EXISTS {name} CASCADE"))
        session.execute(text(f"CREATE SCHEMA {name}"))
    admin.close()
    separator = "&" if "?" in postgres else "?"
    return f"{postgres}{separator}options=-csearch_path%3D{name}"


def open_database(name: str, directory: Path, postgres: str | None) -> Database:
    database = Database(database_url(name, directory, postgres))
    database.upgrade()
    return database


def fill(database: Database, count: int) -> None:
    """Insert jobs in the states that the service and the reconciler leave."""
    spec = JobSpec.model_validate(SPEC)
    jobs, events = [], []
    for number in range(count):
        job = Job(new_id("job"), tenant_of(number), "ann", spec, 1000 + number)
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
        for number in range(-20, requests):  # warm-up first
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


async def follow(url: str, parts: Components, followers: int) -> dict[str, float]:
    """Measure time from an event's commit to its arrival, over all followers, and of a request meanwhile."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
        job = parts.jobs.get((await client.post("/jobs", json=SPEC)).json()["id"], tenant="default")
        connected = asyncio.Semaphore(0)
        hearing = [asyncio.create_task(hear(client, job.id, connected)) for _ in range(followers)]
        for _ in hearing:
            await connected.acquire()
        asked: list[float] = []
        for number in range(EVENTS):
            job = parts.jobs.update(job, events=[Event(new_id("evt"), job.id, 0, "message", f"{number} {time.time()}")])
            started = time.perf_counter()
            (await client.get(f"/jobs/{job.id}")).raise_for_status()
            asked.append(1000 * (time.perf_counter() - started))
            await asyncio.sleep(FOLLOWED_S / EVENTS)
        for status in (JobStatus.CANCELLING, JobStatus.CANCELLED):
            job, event = transition(job, status, now=int(time.time()))
            job = parts.jobs.update(job, events=[event])
        heard = await asyncio.gather(*hearing)
    delays = [delay for each in heard for delay in each]
    return {
        "followers": followers,
        "events_of_each": EVENTS,
        "events_lost": followers * EVENTS - len(delays),
        "delay_p50_ms": round(statistics.median(delays)),
        "delay_p95_ms": round(statistics.quantiles(delays, n=20)[-1]),
        "get_p95_ms": round(statistics.quantiles(asked, n=20)[-1], 2),
    }


async def hear(client: httpx.AsyncClient, job_id: str, connected: asyncio.Semaphore) -> list[float]:
    """Return the delays of a job's events in milliseconds, in order."""
    delays: list[float] = []
    async for event in running_jobs.events(client, job_id):
        if event["type"] != "message":
            connected.release()  # the first one; further calls at the end do no harm
            continue
        number, sent = event["message"].split()
        assert int(number) == len(delays), "an event is missing, or out of order"
        delays.append(1000 * (time.time() - float(sent)))
    return delays


if __name__ == "__main__":
    main()
