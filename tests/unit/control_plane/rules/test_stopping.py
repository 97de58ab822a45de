"""Jobs that are cancelled, paused and resumed, or over their time; and attempts whose workers are of version 0.1.0."""

import argparse

import pytest

from swiftkv_platform.contract.attempts import PROTOCOL, AttemptId, AttemptRequest
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason, transition
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.errors import IllegalTransitionError
from tests.support.old_home import old_attempts
from tests.unit.control_plane.rules.conftest import TENANT, Plane

ANN = Caller(TENANT, "ann")


def cancel(plane: Plane, job: Job) -> Job:
    return plane.service.cancel(job.id, ANN)


def test_cancelling_stops_the_run_and_waits_for_its_end(plane: Plane) -> None:
    job = plane.started()
    plane.worker(job).say("status", status="running")
    plane.tick()
    assert cancel(plane, job).status is cancel(plane, job).status is JobStatus.CANCELLING
    plane.tick()
    assert plane.cluster.get_submission(f"{job.id}-1").status is SubmissionStatus.STOPPED
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
        assert plane.service.pause(job.id, ANN).status is JobStatus.PAUSING
    plane.tick()
    assert plane.store.is_pause_requested(AttemptId(job.id, 1))
    running = plane.cluster.get_submission(f"{job.id}-1")
    assert running.status is SubmissionStatus.RUNNING, "the attempt has time to write a checkpoint"

    checkpoint = worker.checkpoint(5)
    worker.say("status", status="paused")
    for _ in range(2):  # stopped, then seen to have ended
        plane.tick()
    paused = plane.get(job)
    assert (paused.status, paused.status_reason) == (JobStatus.PAUSED, Reason("paused", "paused by ann"))
    plane.tick()
    assert plane.cluster.started == [f"{job.id}-1"]

    for _ in range(2):
        resumed = plane.service.resume(job.id, ANN)
        assert (resumed.status, resumed.attempt.number, resumed.retries) == (JobStatus.QUEUED, 2, 0)
    plane.tick()
    assert plane.store.read_request(AttemptId(job.id, 2)).resume_from == checkpoint
    assert not plane.store.is_pause_requested(AttemptId(job.id, 2))
    assert plane.statuses(job) == ["queued", "starting", "running", "pausing", "paused", "queued", "starting"]


def test_a_queued_job_is_paused_at_once_and_keeps_its_attempt(plane: Plane) -> None:
    job = plane.submit()
    assert plane.service.pause(job.id, ANN).status is JobStatus.PAUSED
    reconciler = plane.reconciler()
    reconciler.tick()
    assert plane.cluster.started == []
    assert plane.service.resume(job.id, ANN).attempt.number == 1
    reconciler.tick()
    assert plane.cluster.started == [f"{job.id}-1"]


def test_a_run_over_its_time_is_stopped_and_fails(plane: Plane) -> None:
    job = plane.started(limits={"max_runtime_s": 100})
    plane.clock.now += 100
    plane.tick()
    assert plane.cluster.get_submission(f"{job.id}-1").status is SubmissionStatus.RUNNING
    plane.clock.now += 1
    plane.tick()
    # An error of the process while it is being stopped does not hide the cause.
    plane.worker(job).say("error", "interrupted", code="worker_lost", retryable=True)
    plane.tick()
    error = plane.get(job).error
    assert error is not None
    assert (error.code, error.field) == ("max_runtime_exceeded", "limits.max_runtime_s")


@pytest.mark.parametrize("verb", ["cancel", "pause"])
def test_a_job_that_finishes_while_it_is_stopped_has_succeeded(plane: Plane, verb: str) -> None:
    job = plane.started()
    getattr(plane.service, verb)(job.id, ANN)
    plane.worker(job).artifact()
    assert plane.end(job).status is JobStatus.SUCCEEDED
    with pytest.raises(IllegalTransitionError, match="is succeeded"):
        plane.service.pause(job.id, ANN)


