"""API keys: nobody without one, nothing beyond its scopes, nothing of another tenant's; over every route there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from swiftkv_platform.api.app import create_app
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.keys import Scope, create_key
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import SPEC, Server, control_plane

OPEN = {"/healthz", "/readyz", "/metrics"}
"""Nothing of any tenant's is told there."""

As = Callable[..., TestClient]


@pytest.fixture
def as_(server: Server, tmp_path: Path) -> Iterator[As]:
    """A client with a fresh key of a tenant, on the same control plane but with keys."""
    path = tmp_path / "keys.json"
    create_key(path, name="operator", tenant="operators", scopes=frozenset({Scope.ADMIN}))
    settings = server.settings.model_copy(update={"api_keys_file": path})
    with control_plane(server.parts, settings, "http://swiftkv.example") as client:

        def connect(tenant: str | None, *scopes: Scope) -> TestClient:
            client.headers.pop("authorization", None)
            if tenant is not None:
                name = f"key{len(path.read_text())}"
                token = create_key(path, name=name, tenant=tenant, scopes=frozenset(scopes or {Scope.ADMIN}))
                client.headers["authorization"] = f"Bearer {token}"
            return client

        yield connect


def routes(client: TestClient) -> list[tuple[str, str]]:
    paths: dict[str, dict[str, Any]] = client.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods if path not in OPEN]


def call(client: TestClient, method: str, path: str, ids: dict[str, str]) -> httpx.Response:
    body = None
    if (method, path) in (("POST", "/jobs"), ("POST", "/jobs/validate")):
        body = SPEC
    elif (method, path) == ("POST", "/deployments"):
        body = {"model": ids["model_id"], "route_prefix": "/taken"}
    elif method == "PATCH":
        body = {"max_replicas": 2}
    elif path.endswith("/generate"):
        body = {"prompt": "x"}
    return client.request(method, path.format(**ids), json=body)


def test_without_a_key_nothing_is_answered(as_: As) -> None:
    client = as_(None)
    ids = {"job_id": "job_x", "model_id": "mdl_x", "deployment_id": "dep_x", "path": "x"}
    for method, path in routes(client):
        refused = call(client, method, path, ids)
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated"), (method, path)
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert client.get("/healthz").status_code == 200


def test_a_key_opens_no_more_than_its_scopes(as_: As) -> None:
    client = as_("acme", Scope.JOBS_READ)
    assert client.get("/jobs").status_code == 200
    ids = {"job_id": "job_x", "model_id": "mdl_x", "deployment_id": "dep_x", "path": "x"}
    for method, path in routes(client):
        if method != "GET":
            refused = call(client, method, path, ids)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), (method, path)
    assert as_("acme", Scope.JOBS_WRITE).post("/jobs", json=SPEC).status_code == 201
    assert as_("acme", Scope.JOBS_WRITE).get("/jobs").status_code == 403


def test_a_tenant_reaches_nothing_of_anothers(as_: As, server: Server) -> None:
    job = as_("acme").post("/jobs", json=SPEC).json()
    assert (job["tenant"], job["created_by"][:3]) == ("acme", "key")
    server.tick()
    worker = server.worker(job["id"])
    worker.say("status", status="running")
    worker.artifact()
    server.cluster.finish(f"{job['id']}-1", SubmissionStatus.SUCCEEDED)
    server.tick()
    model = as_("acme").get(f"/jobs/{job['id']}").json()["distilled_model"]
    deployment = as_("acme").post("/deployments", json={"model": model, "route_prefix": "/taken"}).json()
    ids = {"job_id": job["id"], "model_id": model, "deployment_id": deployment["id"], "path": "data.bin"}
    own = as_("acme")
    assert {call(own, "GET", path, ids).status_code for method, path in routes(own) if method == "GET"} == {200}

    stranger = as_("other")
    for method, path in routes(stranger):
        answer = call(stranger, method, path, ids)
        where = (method, path, answer.text)
        if "{" in path:
            assert answer.status_code == 404, where
        elif method == "GET":
            assert answer.status_code == 200, where
            assert not any(found in answer.text for found in (job["id"], model, deployment["id"])), where
        elif path == "/deployments":
            assert answer.status_code == 422, where
        else:
            assert answer.status_code in (200, 201), where  # its own job
    assert as_("acme").get(f"/jobs/{job['id']}").json()["status"] == "succeeded"
    assert as_("acme").get(f"/deployments/{deployment['id']}").json()["status"] != "deleting"


def test_with_keys_local_files_are_closed_until_the_operator_opens_them(as_: As, tmp_path: Path) -> None:
    source = {"data": {"sources": [{"name_or_path": str(tmp_path)}]}}
    for path in ("/jobs", "/jobs/validate"):
        refused = as_("acme").post(path, json={**SPEC, **source})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "data.sources[0].name_or_path")


def test_without_keys_only_loopback_is_listened_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="SWIFTKV_API_KEYS_FILE"):
        create_app(Settings(home=tmp_path, host="0.0.0.0", _env_file=None))
    path = tmp_path / "keys.json"
    with pytest.raises(InvalidInputError, match=r"keys\.json"):
        create_app(Settings(home=tmp_path, host="0.0.0.0", api_keys_file=path, _env_file=None))
    create_key(path, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    create_app(Settings(home=tmp_path, host="0.0.0.0", api_keys_file=path, _env_file=None))
