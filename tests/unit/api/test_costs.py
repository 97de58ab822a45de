"""Time and money of a job: foreseen from jobs that were measured, counted while it runs, and capped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.orchestration.estimates import PROCESS_MEMORY
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import SPEC, Server, control_plane, make_parts

TRAINING = {"max_steps": 40, "batch_size": 4, "micro_batch_size": 2}


class Clock:
    """Stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def priced(tmp_path: Path, empty_database: Path, clock: Clock) -> Iterator[Server]:
    """Two workers of one core each cost 4 an hour."""
    parts = replace(make_parts(tmp_path, empty_database), clock=clock)
    settings = Settings(home=tmp_path, cpu_hour_price=2.0, _env_file=None)
    with control_plane(parts, settings) as client:
        yield Server(client, parts, settings)


def run(server: Server, clock: Clock, steps: int = 40, *, held: int = 0, **spec: Any) -> dict[str, Any]:
    """A job of ten seconds to its first step, half a second a step, and twenty to its end.

    Its worker's process holds `held` bytes and, at times, two more.
    """
    job_id = server.submit(training={**TRAINING, "max_steps": steps}, **spec)["id"]
    clock.now += 100  # in the queue
    server.tick()
    clock.now += 10
    worker = server.worker(job_id)
    worker.say("status", status="running")
    for step in range(2, steps + 1, 2):
        clock.now += 1
        points = [{"step": step, "tokens": step * 100, "memory_bytes": held + step % 4}]
        worker.say("metrics", time=clock.now, points=points, total_steps=steps)
        server.tick()
    clock.now += 20
    worker.artifact()
    server.cluster.finish(f"{job_id}-1", SubmissionStatus.SUCCEEDED)
    server.tick()
    job: dict[str, Any] = server.get(f"/jobs/{job_id}")
    return job


def validate(server: Server, **spec: Any) -> dict[str, Any]:
    answer = server.client.post("/jobs/validate", json={**SPEC, **spec})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_time_is_foreseen_from_a_job_that_was_measured(priced: Server, clock: Clock, teacher: dict[str, str]) -> None:
    spec = {"model": teacher, "training": {**TRAINING, "max_steps": 400}}
    unmeasured = validate(priced, **spec)
    assert unmeasured["seconds"] is None, "nothing has been measured"
    assert unmeasured["process_memory"] == PROCESS_MEMORY
    shorter = validate(priced, model=teacher, training={**TRAINING, "max_steps": 40})  # which searches no rate
    assert shorter["memory_per_worker"] < unmeasured["memory_per_worker"]
    job = run(priced, clock, held=shorter["memory_per_worker"] + 1000, model=teacher)
    estimate = validate(priced, **spec)
    assert estimate["speed_source"] == job["id"]
    assert estimate["seconds"] == pytest.approx(10 + 400 * 0.5 + 20)
    assert estimate["cost"] == pytest.approx(estimate["seconds"] * 4 / 3600)
    assert (estimate["process_memory"], estimate["memory_per_worker"]) == (1002, unmeasured["memory_per_worker"])
    assert validate(priced, model=teacher)["process_memory"] == 1002
    assert validate(priced, model=teacher, resources={"gpus_per_worker": 1})["process_memory"] is None
    shorter = validate(priced, **spec, data={"max_length": 256})
    assert estimate["seconds"] - 30 > 2 * (shorter["seconds"] - 30), "twice the tokens and longer attention"
    assert validate(priced, **spec, resources={"num_workers": 1})["seconds"] is None, "other workers, another speed"
    assert validate(priced, model=teacher)["seconds"] is None, "epochs decide"


def test_a_configured_speed_does_until_there_is_a_measured_one(
    tmp_path: Path, empty_database: Path, teacher: dict[str, str]
) -> None:
    settings = Settings(home=tmp_path, flops_per_second=1e9, _env_file=None)
    with control_plane(make_parts(tmp_path, empty_database), settings) as client:
        body = {**SPEC, "model": teacher, "training": TRAINING}
        estimate = client.post("/jobs/validate", json=body).json()
    assert estimate["speed_source"] == "configured"
    assert estimate["seconds"] == pytest.approx(estimate["total_flops"] / 2e9)
    assert estimate["cost"] is None, "without prices"


def test_every_phase_is_planned_at_the_measured_speed(priced: Server, clock: Clock, teacher: dict[str, str]) -> None:
    spec = {"model": teacher, "training": TRAINING}
    unmeasured = validate(priced, **spec)
    assert [phase["phase"] for phase in unmeasured["phases"]] == [
        "prepare",
        "calibrate",
        "train",
        "evaluate",
        "publish",
    ]
    assert unmeasured["phases"][2]["host_bytes"] == unmeasured["memory_per_worker"]
    assert unmeasured["phases"][2]["seconds"] is None
    assert unmeasured["assumptions"]["flops_source"] is None
    job = run(priced, clock, model=teacher)
    found = validate(priced, **spec)
    assert found["assumptions"]["flops_source"] == job["id"]
    computing = found["phases"][2]["seconds_of"]["compute"]
    assert computing == pytest.approx(found["seconds"] - 30), "without its startup and its end"
    assert found["phases"][2]["seconds"] > computing
    schema = priced.client.get("/openapi.json").json()["components"]["schemas"]
    assert schema["EstimateAnswer"]["properties"]["phases"]["items"] == {"$ref": "#/components/schemas/PhasePlan"}
    assert set(schema["PhasePlan"]["properties"]) == found["phases"][0].keys()


