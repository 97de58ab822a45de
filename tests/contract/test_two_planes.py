"""Two control planes behind sockets on one PostgreSQL, asked by many clients at once. Only Ray is a stand-in."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.client import Client
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.components import make_components
from tests.support.fakes.attempt_store import FakeWorker
from tests.support.fakes.cluster import FakeCluster
from tests.support.postgres import emptied
from tests.support.servers import serving

JOBS, CLIENTS = (500, 50) if "SWIFTKV_SOAK" in os.environ else (60, 20)

DEADLINE_S = 240.0

SPEC = {"name": "test", "model": {"name_or_path": "org/teacher"}}


class InstantCluster(FakeCluster):
    """A cluster that ends every submission at once and records every call, also a second one with the same id."""

    def __init__(self, objects: LocalObjectStore) -> None:
        super().__init__()
        self.objects = objects
        self._lock = threading.Lock()
        self.calls: list[str] = []

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        with self._lock:
            self.calls.append(submission_id)
            super().submit(submission_id, entrypoint, env)
        job_id, _, attempt = submission_id.rpartition("-")
        worker = FakeWorker(self.objects, job_id, int(attempt))
        worker.say("status", status="running", time=time.time())
        worker.artifact()
        self.finish(submission_id, SubmissionStatus.SUCCEEDED)


@dataclass
class Ground:
    """Database, store and cluster that the control planes share."""

    url: str
    home: Path
    cluster: InstantCluster

    def plane(self) -> AbstractContextManager[str]:
        settings = Settings(home=self.home, reconcile_interval_s=0.05, max_running_jobs=8, _env_file=None)
        parts = make_components(Database(self.url), self.cluster.objects, cluster=self.cluster)
        return serving(create_app(settings, components=parts))


@pytest.fixture
def ground(postgres_url: str, tmp_path: Path) -> Ground:
    return Ground(emptied(postgres_url), tmp_path, InstantCluster(LocalObjectStore(tmp_path / "store")))


@pytest.mark.soak("500 jobs of 50 clients")
def test_every_key_is_one_job_and_every_job_is_submitted_once(ground: Ground) -> None:
    stop = threading.Event()
    with ExitStack() as stack, ThreadPoolExecutor(CLIENTS + 2) as pool:
        urls = [stack.enter_context(ground.plane()) for _ in range(2)]
        clients = [stack.enter_context(Client(url)) for url in urls]
        readers = [pool.submit(read_pages, url, stop) for url in urls]
        ids = list(pool.map(lambda number: submit(clients, number), range(JOBS)))
        stop.set()
        assert min(reader.result() for reader in readers) > 0
        assert len(set(ids)) == JOBS
        client, deadline = clients[0], time.monotonic() + DEADLINE_S
        while {job.status for job in client.jobs.list()} != {"succeeded"}:
            assert time.monotonic() < deadline, Counter(job.status for job in client.jobs.list())
            time.sleep(0.2)
        assert sorted(job.id for job in client.jobs.list()) == sorted(ids)
        assert Counter(model.job_id for model in client.models.list()) == Counter(ids)
    assert Counter(ground.cluster.calls) == Counter(f"{job_id}-1" for job_id in ids)


def submit(clients: list[Client], number: int) -> str:
    """Submit one job three times at once, with one key, to either control plane; return its only id."""
    order = random.Random(number).choices(clients, k=3)

    def send(client: Client) -> str:
        return client.jobs.create({**SPEC, "metadata": {"n": str(number)}}, idempotency_key=f"key-{number}").id

    with ThreadPoolExecutor(3) as pool:
        [job_id] = set(pool.map(send, order))
    return job_id


def read_pages(url: str, stop: threading.Event) -> int:
    """Page through the list of jobs until `stop`; return how often. Each walk must see all jobs of the one before."""
    walks, before = 0, set[str]()
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        while not stop.is_set():
            seen: list[str] = []
            while True:
                params = {"limit": 7, "order": "asc", **({"after": seen[-1]} if seen else {})}
                page = client.get("/jobs", params=params).raise_for_status().json()
                seen += [job["id"] for job in page["data"]]
                if not page["has_more"]:
                    break
            assert seen == sorted(set(seen)), "a job is listed twice or out of order"
            assert before <= set(seen), "a job is missing from the list"
            before, walks = set(seen), walks + 1
    return walks


@pytest.mark.soak("waits until a leader is given up")
def test_leadership_passes_on_when_a_control_plane_stops(ground: Ground) -> None:
    """The remaining control plane continues the jobs of both; a key that is sent to both makes one job."""
    with ground.plane() as second, Client(second) as client:
        with ground.plane() as first, Client(first) as leaving:
            ids = [submit([client, leaving], number) for number in range(6)]
        for job_id in ids:
            assert client.jobs.wait(job_id, timeout=60, poll_interval=0.1).status == "succeeded"
    assert Counter(ground.cluster.calls) == Counter(f"{job_id}-1" for job_id in ids)
