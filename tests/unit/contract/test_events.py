"""Events of attempts, reason codes and keys: they are stored, so their form is the same in all versions."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform import errors
from swiftkv_platform.contract.attempts import AttemptId, attempts_prefix, trials_prefix
from swiftkv_platform.contract.events import (
    AttemptEvent,
    CheckpointEvent,
    MessageEvent,
    MetricsEvent,
    ReasonCode,
    parse_event,
)
from tests.support.old_home import old_attempts

NOW = 1000.0


def parsed(**document: Any) -> AttemptEvent:
    return parse_event(json.dumps({"time": 1.0, "message": "m", **document}).encode(), name="e", now=NOW)


def test_events_of_version_0_1_are_written_as_they_were_read() -> None:
    stored = [data for attempt in old_attempts().values() for key, data in attempt.items() if key.startswith("events/")]
    events = [parse_event(event, name="e", now=NOW) for event in stored]
    assert {event.type for event in events} == {"status", "message", "metrics", "checkpoint", "artifact"}
    assert [event.model_dump_json().encode() for event in events] == stored


def test_what_a_newer_version_says_beside_the_rest_is_kept() -> None:
    point = {"step": 1, "loss": 0.5, "memory_bytes": 7.0, "entropy": {"mean": 2.0}}
    event = parsed(type="metrics", data={"points": [point], "total_steps": 3, "epoch": 1})
    assert isinstance(event, MetricsEvent)
    assert event.data == {"points": [point], "total_steps": 3, "epoch": 1}


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"type": "telepathy", "data": {"to": "all"}}, "telepathy"),
        ({"type": "status", "data": {"status": "dancing"}}, "status.data.status"),
        ({"type": "status"}, "status.data"),
        ({"type": "metrics", "data": {"points": [{"loss": 1.0}], "total_steps": 1}}, "metrics.data.points.0"),
        ({"type": "metrics", "data": {"points": [{"step": -1}], "total_steps": 1}}, "step"),
        ({"type": "checkpoint", "data": {"step": 1}}, "checkpoint.data.key"),
        ({"type": "error", "data": {"code": "worker_lost"}}, "error.data.retryable"),
        ({"type": "message", "mood": "good"}, "mood"),
        ({"type": {"a": 1}}, "type"),
        ({}, "type"),
    ],
)
def test_what_is_not_understood_is_a_warning_that_keeps_what_it_can(document: dict[str, Any], named: str) -> None:
    event = parsed(**document)
    assert isinstance(event, MessageEvent)
    assert (event.level, event.time, event.data) == ("warn", 1.0, document.get("data", {}))
    assert event.message.startswith("event 'e' is not valid: ")
    assert named in event.message


@pytest.mark.parametrize("stored", [b"", b"{", b"[]", b"null", b"\xff", b'{"time": "soon"}', b'{"time": 1e999}'])
def test_a_warning_about_an_event_without_a_time_has_the_readers(stored: bytes) -> None:
    event = parse_event(stored, name="e", now=NOW)
    assert (event.level, event.time, event.data) == ("warn", NOW, {})


def test_a_warning_is_short() -> None:
    event = parsed(type="x" * 10_000)
    assert len(event.message) < 600


def test_a_writer_cannot_leave_out_what_a_reader_needs() -> None:
    with pytest.raises(ValidationError, match="sha256"):
        CheckpointEvent(time=1.0, message="m", data={"step": 1, "key": "k", "size": 1})  # type: ignore[typeddict-item]


def test_a_number_that_is_not_finite_is_written_as_null() -> None:
    event = MetricsEvent(time=1.0, message="m", data={"points": [{"step": 1, "loss": float("inf")}], "total_steps": 1})
    again = parse_event(event.model_dump_json().encode(), name="e", now=NOW)
    assert isinstance(again, MetricsEvent)
    assert again.data["points"] == [{"step": 1, "loss": None}]


def test_no_reason_has_the_code_of_an_error() -> None:
    codes = {kind.code for kind in vars(errors).values() if getattr(kind, "code", None)}
    assert codes.isdisjoint(ReasonCode)


ATTEMPT = AttemptId("job_1", 2)


def test_keys_are_what_they_have_always_been() -> None:
    assert {name: getattr(ATTEMPT, name) for name in vars(AttemptId) if name.endswith(("_prefix", "_key"))} | {
        "event_key": ATTEMPT.event_key("driver-01", 7),
        "answers_key": ATTEMPT.answers_key("ab"),
        "get_calibrated_start_prefix": ATTEMPT.get_calibrated_start_prefix("tiny"),
        "evaluation_key": ATTEMPT.evaluation_key("0a1b", "task-000"),
        "row_results_key": ATTEMPT.row_results_key("task-000-own"),
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
        "get_calibrated_start_prefix": "jobs/job_1/attempts/2/starts/tiny",
        "evaluation_prefix": "jobs/job_1/attempts/2/evaluation",
        "evaluation_key": "jobs/job_1/attempts/2/evaluation/0a1b/task-000.json",
        "row_results_prefix": "jobs/job_1/attempts/2/rows",
        "row_results_key": "jobs/job_1/attempts/2/rows/task-000-own.jsonl",
        "artifact_prefix": "jobs/job_1/attempts/2/artifact",
        "tracking_prefix": "jobs/job_1/attempts/2/tracking",
        "curve_key": "jobs/job_1/attempts/2/curve.json",
        "logs_key": "jobs/job_1/attempts/2/logs.txt",
    }
    assert ATTEMPT.prefix == "jobs/job_1/attempts/2"
    assert ATTEMPT.submission_id == "job_1-2"
    assert (attempts_prefix("job_1"), trials_prefix("job_1")) == ("jobs/job_1/attempts", "jobs/job_1/trials")
