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
    job = plane.submit()
    reconciler = plane.reconciler()
    reconciler.tick()
    plane.worker(job).say("status", status="running")
    reconciler.tick()
    assert cancel(plane, job).status is JobStatus.CANCELLING
    assert cancel(plane, job).status is JobStatus.CANCELLING
    reconciler.tick()
    assert plane.cluster.status(f"{job.id}-1").status is SubmissionStatus.STOPPED
    reconciler.tick()
    ended = plane.get(job)
    assert ended.status is JobStatus.CANCELLED
    assert ended.status_reason is not None
    assert ended.status_reason.code == "cancelled"
    assert ended.error is None
    assert plane.statuses(job) == ["queued", "starting", "running", "cancelling", "cancelled"]


def test_a_job_that_finishes_while_it_is_cancelled_has_succeeded(plane: Plane) -> None:
    job = plane.submit()
    reconciler = plane.reconciler()
    reconciler.tick()
    cancel(plane, job)
    plane.worker(job).artifact()
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.SUCCEEDED)
    reconciler.tick()
    assert plane.get(job).status is JobStatus.SUCCEEDED


def test_a_queued_job_is_cancelled_at_once(plane: Plane) -> None:
    job = plane.submit()
    assert cancel(plane, job).status is JobStatus.CANCELLED
    assert plane.statuses(job) == ["queued", "cancelling", "cancelled"]


def test_a_cancelled_run_that_ray_forgot_is_cancelled(plane: Plane) -> None:
    job = plane.submit()
    reconciler = plane.reconciler()
    reconciler.tick()
    cancel(plane, job)
    plane.cluster.forget()
    reconciler.tick()
    assert plane.get(job).status is JobStatus.CANCELLED


def test_a_paused_job_leaves_the_cluster_and_goes_on_from_its_checkpoint(plane: Plane) -> None:
    job = plane.submit(fault_tolerance={"max_retries": 0})
    reconciler = plane.reconciler()
    reconciler.tick()
    worker = plane.worker(job)
    worker.say("status", status="running")
    reconciler.tick()
    for _ in range(2):
        assert service(plane).pause(job.id, ANN).status is JobStatus.PAUSING
    reconciler.tick()
    assert plane.store.pause_requested(AttemptId(job.id, 1))
    running = plane.cluster.status(f"{job.id}-1")
    assert running.status is SubmissionStatus.RUNNING, "the attempt is given the time to checkpoint"

    checkpoint = worker.checkpoint(5)
    worker.say("status", status="paused")
    for _ in range(2):  # stopped, then seen to have ended
        reconciler.tick()
    paused = plane.get(job)
    assert (paused.status, paused.status_reason) == (JobStatus.PAUSED, Reason("paused", "paused by ann"))
    reconciler.tick()
    assert plane.cluster.started == [f"{job.id}-1"]

    for _ in range(2):
        resumed = service(plane).resume(job.id, ANN)
        assert (resumed.status, resumed.attempt.number, resumed.retries) == (JobStatus.QUEUED, 2, 0)
    reconciler.tick()
    assert plane.store.read_request(AttemptId(job.id, 2)).resume_from == checkpoint
    assert not plane.store.pause_requested(AttemptId(job.id, 2))
    assert plane.statuses(job) == ["queued", "starting", "running", "pausing", "paused", "queued", "starting"]


def test_an_attempt_that_ends_by_itself_after_its_checkpoint_is_paused(plane: Plane) -> None:
    job = plane.submit()
    reconciler = plane.reconciler()
    reconciler.tick()
    service(plane).pause(job.id, ANN)
    plane.worker(job).say("status", status="paused")
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.SUCCEEDED)
    reconciler.tick()
    assert plane.get(job).status is JobStatus.PAUSED


@pytest.mark.parametrize(
    ("retryable", "status"), [(True, JobStatus.PAUSED), (False, JobStatus.FAILED)], ids=["worker lost", "bad data"]
)
def test_a_failure_while_pausing_pauses_if_another_try_can_mend_it(
    plane: Plane, retryable: bool, status: JobStatus
) -> None:
    job = plane.submit(fault_tolerance={"max_retries": 0})
    reconciler = plane.reconciler()
    reconciler.tick()
    service(plane).pause(job.id, ANN)
    plane.worker(job).say("error", "why", level="error", code="some_error", retryable=retryable)
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.FAILED)
    reconciler.tick()
    assert plane.get(job).status is status


def test_a_job_that_finishes_while_it_is_pausing_has_succeeded(plane: Plane) -> None:
    job = plane.submit()
    reconciler = plane.reconciler()
    reconciler.tick()
    service(plane).pause(job.id, ANN)
    plane.worker(job).artifact()
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.SUCCEEDED)
    reconciler.tick()
    assert plane.get(job).status is JobStatus.SUCCEEDED
    with pytest.raises(IllegalTransitionError, match="is succeeded"):
        service(plane).pause(job.id, ANN)


def test_a_queued_job_is_paused_at_once_and_keeps_its_attempt(plane: Plane) -> None:
    job = plane.submit()
    assert service(plane).pause(job.id, ANN).status is JobStatus.PAUSED
    reconciler = plane.reconciler()
    reconciler.tick()
    assert plane.cluster.started == []
    assert service(plane).resume(job.id, ANN).attempt.number == 1
    reconciler.tick()
    assert plane.cluster.started == [f"{job.id}-1"]


def test_a_job_that_is_still_pausing_cannot_be_resumed(plane: Plane) -> None:
    job = plane.submit()
    plane.reconciler().tick()
    service(plane).pause(job.id, ANN)
    with pytest.raises(IllegalTransitionError, match="is pausing"):
        service(plane).resume(job.id, ANN)


def test_a_run_over_its_time_is_stopped_and_fails(plane: Plane) -> None:
    job = plane.submit(limits={"max_runtime_s": 100})
    reconciler = plane.reconciler()
    reconciler.tick()
    plane.clock.now += 100
    reconciler.tick()
    assert plane.cluster.status(f"{job.id}-1").status is SubmissionStatus.RUNNING
    plane.clock.now += 1
    reconciler.tick()
    # What the process says while it is being stopped does not hide the cause.
    plane.worker(job).say("error", "interrupted", code="worker_lost", retryable=True)
    reconciler.tick()
    error = plane.get(job).error
    assert error is not None
    assert (error.code, error.field) == ("max_runtime_exceeded", "limits.max_runtime_s")


def test_nothing_happens_to_a_job_that_has_ended(plane: Plane) -> None:
    job = plane.submit()
    cancel(plane, job)
    ended = plane.get(job)
    plane.reconciler().tick()
    assert plane.get(job) == ended
    assert plane.cluster.started == []
