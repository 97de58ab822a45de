"""Requests of the adapter to Ray's job API."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.cluster.ray_jobs import RayJobs
from tests.fakes.scripted_server import Script, json_answer, serve


@pytest.mark.parametrize(
    "reserved", [{}, {"entrypoint_num_cpus": 0.5}, {"entrypoint_num_cpus": 1.0, "entrypoint_memory": 2 << 30}]
)
def test_a_driver_reserves_what_is_set_and_nothing_else(reserved: dict[str, Any]) -> None:
    """Ray moves a driver off its head as soon as one reservation is named, be it of nothing."""
    script = Script()
    script.on("POST", "/api/jobs/", json_answer({"submission_id": "job_1-1"}))
    with serve(script) as url:
        RayJobs(url, **reserved).submit("job_1-1", "true", {})
    [request] = script.sent("POST", "/api/jobs/")
    assert {name: value for name, value in request.body.items() if name.startswith("entrypoint_")} == reserved


def test_submissions_that_have_not_ended_are_listed() -> None:
    """Drivers that connected by themselves have no submission, and are in the list as well."""
    script = Script()
    listed = [
        {"type": "SUBMISSION", "submission_id": "a-1", "entrypoint": "one", "status": "RUNNING"},
        {"type": "SUBMISSION", "submission_id": "a-2", "entrypoint": "two", "status": "PENDING"},
        {"type": "SUBMISSION", "submission_id": "a-3", "entrypoint": "three", "status": "STOPPED"},
        {"type": "DRIVER", "submission_id": None, "entrypoint": "four", "status": "RUNNING"},
    ]
    script.on("GET", "/api/jobs/", json_answer(listed))
    with serve(script) as url:
        running = RayJobs(url).running()
    assert [(each.submission_id, each.entrypoint) for each in running] == [("a-1", "one"), ("a-2", "two")]
