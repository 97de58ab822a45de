"""The table of transitions, and the one function that consults it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from swiftkv_platform.errors import IllegalTransitionError
from swiftkv_platform.orchestration.job import (
    TRANSITIONS,
    Job,
    JobStatus,
    Progress,
    Reason,
    new_id,
    requeue,
    start,
    transition,
)
from swiftkv_platform.specs import JobSpec

REASON = Reason("worker_lost", "the node died", "resources.num_workers")


def make_job(status: JobStatus = JobStatus.QUEUED) -> Job:
    return Job("job_1", "acme", "ann", JobSpec(name="test"), 100, status=status)


def test_a_status_changes_only_as_the_table_says() -> None:
    for source, target in itertools.product(JobStatus, JobStatus):
        if target in TRANSITIONS[source]:
            changed, event = transition(make_job(source), target, now=200)
            assert changed.status is target
            assert (event.data["previous"], event.data["status"]) == (source.value, target.value)
        else:
            with pytest.raises(IllegalTransitionError) as caught:
                transition(make_job(source), target, now=200)
            assert all(status.value in caught.value.message for status in TRANSITIONS[source])


def test_every_live_job_can_fail_or_be_cancelled() -> None:
    live = [status for status in JobStatus if not status.is_terminal]
    assert {status for status in JobStatus if status.is_terminal} == {"succeeded", "failed", "cancelled"}
    for status in live:
        assert JobStatus.FAILED in TRANSITIONS[status]
        assert status is JobStatus.CANCELLING or JobStatus.CANCELLING in TRANSITIONS[status]


def test_times_and_reasons_follow_the_status() -> None:
    job, _ = start(make_job(), now=101, resume_from=None)
    assert job.attempt.submission_id == "job_1-1"
    job, _ = transition(job, JobStatus.RUNNING, now=102)
    job = replace(job, progress=Progress(seconds_remaining=7), estimated_finish=500)
    job, event = requeue(job, now=103, reason=REASON, delay_s=2.0, counts=True)
    assert (job.status_reason, job.error, event.level) == (REASON, None, "warn")
    assert (job.attempt.number, job.attempt.submission_id) == (2, None)
    assert (job.retries, job.not_before) == (1, 105.0)
    assert (job.estimated_finish, job.progress.seconds_remaining) == (None, None)
    job, _ = start(job, now=110, resume_from="checkpoint")
    assert (job.attempt.submission_id, job.attempt.resume_from) == ("job_1-2", "checkpoint")
    job, _ = transition(job, JobStatus.RUNNING, now=111)
    assert (job.started_at, job.status_reason) == (102, None)
    job, event = transition(job, JobStatus.FAILED, now=120, reason=REASON)
    assert (job.finished_at, job.error, event.level) == (120, REASON, "error")
    assert REASON.message in event.message


def test_ids_sort_by_the_time_they_were_made() -> None:
    ids = [new_id("job") for _ in range(1000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 1000
