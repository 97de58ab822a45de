"""Jobs that are stopped: cancelled, paused and resumed, or over their time."""

from __future__ import annotations

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.errors import IllegalTransitionError
from swiftkv_platform.orchestration.job import Job, JobStatus, Reason
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.orchestration.service import Caller, JobService
from tests.unit.orchestration.conftest import TENANT, Plane

ANN = Caller(TENANT, "ann")


def service(plane: Plane) -> JobService:
    return JobService(plane.jobs, clock=plane.clock, read_object=lambda store, key: b"")


def cancel(plane: Plane, job: Job) -> Job:
    return service(plane).cancel(job.id, ANN)


def test_cancelling_stops_the_run_and_waits_for_its_end(plane: Plane) -> None:
    job = plane.started()
    plane.worker(job).say("status", status="running")
    plane.tick()
    assert cancel(plane, job).status is cancel(plane, job).status is JobStatus.CANCELLING
    plane.tick()
    assert plane.cluster.status(f"{job.id}-1").status is SubmissionStatus.STOPPED
    plane.tick()
    ended = plane.get(job)
    assert (ended.status, plane.reason(job).code, ended.error) == (JobStatus.CANCELLED, "cancelled", None)
    assert plane.statuses(job) == ["queued", "starting", "running", "cancelling", "cancelled"]
    forgotten = plane.started()
    cancel(plane, forgotten)
    plane.cluster.forget()
    plane.tick()
    assert plane.get(forgotten).status is JobStatus.CANCELLED


def test_a_paused_job_leaves_the_cluster_and_goes_on_from_its_checkpoint(plane: Plane) -> None:
    job = plane.started(fault_tolerance={"max_retries": 0})
    worker = plane.worker(job)
    worker.say("status", status="running")
    plane.tick()
    for _ in range(2):
        assert service(plane).pause(job.id, ANN).status is JobStatus.PAUSING
    plane.tick()
    assert plane.store.pause_requested(AttemptId(job.id, 1))
    running = plane.cluster.status(f"{job.id}-1")
    assert running.status is SubmissionStatus.RUNNING, "the attempt is given the time to checkpoint"

    checkpoint = worker.checkpoint(5)
    worker.say("status", status="paused")
    for _ in range(2):  # stopped, then seen to have ended
        plane.tick()
    paused = plane.get(job)
    assert (paused.status, paused.status_reason) == (JobStatus.PAUSED, Reason("paused", "paused by ann"))
    plane.tick()
    assert plane.cluster.started == [f"{job.id}-1"]

    for _ in range(2):
        resumed = service(plane).resume(job.id, ANN)
        assert (resumed.status, resumed.attempt.number, resumed.retries) == (JobStatus.QUEUED, 2, 0)
    plane.tick()
    assert plane.store.read_request(AttemptId(job.id, 2)).resume_from == checkpoint
    assert not plane.store.pause_requested(AttemptId(job.id, 2))
    assert plane.statuses(job) == ["queued", "starting", "running", "pausing", "paused", "queued", "starting"]


def test_a_queued_job_is_paused_at_once_and_keeps_its_attempt(plane: Plane) -> None:
    job = plane.submit()
    assert service(plane).pause(job.id, ANN).status is JobStatus.PAUSED
    reconciler = plane.reconciler()
    reconciler.tick()
    assert plane.cluster.started == []
    assert service(plane).resume(job.id, ANN).attempt.number == 1
    reconciler.tick()
    assert plane.cluster.started == [f"{job.id}-1"]


def test_a_run_over_its_time_is_stopped_and_fails(plane: Plane) -> None:
    job = plane.started(limits={"max_runtime_s": 100})
    plane.clock.now += 100
    plane.tick()
    assert plane.cluster.status(f"{job.id}-1").status is SubmissionStatus.RUNNING
    plane.clock.now += 1
    plane.tick()
    # What the process says while it is being stopped does not hide the cause.
    plane.worker(job).say("error", "interrupted", code="worker_lost", retryable=True)
    plane.tick()
    error = plane.get(job).error
    assert error is not None
    assert (error.code, error.field) == ("max_runtime_exceeded", "limits.max_runtime_s")


@pytest.mark.parametrize("verb", ["cancel", "pause"])
def test_a_job_that_finishes_while_it_is_stopped_has_succeeded(plane: Plane, verb: str) -> None:
    job = plane.started()
    getattr(service(plane), verb)(job.id, ANN)
    plane.worker(job).artifact()
    assert plane.end(job).status is JobStatus.SUCCEEDED
    with pytest.raises(IllegalTransitionError, match="is succeeded"):
        service(plane).pause(job.id, ANN)


def test_a_queued_job_is_cancelled_at_once_and_nothing_more_happens_to_it(plane: Plane) -> None:
    job = plane.submit()
    ended = cancel(plane, job)
    assert plane.statuses(job) == ["queued", "cancelling", "cancelled"]
    plane.tick()
    assert (plane.get(job), plane.cluster.started) == (ended, [])


@pytest.mark.parametrize(
    ("retryable", "status"),
    [(None, JobStatus.PAUSED), (True, JobStatus.PAUSED), (False, JobStatus.FAILED)],
    ids=["ends by itself", "worker lost", "bad data"],
)
def test_an_attempt_that_ends_while_pausing_is_paused_unless_no_other_try_can_mend_it(
    plane: Plane, retryable: bool | None, status: JobStatus
) -> None:
    job = plane.started(fault_tolerance={"max_retries": 0})
    service(plane).pause(job.id, ANN)
    with pytest.raises(IllegalTransitionError, match="is pausing"):
        service(plane).resume(job.id, ANN)
    if retryable is None:
        plane.worker(job).say("status", status="paused")
    else:
        plane.worker(job).say("error", "why", level="error", code="some_error", retryable=retryable)
    ended = SubmissionStatus.SUCCEEDED if retryable is None else SubmissionStatus.FAILED
    assert plane.end(job, ended).status is status
