"""Keys of an attempt's objects: stored, so they never change."""

from __future__ import annotations

from swiftkv_platform.contract.attempt_id import AttemptId, attempts_prefix, trials_prefix

ATTEMPT = AttemptId("job_1", 2)


def test_keys_are_what_they_have_always_been() -> None:
    assert {name: getattr(ATTEMPT, name) for name in vars(AttemptId) if name.endswith(("_prefix", "_key"))} | {
        "event_key": ATTEMPT.event_key("driver-01", 7),
        "answers_key": ATTEMPT.answers_key("ab"),
        "start_prefix": ATTEMPT.start_prefix("tiny"),
        "evaluation_key": ATTEMPT.evaluation_key("0a1b", "task-000"),
    } == {
        "request_key": "jobs/job_1/attempts/2/attempt.json",
        "preempt_key": "jobs/job_1/attempts/2/control/preempt.json",
        "pause_key": "jobs/job_1/attempts/2/control/pause.json",
        "events_prefix": "jobs/job_1/attempts/2/events",
        "event_key": "jobs/job_1/attempts/2/events/driver-01/00000007.json",
        "checkpoints_prefix": "jobs/job_1/attempts/2/checkpoints",
        "data_prefix": "jobs/job_1/attempts/2/data",
        "answers_prefix": "jobs/job_1/attempts/2/answers",
        "answers_key": "jobs/job_1/attempts/2/answers/ab.jsonl",
        "starts_prefix": "jobs/job_1/attempts/2/starts",
        "start_prefix": "jobs/job_1/attempts/2/starts/tiny",
        "evaluation_prefix": "jobs/job_1/attempts/2/evaluation",
        "evaluation_key": "jobs/job_1/attempts/2/evaluation/0a1b/task-000.json",
        "artifact_prefix": "jobs/job_1/attempts/2/artifact",
        "tracking_prefix": "jobs/job_1/attempts/2/tracking",
        "curve_key": "jobs/job_1/attempts/2/curve.json",
        "logs_key": "jobs/job_1/attempts/2/logs.txt",
    }
    assert ATTEMPT.prefix == "jobs/job_1/attempts/2"
    assert ATTEMPT.submission_id == "job_1-2"
    assert (attempts_prefix("job_1"), trials_prefix("job_1")) == ("jobs/job_1/attempts", "jobs/job_1/trials")


def test_an_attempt_knows_the_ones_before_it() -> None:
    assert ATTEMPT.so_far() == (AttemptId("job_1", 1), ATTEMPT)
