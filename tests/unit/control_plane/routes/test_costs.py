"""Quotas, and a job's time and cost: estimated from measured jobs, counted while it runs, and capped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.jobs.estimates import PROCESS_MEMORY
from swiftkv_platform.control_plane.ray import Node, SubmissionStatus
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, StillClock, refusal

pytestmark = pytest.mark.slow("starts an application for each test")

TRAINING = {"max_steps": 40, "batch_size": 4, "micro_batch_size": 2}


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def priced(start: Start, clock: StillClock) -> Server:
    """A control plane with prices: two workers of one core each cost 4 an hour."""
    return start(changed={"clock": clock}, cpu_hour_price=2.0)


def run(server: Server, clock: StillClock, steps: int = 40, *, held: int = 0, **spec: Any) -> dict[str, Any]:
    """Run a job that takes ten seconds to its first step, half a second a step, and twenty seconds after the last.

    Its worker reports `held` bytes of memory and, at every other report, two more.
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
    server.end(job_id)
    job: dict[str, Any] = server.get(f"/jobs/{job_id}")
    return job


def validate(server: Server, **spec: Any) -> dict[str, Any]:
    answer = server.client.post("/jobs/validate", json={**SPEC, **spec})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_time_is_foreseen_from_a_job_that_was_measured(
    priced: Server, clock: StillClock, teacher: dict[str, str]
) -> None:
    spec = {"model": teacher, "training": {**TRAINING, "max_steps": 400}}
    unmeasured = validate(priced, **spec)
    assert unmeasured["seconds"] is None, "nothing has been measured"
    assert unmeasured["process_memory"] == PROCESS_MEMORY
    shorter = validate(priced, model=teacher, training={**TRAINING, "max_steps": 40})  # too short for a rate search
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
    assert validate(priced, model=teacher)["seconds"] is None, "epochs decide the steps"


def test_a_configured_speed_does_until_there_is_a_measured_one(start: Start, teacher: dict[str, str]) -> None:
    estimate = validate(start(flops_per_second=1e9), model=teacher, training=TRAINING)
    assert estimate["speed_source"] == "configured"
    assert estimate["seconds"] == pytest.approx(estimate["total_flops"] / 2e9)
    assert estimate["cost"] is None, "there are no prices"


def test_cost_counts_the_time_on_the_cluster_alone(priced: Server, clock: StillClock) -> None:
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
    priced.end(job_id, SubmissionStatus.FAILED)
    clock.now += 7200
    assert priced.get(f"/jobs/{job_id}")["cost"] == 2.0
    priced.tick()
    clock.now += 900
    assert priced.get(f"/jobs/{job_id}")["cost"] == 3.0, "both attempts count"
    priced.worker(job_id, 2).artifact()
    priced.end(job_id, attempt=2)
    clock.now += 900
    ended = priced.get(f"/jobs/{job_id}")
    assert (ended["status"], ended["cost"], ended["estimated_cost"]) == ("succeeded", 3.0, 3.0)


@pytest.mark.parametrize("by_tenant", [False, True])
def test_a_job_over_its_cap_is_paused_and_goes_on_with_a_higher_one(
    priced: Server, clock: StillClock, tmp_path: Path, by_tenant: bool
) -> None:
    if by_tenant:
        (tmp_path / "tenants.yaml").write_text("default: {cost_cap: 4}")
        parts = replace(priced.parts, policies=TenantPolicies(tmp_path / "tenants.yaml"))
        priced = Server(priced.client, parts, priced.settings)
    job_id = priced.submit(limits={} if by_tenant else {"cost_cap": 4})["id"]
    worker = priced.run(job_id)
    clock.now += 3600
    priced.tick()
    assert priced.get(f"/jobs/{job_id}")["status"] == "running"
    clock.now += 1
    priced.tick()
    assert priced.parts.attempts.is_pause_requested(AttemptId(job_id, 1)), "it has time to write a checkpoint"
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
        assert refusal(priced.client.post(f"/jobs/{job_id}/resume", json=body), 409)["field"] == "cost_cap"
    resumed = priced.client.post(f"/jobs/{job_id}/resume", json={"cost_cap": 8})
    assert (resumed.status_code, resumed.json()["spec"]["limits"]["cost_cap"]) == (200, 8)
    priced.tick()
    request = priced.parts.attempts.read_request(AttemptId(job_id, 2))
    assert (request.resume_from, request.spec.limits.cost_cap) == (checkpoint, 8)


