"""A tenant at the limits of what it stores: refusals name the limit and the way out, and what is there stays usable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.jobs import service
from swiftkv_platform.limits import RESUMPTIONS, Limit
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal
from tests.unit.control_plane.routes.test_imports import student

pytestmark = pytest.mark.slow("starts an application for each test")

ROWS = b'{"text": "a row"}\n'


def upload(server: Server) -> httpx.Response:
    return server.client.post("/v1/files", files={"file": ("rows.jsonl", ROWS)}, data={"purpose": "fine-tune"})


def deploy(server: Server, model: str, route: str) -> httpx.Response:
    return server.client.post("/deployments", json={"model": model, "route_prefix": route})


def promote(server: Server, model: str, alias: str) -> httpx.Response:
    return server.client.post(f"/models/{model}/promote", json={"alias": alias, "reason": "better"})


@pytest.fixture
def full(start: Start, tmp_path: Path) -> tuple[Server, str]:
    """A control plane whose tenant has one object of each kind and may have none, and the tenant's model."""
    file = tmp_path / "tenants.yaml"
    file.write_text("{}")
    server = start(changed={"policies": TenantPolicies(file)})
    model = server.succeed()["distilled_model"]
    assert deploy(server, model, "/first").status_code == 201
    assert promote(server, model, "first").status_code == 200
    assert upload(server).status_code == 200
    imported = server.client.post("/models/import", json={"source": str(student(tmp_path))})
    assert imported.status_code == 201, imported.text
    names = ("deployments", "aliases", "files", "imported_models", "stored_jobs")
    (tmp_path / "none.yaml").write_text(json.dumps({"default": {f"max_{name}": 0 for name in names}}))
    return start(changed={"policies": TenantPolicies(tmp_path / "none.yaml")}), model


def test_beyond_each_limit_new_objects_are_refused_and_old_ones_listed_and_deleted(
    full: tuple[Server, str], tmp_path: Path
) -> None:
    server, model = full
    refused: dict[str, tuple[Callable[[], httpx.Response], str]] = {
        "max_deployments": (lambda: deploy(server, model, "/second"), "delete one"),
        "max_aliases": (lambda: promote(server, model, "second"), "use an existing alias"),
        "max_imported_models": (
            lambda: server.client.post("/models/import", json={"source": str(tmp_path / "made")}),
            "delete one (`DELETE /models/{id}`)",
        ),
        "max_stored_jobs": (lambda: server.client.post("/jobs", json=SPEC), "delete one"),
    }
    for name, (add, cure) in refused.items():
        error = refusal(add(), 429)
        assert (error["field"], cure in error["message"]) == (name, True), error
    file = upload(server)
    assert (file.status_code, file.json()["error"]["code"]) == (429, "quota_exceeded")
    assert "its quota max_files is 0; delete one (`DELETE /v1/files/{id}`)" in file.json()["error"]["message"]

    quota = server.get("/quota")
    for name in ("deployments", "aliases", "files", "imported_models", "stored_jobs"):
        assert (quota[name], quota[f"max_{name}"]) == (1, 0)
    assert promote(server, model, "first").status_code == 200, "an old alias can be moved"
    [deployment] = server.get("/deployments")["data"]
    changed = server.client.patch(f"/deployments/{deployment['id']}", json={"max_replicas": 3})
    assert (changed.status_code, changed.json()["max_replicas"]) == (200, 3)
    assert server.client.delete(f"/deployments/{deployment['id']}").status_code == 202
    [stored] = server.get("/v1/files")["data"]
    assert server.client.delete(f"/v1/files/{stored['id']}").status_code == 200
    imported = next(each for each in server.get("/models")["data"] if each["id"] != model)
    assert server.client.delete(f"/models/{imported['id']}").status_code == 204
    assert (server.get("/quota")["files"], server.get("/quota")["imported_models"]) == (0, 0)


def test_a_job_is_resumed_as_often_as_the_limit_says(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RESUMPTIONS", Limit(RESUMPTIONS.scope, RESUMPTIONS.resource, 2))
    job = server.submit()["id"]

    def ask(verb: str) -> Any:
        return server.client.post(f"/jobs/{job}/{verb}")

    for _ in range(2):
        assert (ask("pause").status_code, ask("resume").status_code) == (200, 200)
        assert ask("resume").status_code == 200, "it is queued already"
    assert ask("pause").status_code == 200
    assert "was resumed 2 times, which is the limit" in refusal(ask("resume"), 409)["message"]
    assert ask("cancel").status_code == 200
