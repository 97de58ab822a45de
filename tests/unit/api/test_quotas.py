"""Refusals for a quota's sake name the limit, and say whether waiting helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import SPEC, Server, control_plane, make_parts

QUOTAS = "default: {max_queued_jobs: 2, max_running_jobs: 3, max_gpus: 4, max_cpus: 16}\n"


@pytest.fixture
def limited(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    file = tmp_path / "tenants.yaml"
    file.write_text(QUOTAS)
    parts = replace(make_parts(tmp_path, empty_database), policies=Tenants(file))
    settings = Settings(home=tmp_path, _env_file=None)
    with control_plane(parts, settings) as client:
        yield Server(client, parts, settings)


def test_a_full_queue_is_a_429_that_names_the_quota_and_clears(limited: Server) -> None:
    first = limited.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "a"}).json()
    limited.submit()
    refused = limited.client.post("/jobs", json=SPEC)
    document = refused.json()
    assert (refused.status_code, document["code"]) == (429, "quota_exceeded")
    assert (document["errors"][0]["field"], document["errors"][0]["value"]) == ("max_queued_jobs", 2)
    assert float(refused.headers["Retry-After"]) > 0
    again = limited.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "a"})
    assert (again.status_code, again.json()["id"]) == (201, first["id"]), "what was accepted stays accepted"
    limited.client.post(f"/jobs/{first['id']}/pause")
    assert limited.client.post("/jobs", json=SPEC).status_code == 429, "a paused job keeps its place"
    limited.client.post(f"/jobs/{first['id']}/cancel")
    assert limited.client.post("/jobs", json=SPEC).status_code == 201


@pytest.mark.parametrize("path", ["/jobs", "/jobs/validate"])
def test_a_job_that_could_never_start_is_a_403_that_names_the_quota(limited: Server, path: str) -> None:
    resources = {"num_workers": {"min": 1, "max": 8}, "gpus_per_worker": 1}
    refused = limited.client.post(path, json={**SPEC, "resources": resources})
    document = refused.json()
    assert (refused.status_code, document["code"]) == (403, "over_quota")
    assert "max_gpus of tenant 'default' is 4" in document["detail"]
    assert (document["errors"][0]["field"], document["errors"][0]["value"]) == ("resources", 8.0)


def test_the_quota_and_its_use_can_be_asked_for(limited: Server) -> None:
    limited.submit()
    limited.tick()
    limited.submit()
    quota = limited.get("/quota")
    assert (quota["max_queued_jobs"], quota["max_running_jobs"], quota["max_gpus"], quota["weight"]) == (2, 3, 4, 1)
    assert (quota["queued_jobs"], quota["running_jobs"], quota["gpus"], quota["cpus"]) == (1, 1, 0, 2)
