"""Attempts that run for no job are stopped; whatever else runs on the cluster is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import delete, text

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.database.tables import EventRow, JobRow
from swiftkv_platform.orchestration.job import Job, JobStatus, transition
from swiftkv_platform.orchestration.orphans import Orphans
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.orchestration.reconciler import Entrypoint
from tests.unit.orchestration.conftest import Plane

STORE = "memory://test"


def orphans(plane: Plane) -> Orphans:
    return Orphans(plane.jobs, plane.cluster, STORE, plane.clock)


def started(plane: Plane) -> Job:
    job = plane.submit()
    plane.reconciler(max_running_jobs=9).tick()
    return plane.get(job)


def runs(plane: Plane, name: str) -> bool:
    return not plane.cluster.submissions[name].state.status.is_terminal


def test_what_a_job_has_runs_on(plane: Plane) -> None:
    jobs = [started(plane) for _ in range(3)]
    orphans(plane).tick()
    assert all(runs(plane, f"{job.id}-1") for job in jobs)


def test_a_job_that_the_restored_database_does_not_know_is_stopped(plane: Plane) -> None:
    lost, kept = started(plane), started(plane)
    with plane.database.writing() as session:
        session.execute(delete(EventRow).where(EventRow.job_id == lost.id))
        session.execute(delete(JobRow).where(JobRow.id == lost.id))
    stopper = orphans(plane)
    stopper.tick()
    assert plane.cluster.submissions[f"{lost.id}-1"].state.status is SubmissionStatus.STOPPED
    assert runs(plane, f"{kept.id}-1")
    assert stopper.stopped == 1


def test_a_submission_that_arrives_after_its_job_was_cancelled_is_stopped(plane: Plane) -> None:
    """Ray took longer than the request: when the job was looked at it was not there, so the job has ended."""
    job = plane.submit()
    entrypoint = Entrypoint(("python", "-m", "swiftkv_platform.jobs.distill"), STORE)
    for status in (JobStatus.STARTING, JobStatus.CANCELLING, JobStatus.CANCELLED):
        moved, event = transition(plane.get(job), status, now=1000)
        plane.jobs.update(moved, events=[event])
    plane.cluster.submit(f"{job.id}-1", entrypoint.shell(AttemptId(job.id, 1)), {})
    orphans(plane).tick()
    assert not runs(plane, f"{job.id}-1")


def test_an_attempt_that_a_later_one_has_replaced_is_stopped(plane: Plane) -> None:
    job = started(plane)
    plane.jobs.update(replace(job, attempt=replace(job.attempt, number=2, submission_id=f"{job.id}-2")))
    orphans(plane).tick()
    assert not runs(plane, f"{job.id}-1")


@pytest.mark.parametrize(
    ("name", "entrypoint"),
    [
        ("job_1-1", Entrypoint(("python",), "s3://another/store").shell(AttemptId("job_1", 1))),
        ("job_1-9", Entrypoint(("python",), STORE).shell(AttemptId("job_1", 1))),
        ("raysubmit_1", "python train.py --store memory://test"),
        ("raysubmit_2", "echo 'unfinished"),
    ],
)
def test_what_is_not_this_control_planes_is_left_alone(plane: Plane, name: str, entrypoint: str) -> None:
    plane.cluster.submit(name, entrypoint, {})
    orphans(plane).tick()
    assert runs(plane, name)


def test_a_row_that_cannot_be_read_keeps_its_attempt(plane: Plane) -> None:
    job = started(plane)
    with plane.database.writing() as session:
        session.execute(text("UPDATE jobs SET state = 'damaged', status = 'unheard-of' WHERE id = :id"), {"id": job.id})
    orphans(plane).tick()
    assert runs(plane, f"{job.id}-1")


def test_it_looks_once_a_minute_and_waits_for_a_cluster_that_is_away(plane: Plane) -> None:
    stopper = orphans(plane)
    plane.cluster.away = True
    stopper.tick()
    plane.cluster.away = False
    plane.cluster.submit("job_1-1", Entrypoint(("python",), STORE).shell(AttemptId("job_1", 1)), {})
    stopper.tick()
    assert runs(plane, "job_1-1")
    plane.clock.now += 60
    stopper.tick()
    assert not runs(plane, "job_1-1")