@pytest.mark.parametrize(
    ("retryable", "status"),
    [(None, JobStatus.PAUSED), (True, JobStatus.PAUSED), (False, JobStatus.FAILED)],
    ids=["ends by itself", "worker lost", "bad data"],
)
def test_an_attempt_that_ends_while_pausing_is_paused_unless_no_other_try_can_mend_it(
    plane: Plane, retryable: bool | None, status: JobStatus
) -> None:
    job = plane.started(fault_tolerance={"max_retries": 0})
    plane.service.pause(job.id, ANN)
    with pytest.raises(IllegalTransitionError, match="is pausing"):
        plane.service.resume(job.id, ANN)
    if retryable is None:
        plane.worker(job).say("status", status="paused")
    else:
        plane.worker(job).say("error", "why", level="error", code="some_error", retryable=retryable)
    ended = SubmissionStatus.SUCCEEDED if retryable is None else SubmissionStatus.FAILED
    assert plane.end(job, ended).status is status


def repeat(old_job: str, plane: Plane, job: Job) -> None:
    """Write what a recorded attempt of version 0.1.0 wrote below the job's first attempt."""
    for key, data in old_attempts()[old_job].items():
        plane.objects.put_bytes(f"{AttemptId(job.id, 1).prefix}/{key}", data)


def printed_by_old_driver(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Output of the entrypoint of version 0.1.0, which begins with this parser."""
    parser = argparse.ArgumentParser(
        prog="python -m swiftkv_platform.jobs.distill", description="Run one attempt of a distillation job."
    )
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--store", required=True, help="object store: a directory or s3://bucket/prefix")
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    return capsys.readouterr().err


def test_a_request_of_the_old_control_plane_is_read() -> None:
    request = AttemptRequest.model_validate_json(old_attempts()["paused"]["attempt.json"])
    assert (request.attempt, request.spec.name, request.allowed_roots) == (1, "paused", None)


def test_an_attempt_that_old_workers_have_begun_is_followed_to_its_end(plane: Plane) -> None:
    job = plane.started()
    repeat("finished", plane, job)
    plane.tick()
    assert plane.get(job).progress.step == 6
    plane.end(job)
    assert plane.statuses(job) == ["queued", "starting", "running", "evaluating", "succeeded"]
    assert {event.level for event in plane.events(job)} == {"info"}


def test_an_old_attempt_pauses(plane: Plane) -> None:
    job = plane.started()
    pausing, event = transition(plane.get(job), JobStatus.PAUSING, now=int(plane.clock()))
    plane.jobs.update(pausing, events=[event])
    plane.tick()
    assert plane.objects.head(f"jobs/{job.id}/attempts/1/control/pause.json") is not None
    repeat("paused", plane, job)
    plane.end(job)
    assert plane.get(job).status is JobStatus.PAUSED
    assert plane.store.find_newest_checkpoint(job.id) is not None


def test_an_old_image_is_refused_in_one_sentence(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    job = plane.started()
    entrypoint = plane.cluster.submissions[f"{job.id}-1"].entrypoint
    printed = printed_by_old_driver(entrypoint.split()[3:], capsys)
    message = f"Job entrypoint command failed with exit code 2, last available logs (truncated):\n{printed}"
    plane.end(job, SubmissionStatus.FAILED, message)
    assert plane.get(job).status is JobStatus.FAILED, "another attempt would run the same image"
    assert plane.reason(job).code == "protocol_mismatch"
    assert plane.reason(job).message == (
        f"the workers' image has protocol 1, the control plane has protocol {PROTOCOL}"
    )


def test_what_a_job_prints_while_it_runs_is_not_taken_for_an_old_image(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plane.started()
    plane.worker(job).say("status", status="running")
    printed = printed_by_old_driver(["--job-id", "a", "--attempt", "1", "--store", "b", "--protocol", "2"], capsys)
    plane.end(job, SubmissionStatus.FAILED, printed)
    assert (plane.get(job).status, plane.reason(job).code) == (JobStatus.QUEUED, "worker_lost")