def test_a_job_that_a_node_has_no_disk_for_is_refused(
    tmp_path: Path, empty_database: Path, teacher: dict[str, str]
) -> None:
    settings = Settings(home=tmp_path, node_disk_bytes=1 << 20, _env_file=None)
    with control_plane(make_parts(tmp_path, empty_database), settings) as client:
        body = {**SPEC, "model": teacher, "training": TRAINING}
        for path in ("/jobs/validate", "/jobs"):
            refused = client.post(path, json=body)
            assert refused.status_code == 422, refused.text
            assert refused.json()["errors"][0]["field"] == "model.name_or_path"
            assert "a node has 0.0 GB (SWIFTKV_NODE_DISK_BYTES)" in refused.json()["detail"]
        assert client.get("/jobs").json()["data"] == []


def test_cost_counts_the_time_on_the_cluster_alone(priced: Server, clock: Clock) -> None:
    job_id = priced.submit()["id"]
    clock.now += 3600
    assert priced.get(f"/jobs/{job_id}")["cost"] == 0.0
    priced.tick()
    clock.now += 1800
    worker = priced.worker(job_id)
    worker.say("status", status="running")
    worker.step(1, time=clock.now - 900, total=3)
    worker.step(2, time=clock.now, total=3)
    priced.tick()
    running = priced.get(f"/jobs/{job_id}")
    assert (running["cost"], running["estimated_cost"]) == (2.0, 3.0)
    assert running["progress"]["seconds_remaining"] == 900
    worker.say("error", "lost", code="worker_lost", retryable=True)
    priced.cluster.finish(f"{job_id}-1", SubmissionStatus.FAILED)
    priced.tick()
    clock.now += 7200
    assert priced.get(f"/jobs/{job_id}")["cost"] == 2.0
    priced.tick()
    clock.now += 900
    assert priced.get(f"/jobs/{job_id}")["cost"] == 3.0, "both attempts"
    priced.worker(job_id, 2).artifact()
    priced.cluster.finish(f"{job_id}-2", SubmissionStatus.SUCCEEDED)
    priced.tick()
    clock.now += 900
    ended = priced.get(f"/jobs/{job_id}")
    assert (ended["status"], ended["cost"], ended["estimated_cost"]) == ("succeeded", 3.0, 3.0)


@pytest.mark.parametrize("by_tenant", [False, True])
def test_a_job_over_its_cap_is_paused_and_goes_on_with_a_higher_one(
    priced: Server, clock: Clock, tmp_path: Path, by_tenant: bool
) -> None:
    if by_tenant:
        (tmp_path / "tenants.yaml").write_text("default: {cost_cap: 4}")
        parts = replace(priced.parts, policies=Tenants(tmp_path / "tenants.yaml"))
        priced = Server(priced.client, parts, priced.settings)
    job_id = priced.submit(limits={} if by_tenant else {"cost_cap": 4})["id"]
    priced.tick()
    worker = priced.worker(job_id)
    worker.say("status", status="running")
    clock.now += 3600
    priced.tick()
    assert priced.get(f"/jobs/{job_id}")["status"] == "running"
    clock.now += 1
    priced.tick()
    assert priced.parts.attempts.pause_requested(AttemptId(job_id, 1)), "it is given the time to checkpoint"
    checkpoint = worker.checkpoint(1)
    worker.say("status", status="paused")
    for _ in range(2):
        priced.tick()
    paused = priced.get(f"/jobs/{job_id}")
    assert (paused["status"], paused["status_reason"]["code"]) == ("paused", "cost_cap")
    assert (paused["status_reason"]["field"], paused["cost"] > 4) == ("limits.cost_cap", True)
    if by_tenant:
        return
    for body in (None, {"cost_cap": 4}):
        refused = priced.client.post(f"/jobs/{job_id}/resume", json=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "cost_cap")
    resumed = priced.client.post(f"/jobs/{job_id}/resume", json={"cost_cap": 8})
    assert (resumed.status_code, resumed.json()["spec"]["limits"]["cost_cap"]) == (200, 8)
    priced.tick()
    request = priced.parts.attempts.read_request(AttemptId(job_id, 2))
    assert (request.resume_from, request.spec.limits.cost_cap) == (checkpoint, 8)


def test_without_prices_a_cap_is_refused(server: Server) -> None:
    refused = server.client.post("/jobs", json={**SPEC, "limits": {"cost_cap": 1}})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "limits.cost_cap")
    assert server.get(f"/jobs/{server.submit()['id']}")["cost"] is None