def test_without_prices_a_cap_is_refused(server: Server) -> None:
    refused = refusal(server.client.post("/jobs", json={**SPEC, "limits": {"cost_cap": 1}}))
    assert refused["field"] == "limits.cost_cap"
    assert server.get(f"/jobs/{server.submit()['id']}")["cost"] is None


QUOTAS = "default: {max_queued_jobs: 2, max_running_jobs: 3, max_gpus: 4, max_cpus: 16}\n"


@pytest.fixture
def limited(start: Start, tmp_path: Path) -> Server:
    file = tmp_path / "tenants.yaml"
    file.write_text(QUOTAS)
    return start(changed={"policies": TenantPolicies(file)})


def test_a_full_queue_is_a_429_that_names_the_quota_and_clears(limited: Server) -> None:
    first = limited.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "a"}).json()
    limited.submit()
    refused = limited.client.post("/jobs", json=SPEC)
    error = refusal(refused, 429)
    assert (refused.json()["code"], error["field"], error["value"]) == ("quota_exceeded", "max_queued_jobs", 2)
    assert float(refused.headers["Retry-After"]) > 0
    again = limited.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "a"})
    assert (again.status_code, again.json()["id"]) == (201, first["id"]), "a retry finds the accepted job"
    limited.client.post(f"/jobs/{first['id']}/pause")
    assert limited.client.post("/jobs", json=SPEC).status_code == 429, "a paused job keeps its place"
    limited.client.post(f"/jobs/{first['id']}/cancel")
    assert limited.client.post("/jobs", json=SPEC).status_code == 201


def test_a_job_that_could_never_start_is_a_403_that_names_the_quota(limited: Server) -> None:
    resources = {"num_workers": {"min": 1, "max": 8}, "gpus_per_worker": 1}
    for path in ("/jobs", "/jobs/validate"):
        refused = limited.client.post(path, json={**SPEC, "resources": resources})
        error = refusal(refused, 403)
        assert (refused.json()["code"], error["field"], error["value"]) == ("over_quota", "resources", 8.0)
        assert "max_gpus of tenant 'default', 4" in error["message"]


def test_the_quota_and_its_use_can_be_asked_for(limited: Server) -> None:
    limited.submit()
    limited.tick()
    limited.submit()
    quota = limited.get("/quota")
    assert (quota["max_queued_jobs"], quota["max_running_jobs"], quota["max_gpus"], quota["weight"]) == (2, 3, 4, 1)
    assert (quota["queued_jobs"], quota["running_jobs"], quota["gpus"], quota["cpus"]) == (1, 1, 0, 2)


def test_the_use_of_the_whole_cluster_is_what_ray_tells_of_its_nodes(limited: Server) -> None:
    assert limited.get("/quota")["cluster"] is None, "Ray has not told of any node"
    whole, half = {"CPU": 8.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 6.5, "GPU": 1.0}
    for nodes, told in (
        ([Node(whole, half), Node({"CPU": 2.0}, {"CPU": 0.1})], (3.0, 4.0, 3.4, 10.0)),
        ([], (0.0, 0.0, 0.0, 0.0)),
    ):
        limited.wait(5)
        limited.cluster.nodes = nodes
        cluster = limited.get("/quota")["cluster"]
        assert tuple(cluster[name] for name in ("gpus", "total_gpus", "cpus", "total_cpus")) == told
    limited.wait(5)
    limited.cluster.away = True
    assert limited.get("/quota")["cluster"] is None, "an old report is not repeated"
