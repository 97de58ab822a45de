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
