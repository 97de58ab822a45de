"""A control plane with many running jobs, and an object store and a Ray with latency. Called by `control_plane`.

The control plane has its own process, with an object store that takes 15 ms per request and a Ray that takes 5 ms. This
process writes in place of workers: one event per second from a tenth of the jobs. Ten of these are watched, each over
an event stream. Waiting jobs belong to tenants at their limit of running jobs, so that every tick decides the queue.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
from sqlalchemy import insert, select

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.events import MessageEvent
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import EventRow, JobRow
from swiftkv_platform.control_plane.jobs.job import Attempt, Job, JobStatus, status_event
from swiftkv_platform.control_plane.jobs.ray_jobs import Submission
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.jobs.rows import JobRepository, _columns
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import EventWriter
from swiftkv_platform.storage.object_store import CHUNK_SIZE, LocalObjectStore, ObjectInfo
from tests.components import make_components
from tests.fakes.cluster import FakeCluster, FakeSubmission
from tests.servers import serving

STORE_S, RAY_S = 0.015, 0.005
"""Injected latency of a request, in seconds."""
KEYS_PER_LIST = 1000
TENANTS = 10
WATCHED = 10
SPEC = {"name": "measured", "model": {"name_or_path": "org/teacher"}}


class DistantStore(LocalObjectStore):
    """An object store with latency, which counts requests like S3: a LIST for each 1,000 keys."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests = 0

    def _request(self) -> None:
        self.requests += 1
        time.sleep(STORE_S)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        self._request()
        for number, info in enumerate(super().list(prefix, start_after=start_after), start=1):
            yield info
            if number % KEYS_PER_LIST == 0:
                self._request()

    def list_directories(self, prefix: str) -> builtins.list[str]:
        self._request()
        return super().list_directories(prefix)

    def get_bytes(self, key: str) -> bytes:
        self._request()
        return super().get_bytes(key)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._request()
        super().put_bytes(key, data, if_absent=if_absent)

    def head(self, key: str) -> ObjectInfo | None:
        self._request()
        return super().head(key)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        self._request()
        yield from super().stream(key, chunk_size, start=start, stop=stop)


class DistantCluster(FakeCluster):
    """A Ray with latency."""

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        time.sleep(RAY_S)
        super().submit(submission_id, entrypoint, env)

    def status(self, submission_id: str) -> Submission | None:
        time.sleep(RAY_S)
        return super().status(submission_id)


