"""Workers of version 0.1.0 under this control plane: what runs is followed to its end, what it submits is refused in
one sentence.
"""

from __future__ import annotations

import argparse

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import PROTOCOL, AttemptRequest
from swiftkv_platform.orchestration.job import Job, JobStatus, transition
from swiftkv_platform.orchestration.ports import SubmissionStatus
from tests.old_home import old_attempts
from tests.unit.orchestration.conftest import Plane


def repeat(old_job: str, plane: Plane, job: Job) -> None:
    """Let the attempt of a job do what one of version 0.1.0 did."""
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
    assert plane.store.newest_checkpoint(job.id) is not None


def test_an_old_image_is_refused_in_one_sentence(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    job = plane.started()
    entrypoint = plane.cluster.submissions[f"{job.id}-1"].entrypoint
    printed = printed_by_old_driver(entrypoint.split()[3:], capsys)
    message = f"Job entrypoint command failed with exit code 2, last available logs (truncated):\n{printed}"
    plane.end(job, SubmissionStatus.FAILED, message)
    assert plane.get(job).status is JobStatus.FAILED, "another try would get the same image"
    assert plane.reason(job).code == "protocol_mismatch"
    assert plane.reason(job).message == (
        f"the workers' image speaks protocol 1 and the control plane protocol {PROTOCOL}; "
        "give the Ray cluster the image of the control plane's version, and submit the job again"
    )


def test_what_a_job_prints_while_it_runs_is_not_taken_for_an_old_image(
    plane: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plane.started()
    plane.worker(job).say("status", status="running")
    printed = printed_by_old_driver(["--job-id", "a", "--attempt", "1", "--store", "b", "--protocol", "2"], capsys)
    plane.end(job, SubmissionStatus.FAILED, printed)
    assert (plane.get(job).status, plane.reason(job).code) == (JobStatus.QUEUED, "worker_lost")
