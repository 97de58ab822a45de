"""Refusals for a quota's sake name the limit, and say whether waiting helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv_platform.orchestration.tenants import Tenants
from tests.unit.api.conftest import SPEC, Server, Start, refusal

QUOTAS = "default: {max_queued_jobs: 2, max_running_jobs: 3, max_gpus: 4, max_cpus: 16}\n"


@pytest.fixture
def limited(start: Start, tmp_path: Path) -> Server:
    file = tmp_path / "tenants.yaml"
    file.write_text(QUOTAS)
    return start(changed={"policies": Tenants(file)})


def test_a_full_queue_is_a_429_that_names_the_quota_and_clears(limited: Server) -> None:
    first = limited.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "a"}).json()
    limited.submit()
    refused = limited.client.post("/jobs", json=SPEC)
    error = refusal(refused, 429)
    assert (refused.json()["code"], error["field"], error["value"]) == ("quota_exceeded", "max_queued_jobs", 2)
    assert float(refused.headers["Retry-After"]) > 0
    again = limited.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "a"})
    assert (again.status_code, again.json()["id"]) == (201, first["id"]), "what was accepted stays accepted"
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
        assert "max_gpus of tenant 'default' is 4" in error["message"]


def test_the_quota_and_its_use_can_be_asked_for(limited: Server) -> None:
    limited.submit()
    limited.tick()
    limited.submit()
    quota = limited.get("/quota")
    assert (quota["max_queued_jobs"], quota["max_running_jobs"], quota["max_gpus"], quota["weight"]) == (2, 3, 4, 1)
    assert (quota["queued_jobs"], quota["running_jobs"], quota["gpus"], quota["cpus"]) == (1, 1, 0, 2)