class FullTenants:
    """Limits every tenant to the number of jobs that it runs already."""

    def __init__(self, running: int) -> None:
        self._policy = TenantPolicy(max_running_jobs=max(running // TENANTS, 1))

    def policy(self, tenant: str) -> TenantPolicy:  # noqa: ARG002 (all alike)
        return self._policy


def tenant_of(number: int) -> str:
    """Return the tenant of job `number`."""
    return "default" if number % TENANTS == 0 else f"tenant-{number % TENANTS}"


def fill(database: Database, running: int, waiting: int) -> list[Job]:
    """Store jobs; returns the running ones."""
    spec, now = JobSpec.model_validate(SPEC), int(time.time())
    jobs = []
    for number in range(running + waiting):
        job = Job(new_id("job"), tenant_of(number), "ann", spec, now)
        if number < running:
            attempt = Attempt(submission_id=job.attempt_id.submission_id, submitted_at=now)
            job = replace(job, status=JobStatus.RUNNING, started_at=now, attempt=attempt)
        jobs.append(job)
    with database.writing() as session:
        session.execute(insert(JobRow), [_columns(job) for job in jobs])
        session.execute(insert(EventRow), [vars(status_event(job, now=now)) for job in jobs])
    return jobs[:running]


def control_plane(url: str, directory: str, running: int, pipe: Connection) -> None:
    """Run the measured process: send its address, then on each request the figures since the last one."""
    configure_logging(level=logging.WARNING)
    database, store, cluster = Database(url), DistantStore(Path(directory)), DistantCluster()
    for job in database_jobs(database):
        cluster.submissions[job] = FakeSubmission("", {})
    ticks: list[float] = []
    timed(Reconciler, ticks)
    parts = replace(make_components(database, store, cluster=cluster), policies=FullTenants(running))
    settings = Settings(
        home=Path(directory), reconcile_interval_s=1.0, max_running_jobs=running + TENANTS, _env_file=None
    )
    process = psutil.Process(os.getpid())
    with serving(create_app(settings, components=parts)) as address:
        pipe.send(address)
        before: tuple[float, int] = (0.0, 0)
        while pipe.recv():
            used = sum(process.cpu_times()[:2])
            done, ticks[:] = list(ticks), []
            pipe.send((done, store.requests - before[1], used - before[0], process.memory_info().rss))
            before = used, store.requests


def database_jobs(database: Database) -> list[str]:
    """Return the submission ids of running jobs."""
    with database.reading() as session:
        ids = session.scalars(select(JobRow.id).where(JobRow.status == JobStatus.RUNNING.value))
        return [f"{job_id}-1" for job_id in ids]


def timed(reconciler: type[Reconciler], ticks: list[float]) -> None:
    """Record the duration of every tick."""
    tick = reconciler.tick

    def noted(self: Reconciler) -> None:
        started = time.perf_counter()
        tick(self)
        ticks.append(time.perf_counter() - started)

    reconciler.tick = noted  # type: ignore[method-assign]


class Workers:
    """Writes events every second for the active jobs, from one thread, through its own store without latency."""

    def __init__(self, directory: Path, jobs: Sequence[Job]) -> None:
        store = LocalObjectStore(directory)
        self._writers = [EventWriter(store, AttemptId(job.id, 1), "rank0-1") for job in jobs]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            for writer in self._writers:  # spread over the second
                writer.write(MessageEvent(time=time.time(), message="measured", data={"sent": time.time()}))
                due += 1.0 / len(self._writers)
                self._stop.wait(max(due - time.monotonic(), 0.0))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


async def events(client: httpx.AsyncClient, job_id: str) -> AsyncIterator[dict[str, Any]]:
    """A job's events as they come."""
    async with client.stream("GET", f"/jobs/{job_id}/events", headers={"Accept": "text/event-stream"}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def watch(url: str, jobs: Sequence[Job], seconds: float) -> list[float]:
    """Seconds from each event's writing to its arrival at a follower, over all jobs."""
    delays: list[float] = []
    began = time.time()

    async def follow(client: httpx.AsyncClient, job: Job) -> None:
        async for event in events(client, job.id):
            sent = event["data"].get("sent", 0.0)
            if sent > began:  # earlier events arrive first, at once
                delays.append(time.time() - sent)

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        tasks = [asyncio.create_task(follow(client, job)) for job in jobs]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            if task.done():
                task.result()  # a stream that ended early invalidates the measurement
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return delays


def measure(url: str, running: int, waiting: int, minutes: float) -> dict[str, Any]:
    """Run a control plane for `minutes` and return its figures, without the first fifth, in which it starts."""
    database = Database(url)
    database.upgrade()
    jobs = fill(database, running, waiting)
    speaking = jobs[: max(running // 10, 1)]
    watched = [job for job in speaking if job.tenant == "default"][:WATCHED]
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        shared = Path("/dev/shm")
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="swiftkv-")
        )
        ours, theirs = context.Pipe()
        plane = context.Process(target=control_plane, args=(url, directory, running, theirs), daemon=True)
        plane.start()
        stack.callback(plane.join, 30)
        stack.callback(plane.terminate)
        address = ours.recv()
        workers = Workers(Path(directory), speaking)
        stack.callback(workers.stop)
        asyncio.run(watch(address, watched, 12.0 * minutes))
        ours.send(True)
        ours.recv()
        began, delays, parts = time.monotonic(), [], []
        for _ in range(2):  # two halves, to show growth
            delays += asyncio.run(watch(address, watched, 24.0 * minutes))
            ours.send(True)
            parts.append(ours.recv())
        took = (time.monotonic() - began) / 60
        ours.send(False)
    return {**figures(running, waiting, took, delays, parts), "queue_decided_ms": queue_decided_ms(database)}


def queue_decided_ms(database: Database) -> float:
    """Return the median time in milliseconds of the database query that decides the queue."""
    jobs, took = JobRepository(database), []
    for _ in range(20):
        started = time.perf_counter()
        jobs.standing(most=TENANTS, now=time.time())
        took.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(took), 1)


def figures(
    running: int, waiting: int, minutes: float, delays: Sequence[float], parts: Sequence[tuple[Any, ...]]
) -> dict[str, Any]:
    ticks = sorted(tick for part in parts for tick in part[0])
    return {
        "running": running,
        "waiting": waiting,
        "minutes": round(minutes, 2),
        "ticks": len(ticks),
        "tick_median_s": round(statistics.median(ticks), 3) if ticks else None,
        "tick_max_s": round(ticks[-1], 3) if ticks else None,
        "store_requests_per_job_and_minute": round(sum(part[1] for part in parts) / running / minutes, 2),
        "events_seen": len(delays),
        "visible_p95_s": round(statistics.quantiles(delays, n=20)[-1], 2) if len(delays) > 1 else None,
        "cpu_share_by_half": [round(part[2] / (30 * minutes), 3) for part in parts],
        "rss_mib_by_half": [part[3] >> 20 for part in parts],
    }
