"""Jobs on captured traffic: which deployments and windows the control plane grants, and what an attempt gets."""

import json
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.jobs.worker.setup import get_access
from tests.support.captured_traffic import Traffic
from tests.unit.control_plane.routes.conftest import SPEC, Server, refusal

pytestmark = pytest.mark.slow("starts an application for each test")

FIELD = "data.sources[0].name_or_path"
PATHS = ("/jobs", "/jobs/validate")


@pytest.fixture
def deployment(server: Server) -> str:
    made = server.client.post("/deployments", json={"model": server.succeed()["distilled_model"]})
    return str(made.json()["id"])


def naming(deployment: str, **fields: Any) -> dict[str, Any]:
    return {"data": {"sources": [{"name_or_path": f"traffic:{deployment}", **fields}]}}


def captured(server: Server, deployment: str, *, tenant: str = "default") -> Traffic:
    return Traffic(server.parts.objects, tenant=tenant, deployment_id=deployment)


def read_request(server: Server, job: str, attempt: int = 1) -> AttemptRequest:
    data = server.parts.objects.get_bytes(f"jobs/{job}/attempts/{attempt}/attempt.json")
    return AttemptRequest.model_validate_json(data)


def test_a_window_is_stored_as_times_and_the_attempt_gets_its_address(server: Server, deployment: str) -> None:
    server.wait(3600 - server.parts.clock())
    captured(server, deployment).chat("ask", "say", time=3000.0)
    job = server.submit(**naming(deployment, since="1h", until="2030-01-01"))
    [source] = job["spec"]["data"]["sources"]
    assert (source["since"], source["until"]) == ("1970-01-01T00:00:00Z", "1970-01-01T01:00:00Z")
    [source] = server.submit(**naming(deployment))["spec"]["data"]["sources"]
    assert (source["since"], source["until"]) == (None, "1970-01-01T01:00:00Z")
    server.tick()
    request = read_request(server, job["id"])
    assert request.traffic == {deployment: f"{server.parts.objects.uri}/traffic/default/{deployment}"}
    assert request.spec.data.sources[0].window == (0.0, 3600.0)
    assert get_access(request).parse_data(f"traffic:{deployment}", "f").name == f"traffic:{deployment}"
    other = server.submit()["id"]
    server.client.post(f"/jobs/{job['id']}/cancel")
    assert "traffic" not in json.dumps(server.get(f"/jobs/{other}")["spec"])


def test_every_attempt_reads_the_window_of_the_submission(server: Server, deployment: str) -> None:
    captured(server, deployment).chat("ask", "say", time=900.0)
    job = server.submit(**naming(deployment, since="10m"))["id"]
    server.run(job)
    first = read_request(server, job)
    server.client.post(f"/jobs/{job}/pause")
    server.tick()
    server.worker(job).say("status", status="paused")
    server.end(job)
    server.wait(3600)
    assert server.client.post(f"/jobs/{job}/resume").status_code == 200, server.get(f"/jobs/{job}")
    server.tick()
    again = read_request(server, job, 2)
    assert (again.spec.data, again.traffic) == (first.spec.data, first.traffic)


def test_the_same_key_returns_the_same_job_although_its_window_has_passed(server: Server, deployment: str) -> None:
    captured(server, deployment).chat("ask", "say", time=900.0)
    body = {**SPEC, **naming(deployment, since="10m")}
    first = server.client.post("/jobs", json=body, headers={"Idempotency-Key": "once"}).json()
    server.wait(3600)
    again = server.client.post("/jobs", json=body, headers={"Idempotency-Key": "once"}).json()
    assert (again["id"], again["spec"]) == (first["id"], first["spec"])
    assert "none" not in refusal(server.client.post("/jobs", json=body))["message"]


def test_the_estimate_counts_the_bytes_of_the_window(server: Server, deployment: str) -> None:
    traffic = captured(server, deployment)
    for time in (100.0, 500.0, 900.0):
        traffic.chat("ask", "say", time=time)
    sizes = [info.size for info in server.parts.objects.list(traffic.prefix)]
    for window, expected in (({}, sum(sizes)), ({"since": "1970-01-01T00:10:00Z"}, sizes[2])):
        plan = server.client.post("/jobs/validate", json={**SPEC, **naming(deployment, **window)}).json()
        assert [(each["num_bytes"], each["num_files"]) for each in plan["sources"]] == [(expected, None)]


def test_a_window_without_requests_is_refused_with_the_days_that_have_some(server: Server, deployment: str) -> None:
    server.wait(10 * 86400)
    for path in PATHS:
        error = refusal(server.client.post(path, json={**SPEC, **naming(deployment)}))
        assert error["field"] == FIELD
        assert "no captured requests from the beginning until 1970-01-11" in error["message"]
        assert "set `capture` of the deployment" in error["message"]
    for day in (1, 2, 5):
        captured(server, deployment).chat("ask", "say", time=86400.0 * day)
    for path in PATHS:
        error = refusal(server.client.post(path, json={**SPEC, **naming(deployment, since="2d")}))
        assert error["field"] == FIELD
        assert error["message"].endswith("days with requests: 1970-01-02, 1970-01-03, 1970-01-06")


@pytest.mark.parametrize(
    ("window", "field", "told"),
    [
        ({"since": "1970-01-03"}, "data.sources[0].since", "which is not before until (1970-01-01T"),
        ({"since": "1m", "until": "2m"}, "data.sources[0].since", "which is not before until"),
        ({"since": "yesterday"}, "data.sources[0].since", "use a date or time such as 2026-11-30"),
        ({"until": "0d"}, "data.sources[0].until", "12h, 7d"),
    ],
)
def test_times_that_are_no_window_are_refused(
    server: Server, deployment: str, window: dict[str, str], field: str, told: str
) -> None:
    captured(server, deployment).chat("ask", "say", time=900.0)
    for path in PATHS:
        error = refusal(server.client.post(path, json={**SPEC, **naming(deployment, **window)}))
        assert (error["field"], told in error["message"]) == (field, True), error


def test_another_tenants_deployment_is_as_one_that_does_not_exist(server: Server, deployment: str) -> None:
    """Also if there is captured traffic with the id: of the other tenant, or left of a deployment that is deleted."""
    foreign, nobodys, deleted = new_id("dep"), new_id("dep"), new_id("dep")
    captured(server, foreign, tenant="other").chat("secret", "say", time=900.0)
    captured(server, deleted).chat("ask", "say", time=900.0)
    messages = set()
    for name in (foreign, nobodys, deleted):
        for path in PATHS:
            error = refusal(server.client.post(path, json={**SPEC, **naming(name)}))
            assert error["field"] == FIELD
            messages.add(error["message"].replace(name, "ID"))
    assert messages == {
        f"{FIELD} is 'traffic:ID', but there is no deployment with this id; list them with `swiftkv deployments`"
    }
