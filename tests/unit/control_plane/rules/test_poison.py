"""A job whose handling raises an unexpected error fails and frees its slot; others go on. An unreadable row hides no
other. A cluster, store or database that is merely away fails no job.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.errors import StorageError, UnreadableRowError
from tests.unit.control_plane.rules.conftest import Plane

pytestmark = pytest.mark.slow("starts an application for each test")

SLOTS = 4


@pytest.fixture(autouse=True)
def _short_logs() -> Iterator[None]:
    """Without configuration, structlog draws each traceback with all variables, which takes seconds."""
    with capture_logs():
        yield


class Poisoned:
    """An attempt store in which certain calls about certain jobs raise."""

    def __init__(self, store: Any, error: Exception, *methods: str) -> None:
        self._store = store
        self._error = error
        self._methods = methods
        self.jobs: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name not in self._methods:
            return real

        def call(subject: Any, *arguments: Any, **named: Any) -> Any:
            if getattr(subject, "job_id", subject) in self.jobs:
                raise self._error
            return real(subject, *arguments, **named)

        return call


SURROGATE = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


def turn(plane: Plane, reconciler: Reconciler, seconds: int) -> None:
    """Tick once a second, as the loop does."""
    for _ in range(seconds):
        reconciler.tick()
        plane.clock.now += 1


def finish_started(plane: Plane, jobs: list[Job]) -> None:
    """End the attempts of good jobs, as training does."""
    for job in jobs:
        name = f"{job.id}-1"
        found = plane.cluster.submissions.get(name)
        if found is not None and not found.state.status.is_terminal:
            plane.worker(job).artifact()
            plane.cluster.finish(name, SubmissionStatus.SUCCEEDED)


@pytest.mark.parametrize("where", ["write_request", "read_events", "find_newest_checkpoint"])
def test_poison_in_every_slot_stops_no_good_job(plane: Plane, where: str) -> None:
    store = Poisoned(plane.store, SURROGATE, where)
    reconciler = plane.reconciler(max_running_jobs=SLOTS, parts={"attempts": store})
    poison = [plane.submit(tenant="mallory") for _ in range(SLOTS)]
    store.jobs.update(job.id for job in poison)
    if where == "find_newest_checkpoint":  # asked only for second attempts
        for job in poison:
            found = plane.get(job)
            plane.jobs.update(replace(found, attempt=replace(found.attempt, number=2)))
    good = [plane.submit(tenant=f"tenant-{number % 5}") for number in range(8)]
    began = plane.clock.now
    while any(not plane.get(job).status.is_terminal for job in [*poison, *good]):
        turn(plane, reconciler, 1)
        finish_started(plane, good)
        assert plane.clock.now - began <= 60, "within a minute"
    assert {plane.get(job).status for job in good} == {JobStatus.SUCCEEDED}
    for job in poison:
        error = plane.get(job).error
        assert error is not None
        assert (error.code, "UnicodeEncodeError" in error.message) == ("internal", True)
        last = plane.events(job)[-1]
        assert (last.data["status"], last.level) == ("failed", "error")
        assert "surrogates not allowed" in last.message
    assert not plane.jobs.list_cluster_jobs()


def test_a_state_that_should_not_be_is_poison_too(plane: Plane) -> None:
    job, good = plane.submit(), plane.submit()
    with plane.database.begin_write() as session:
        session.execute(text("UPDATE jobs SET status = 'starting' WHERE id = :id"), {"id": job.id})
    turn(plane, plane.reconciler(), 60)
    assert plane.get(job).status is JobStatus.FAILED
    assert plane.get(good).status is JobStatus.STARTING


def test_while_ray_is_away_a_poison_job_is_not_given_up(plane: Plane) -> None:
    """Its submission could not be stopped, and would go on without a job."""
    store = Poisoned(plane.store, ZeroDivisionError("a bug"), "read_events")
    reconciler = plane.reconciler(parts={"attempts": store})
    job = plane.submit()
    reconciler.tick()
    store.jobs.add(job.id)
    turn(plane, reconciler, 2)
    plane.cluster.away = True
    turn(plane, reconciler, 300)
    assert plane.get(job).status is JobStatus.STARTING
    plane.cluster.away = False
    turn(plane, reconciler, 90)
    assert plane.get(job).status is JobStatus.FAILED
    assert plane.cluster.submissions[f"{job.id}-1"].state.status is SubmissionStatus.STOPPED


def test_a_store_that_is_away_for_one_job_fails_none(plane: Plane) -> None:
    store = Poisoned(plane.store, StorageError("no answer"), "read_events")
    reconciler = plane.reconciler(max_running_jobs=2, parts={"attempts": store})
    job, good = plane.submit(), plane.submit()
    store.jobs.add(job.id)
    turn(plane, reconciler, 1)
    plane.worker(good).say("status", status="running")
    turn(plane, reconciler, 600)
    assert plane.get(good).status is JobStatus.RUNNING
    assert (plane.get(job).status, reconciler.num_backed_off_jobs) == (JobStatus.STARTING, 1)
    store.jobs.clear()
    plane.worker(job).say("status", status="running")
    turn(plane, reconciler, 60)
    assert (plane.get(job).status, reconciler.num_backed_off_jobs) == (JobStatus.RUNNING, 0)


def test_a_surprise_now_and_then_fails_no_job(plane: Plane) -> None:
    store = Poisoned(plane.store, ZeroDivisionError("a bug"), "read_events")
    reconciler = plane.reconciler(parts={"attempts": store})
    job = plane.submit()
    for _ in range(20):
        store.jobs.add(job.id)
        turn(plane, reconciler, 3)
        store.jobs.clear()
        turn(plane, reconciler, 20)
    assert plane.get(job).status is JobStatus.STARTING


DAMAGES = {
    "a spec of another version": """UPDATE jobs SET spec = '{"name": "x", "from_the_future": 1}' WHERE id = :id""",
    "a document that is no JSON": "UPDATE jobs SET state = '{' WHERE id = :id",
    "a document that is no object": "UPDATE jobs SET state = '7' WHERE id = :id",
    "an unknown status": "UPDATE jobs SET status = 'dancing' WHERE id = :id",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_row_that_cannot_be_read_breaks_neither_lists_nor_the_queue(plane: Plane, damage: str) -> None:
    first, damaged, last = (plane.submit() for _ in range(3))
    with plane.database.begin_write() as session:
        session.execute(text(damage), {"id": damaged.id})
    found = plane.jobs.list(PageQuery(order="asc"), tenant=first.tenant)
    assert [job.id for job in found.items] == [first.id, last.id]
    assert list(found.unreadable_ids) == [damaged.id]
    reconciler = plane.reconciler(max_running_jobs=2)
    reconciler.tick()
    assert plane.cluster.started == [f"{first.id}-1", f"{last.id}-1"]
    with pytest.raises(UnreadableRowError, match="another version"):
        plane.get(damaged)
    plane.jobs.count_by_status()


OUT_OF_RANGE = {
    "an endless time": b'{"time": 1e999, "type": "message", "message": "m"}',
    "a time that no calendar has": b'{"time": 1e300, "type": "message", "message": "m"}',
    "a time before time": b'{"time": -1e18, "type": "message", "message": "m"}',
    "a step that no database holds": b"""{"time": 1, "type": "metrics", "message": "m",
        "data": {"points": [{"step": 18446744073709551616}], "total_steps": 9}}""",
    "endless memory": b"""{"time": 1, "type": "metrics", "message": "m",
        "data": {"points": [{"step": 1, "memory_bytes": 1e999}], "total_steps": 9}}""",
}


def test_events_with_numbers_out_of_range_are_warnings(plane: Plane) -> None:
    job, reconciler = plane.submit(), plane.reconciler()
    reconciler.tick()
    for number, event in enumerate(OUT_OF_RANGE.values(), 1):
        plane.objects.put_bytes(AttemptId(job.id, 1).event_key("driver", number), event)
    turn(plane, reconciler, 3)
    assert reconciler.num_backed_off_jobs == 0
    warnings = plane.events(job)[-len(OUT_OF_RANGE) :]
    for event in warnings:
        assert (event.level, event.type, "is not valid" in event.message) == ("warn", "message", True)
        assert 0 <= event.created_at < 2**40
