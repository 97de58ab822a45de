"""`kill -9` of the control plane at random moments: accepted jobs end as they should, and nothing runs twice.

10 kills of each database, 200 with `SWIFTKV_SOAK=1`; `SWIFTKV_SEED` chooses the moments.
"""

import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from swiftkv_platform.client import Job
from swiftkv_platform.client.errors import ServerError, UnreachableError
from tests.integration.planes import Plane, RayCluster, spec
from tests.support.postgres import emptied
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.soak("kills the control plane over and over")]

T = TypeVar("T")
KILLS = 200 if "SWIFTKV_SOAK" in os.environ else 10
"""Number of kills with each database."""
SEED = int(os.environ.get("SWIFTKV_SEED", "0"))
CALLERS = 3


@pytest.fixture(params=["sqlite", "postgresql"])
def plane(request: pytest.FixtureRequest, tmp_path: Path, ray_cluster: RayCluster) -> Iterator[Plane]:
    settings = {}
    if request.param == "postgresql":
        settings["SWIFTKV_DATABASE_URL"] = emptied(request.getfixturevalue("postgres_url"))
    plane = Plane(tmp_path / "plane", ray_cluster, settings)
    plane.start()
    yield plane
    plane.stop()


class User:
    """Submits jobs one after another, acts on each at random, and retries through every outage.

    Args:
        ends: filled with the expected end of each job, by id.
    """

    def __init__(self, plane: Plane, number: int, ends: dict[str, str], stop: threading.Event) -> None:
        self._plane = plane
        self._number = number
        self._ends = ends
        self._stop = stop
        self._random = random.Random(f"{SEED}-{number}")
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            count = 0
            while not self._stop.is_set():
                self._one_job(f"user-{self._number}-{count}")
                count += 1
        except BaseException as error:  # raised by the main thread
            self.error = error

    def _one_job(self, key: str) -> None:
        story = self._random.choice(["succeed", "succeed", "fail once", "cancel", "pause"])
        metadata = {"key": key}
        if story == "fail once":
            metadata["fail"] = "1"
        elif story in ("cancel", "pause"):
            metadata["wait"] = key
        jobs = self._plane.client.jobs
        job = self._persist(lambda: jobs.create(spec(**metadata), idempotency_key=key))
        self._ends[job.id] = story
        time.sleep(self._random.uniform(0.0, 2.0))
        if story == "cancel":
            self._persist(lambda: jobs.cancel(job.id))
        elif story == "pause":
            self._persist(lambda: jobs.pause(job.id))
            self._wait(job.id, "paused")
            self._persist(lambda: jobs.resume(job.id))
            (self._plane.gates / key).touch()
        self._wait(job.id, "cancelled" if story == "cancel" else "succeeded")

    def _wait(self, job_id: str, status: str) -> None:
        def there() -> bool:
            job = self._persist(lambda: self._plane.client.jobs.get(job_id))
            assert job.status == status or not job.finished, f"{job_id} has {job.status} instead of {status}"
            return job.status == status

        eventually(there, f"{job_id} is {status}", seconds=120)

    def _persist(self, call: Callable[[], T]) -> T:
        """Repeat the call until the control plane answers, and return the answer."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return call()
            except (UnreachableError, ServerError):
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_a_kill_at_any_moment_loses_nothing_and_repeats_nothing(plane: Plane) -> None:
    ends: dict[str, str] = {}
    stop, chance = threading.Event(), random.Random(SEED)
    users = [User(plane, number, ends, stop) for number in range(CALLERS)]
    threads = [threading.Thread(target=user.run) for user in users]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.05, 1.2))
        plane.kill()
        plane.begin()
    stop.set()
    for thread in threads:
        thread.join(240)
    for user in users:
        if user.error is not None:
            raise user.error
    check(plane, ends)


def check(plane: Plane, ends: dict[str, str]) -> None:
    """Assert that exactly the accepted jobs ended, each as expected, with every attempt started once."""
    jobs = {job.id: job for job in plane.client.jobs.list()}
    assert set(jobs) == set(ends)
    starts = Counter((job_id, attempt) for job_id, attempt, *_ in plane.starts())
    assert [key for key, count in starts.items() if count > 1] == [], "an attempt was started twice"
    models = plane.client.models.list()
    assert Counter(model.job_id for model in models) == Counter(
        job_id for job_id, story in ends.items() if story != "cancel"
    )
    for job_id, story in ends.items():
        job = jobs[job_id]
        assert job.status == ("cancelled" if story == "cancel" else "succeeded")
        attempts = sorted(int(attempt) for started, attempt in starts if started == job_id)
        if story == "succeed":
            assert attempts == [1], job_id
        elif story == "fail once":
            assert attempts == [1, 2], job_id
        check_history(plane, job)
        check_artifact(plane, job)


def check_history(plane: Plane, job: Job) -> None:
    """Assert that every transition is in the events once, in order."""
    told = [event.data for event in plane.client.jobs.events(job.id, follow=False) if event.type == "status"]
    assert [data["status"] for data in told[:-1]] == [data["previous"] for data in told[1:]], told
    assert told[-1]["status"] == job.status


def check_artifact(plane: Plane, job: Job) -> None:
    """Assert that a succeeded job has a complete artifact, and any other job none."""
    files = {file.path: file for file in plane.client.jobs.artifacts(job.id)}
    if job.status != "succeeded":
        assert files == {}
        return
    directory = plane.home / "store" / "jobs" / job.id / "attempts" / str(job.attempt) / "artifact"
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_bytes())
    assert set(files) == {*manifest["files"], "manifest.json"}
    for path, file in files.items():
        assert (directory / path).stat().st_size == file.size
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    assert job.distilled_model is not None
    model = plane.client.models.get(job.distilled_model)
    assert (model.job_id, getattr(model, "manifest_digest")) == (job.id, digest)  # noqa: B009
