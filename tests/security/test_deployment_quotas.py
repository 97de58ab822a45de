"""Deployments count against what a tenant is granted, also when several are asked for at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.database.session import Database
from tests.security.conftest import DeploymentPlane, deployment_plane
from tests.threads import at_once
from tests.unit.api.conftest import refusal

TENANTS = """
tenants:
  acme: {max_gpus: 8, max_cpus: 16}
"""

GPU = {"device": "cuda", "tensor_parallel_size": 2}


@pytest.fixture
def plane(tmp_path: Path, sqlite_database: Database) -> Iterator[DeploymentPlane]:
    with deployment_plane(tmp_path, sqlite_database, tenants=TENANTS) as plane:
        yield plane


def quota(plane: DeploymentPlane) -> dict[str, Any]:
    answer: dict[str, Any] = plane.ask("acme", "GET", "/quota").json()
    return answer


def test_the_operator_bounds_the_replicas_of_one_deployment(plane: DeploymentPlane) -> None:
    deployment = plane.deployed("free", max_replicas=64, route_prefix="/most")["id"]
    for replicas in ({"max_replicas": 65}, {"min_replicas": 10**6, "max_replicas": 10**6}):
        for refused in (
            plane.deploy("free", **replicas),
            plane.ask("free", "PATCH", f"/deployments/{deployment}", replicas),
        ):
            error = refusal(refused)
            assert (error["field"], "64" in error["message"]) == ("max_replicas", True)


def test_a_deployment_that_could_never_run_is_over_quota(plane: DeploymentPlane) -> None:
    for number, (options, limit) in enumerate(
        (
            ({"min_replicas": 17, "max_replicas": 17}, "max_cpus"),
            ({"max_replicas": 3, "engine": {"device": "cuda", "tensor_parallel_size": 3}}, "max_gpus"),
            ({"engine": {"num_threads": 17}}, "max_cpus"),
        )
    ):
        refused = plane.deploy("acme", **options)
        assert (refused.status_code, refused.json()["code"]) == (403, "over_quota")
        assert limit in refused.json()["detail"]
        free = plane.deploy("free", route_prefix=f"/{number}", **options)
        assert free.status_code == 201, "without a limit it is not held"


def test_deployments_hold_what_they_may_grow_to(plane: DeploymentPlane) -> None:
    path = f"/deployments/{plane.deployed('acme', route_prefix='/a', max_replicas=3, engine=GPU)['id']}"
    held = quota(plane)
    assert (held["max_gpus"], held["gpus"], held["max_cpus"], held["cpus"]) == (8, 6, 16, 6)
    assert (held["max_replicas"], held["replicas"]) == (None, 3)
    assert held["held_by_deployments"] == {"gpus": 6, "cpus": 6}
    assert held["held_by_jobs"] == {"gpus": 0, "cpus": 0}

    for options, limit in (
        ({"engine": {**GPU, "tensor_parallel_size": 3}}, "max_gpus"),
        ({"max_replicas": 2, "engine": GPU}, "max_gpus"),
        ({"engine": {"num_threads": 11}}, "max_cpus"),
    ):
        refused = plane.deploy("acme", route_prefix="/b", **options)
        assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded"), refused.text
        assert (refused.json()["errors"][0]["field"], "Retry-After" in refused.headers) == (limit, True)
    model = plane.model("acme")
    for change, status in (
        ({"max_replicas": 5}, 403),
        ({"engine": {"num_threads": 3}}, 403),
        ({"max_replicas": 4}, 200),
        ({"model": model}, 200),
    ):
        assert plane.ask("acme", "PATCH", path, change).status_code == status, change
    assert plane.deploy("acme", route_prefix="/b", engine=GPU).status_code == 429
    assert plane.deploy("other", route_prefix="/b", max_replicas=9).status_code == 201
    plane.ask("acme", "DELETE", path)
    assert plane.deploy("acme", route_prefix="/b", engine=GPU).status_code == 429, "its replicas have yet to go"
    plane.parts.catalog.remove_deployment(path.rpartition("/")[2])
    assert plane.deploy("acme", route_prefix="/b", engine=GPU).status_code == 201


def test_of_many_deployments_at_once_no_more_pass_than_the_quota_holds(plane: DeploymentPlane) -> None:
    deploy = partial(plane.deploy, "acme", plane.model("acme"), engine=GPU)
    answers = at_once(partial(deploy, route_prefix=f"/at{number}") for number in range(20))
    assert Counter(answer.status_code for answer in answers) == {201: 4, 429: 16}
    deployments = [item["id"] for item in plane.ask("acme", "GET", "/deployments").json()["data"]]
    plane.parts.catalog.remove_deployment(deployments.pop())
    patch = partial(plane.ask, "acme", "PATCH", body={"max_replicas": 2})
    changes = at_once(partial(patch, f"/deployments/{deployment}") for deployment in deployments)
    assert Counter(answer.status_code for answer in changes) == {200: 1, 429: 2}
    assert quota(plane)["gpus"] == 8


def test_a_tenants_replicas_are_counted_whatever_they_hold(tmp_path: Path, sqlite_database: Database) -> None:
    granted = "default: {max_replicas: 3}\n"
    with deployment_plane(tmp_path, sqlite_database, tenants=granted, max_deployment_replicas=2) as plane:
        assert plane.deploy("acme", route_prefix="/a", max_replicas=3).status_code == 422, "of one deployment"
        plane.deployed("acme", route_prefix="/a", max_replicas=2)
        refused = plane.deploy("acme", route_prefix="/b", max_replicas=2)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (429, "max_replicas")
        assert plane.deploy("acme", route_prefix="/b").status_code == 201
        assert (quota(plane)["max_replicas"], quota(plane)["replicas"]) == (3, 3)
    with deployment_plane(tmp_path, sqlite_database, tenants="default: {max_replicas: 1}\n") as plane:
        refused = plane.deploy("other", max_replicas=2)
        assert (refused.status_code, refused.json()["code"]) == (403, "over_quota")
        [first, second] = plane.ask("acme", "GET", "/deployments").json()["data"]
        for deployment, change, status in (
            (first, {"upscale_delay_s": 1.0}, 200),
            (first, {"max_replicas": 2}, 403),
            (second, {"min_replicas": 1, "max_replicas": 1}, 200),
        ):
            answer = plane.ask("acme", "PATCH", f"/deployments/{deployment['id']}", change)
            assert answer.status_code == status, "what a lower quota finds stays, and may shrink"


def test_a_job_waits_while_deployments_hold_its_gpus(tmp_path: Path, sqlite_database: Database) -> None:
    loops = {"reconcile_interval_s": 0.05, "max_running_jobs": 9}
    with deployment_plane(tmp_path, sqlite_database, tenants=TENANTS, **loops) as plane:
        deployment = plane.deployed("acme", max_replicas=3, engine=GPU)["id"]
        held_back, free = (submit(plane, tenant) for tenant in ("acme", "free"))
        wait_for_start(plane, "free", free)
        assert plane.ask("acme", "GET", f"/jobs/{held_back}").json()["status"] == "queued"
        plane.parts.catalog.remove_deployment(deployment)
        wait_for_start(plane, "acme", held_back)
        assert quota(plane)["held_by_jobs"]["gpus"] == 4
        refused = plane.deploy("acme", max_replicas=3, engine=GPU)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (429, "max_gpus")
        assert plane.deploy("acme", max_replicas=2, engine=GPU).status_code == 201


def submit(plane: DeploymentPlane, tenant: str) -> str:
    resources = {"num_workers": 4, "gpus_per_worker": 1}
    spec = {"name": "test", "model": {"name_or_path": "org/teacher"}, "resources": resources}
    return str(plane.ask(tenant, "POST", "/jobs", spec).json()["id"])


def wait_for_start(plane: DeploymentPlane, tenant: str, job: str) -> None:
    deadline = time.monotonic() + 30
    while plane.ask(tenant, "GET", f"/jobs/{job}").json()["status"] == "queued":
        assert time.monotonic() < deadline, "it was never started"
        time.sleep(0.05)
