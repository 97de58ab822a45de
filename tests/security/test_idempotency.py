"""A retry with its `Idempotency-Key`: answered with the job it made, whatever has changed since."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.api.dependencies import Components
from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.model_configs import llama_config
from tests.unit.api.conftest import control_plane, make_parts

KEY = {"Idempotency-Key": "once"}


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """A job whose teacher is a directory of the tenant's."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(llama_config(12)))
    return {"name": "test", "model": {"name_or_path": str(tmp_path / "teacher")}}


@pytest.fixture
def parts(tmp_path: Path, empty_database: Path) -> Components:
    (tmp_path / "tenants.yaml").write_text("default: {max_queued_jobs: 1, max_cpus: 64}\n")
    return replace(make_parts(tmp_path, empty_database), policies=Tenants(tmp_path / "tenants.yaml"))


def post(parts: Components, settings: Settings, spec: dict[str, Any]) -> httpx.Response:
    """A request to a control plane of its own, as after a restart with other settings."""
    with control_plane(parts, settings) as client:
        return client.post("/jobs", json=spec, headers=KEY)


def test_a_retry_is_answered_whatever_has_changed(parts: Components, spec: dict[str, Any], tmp_path: Path) -> None:
    opened = Settings(home=tmp_path, source_roots=(str(tmp_path),), _env_file=None)
    first = post(parts, opened, spec)
    assert first.status_code == 201, first.text
    (tmp_path / "teacher" / "config.json").unlink()  # its source vanishes
    (tmp_path / "teacher").rmdir()
    assert post(parts, opened, spec).json()["id"] == first.json()["id"]
    closed = opened.model_copy(update={"source_roots": ()})  # the rules change
    assert post(parts, closed, spec).json()["id"] == first.json()["id"]
    (tmp_path / "tenants.yaml").write_text("default: {max_queued_jobs: 0, max_cpus: 0}\n")  # so does the quota
    again = post(parts, closed, spec)
    assert (again.status_code, again.json()["id"], again.json()["spec"]) == (
        201,
        first.json()["id"],
        first.json()["spec"],
    )
    assert again.headers["Location"] == f"/jobs/{first.json()['id']}"


def test_another_body_is_refused_before_it_is_looked_at(
    parts: Components, spec: dict[str, Any], tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path, source_roots=(str(tmp_path),), _env_file=None)
    assert post(parts, settings, spec).status_code == 201
    refused = post(parts, settings, {**spec, "model": {"name_or_path": str(tmp_path / "missing")}})
    assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")


def test_a_refusal_is_not_remembered(parts: Components, spec: dict[str, Any], tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, source_roots=(), _env_file=None)
    assert post(parts, settings, spec).status_code == 422
    assert post(parts, settings.model_copy(update={"source_roots": (str(tmp_path),)}), spec).status_code == 201


def test_a_key_is_its_tenants_alone(parts: Components, spec: dict[str, Any], tmp_path: Path) -> None:
    """The lookup comes before every other check, so it must not cross tenants."""
    path = tmp_path / "keys.json"
    settings = Settings(home=tmp_path, source_roots=(str(tmp_path),), api_keys_file=path, _env_file=None)
    ids = []
    for tenant in ("acme", "other"):
        token = create_key(path, name=tenant, tenant=tenant, scopes=frozenset({Scope.ADMIN}))
        with control_plane(parts, settings, "http://swiftkv.example") as client:
            answer = client.post("/jobs", json=spec, headers={**KEY, "authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["tenant"]) == (201, tenant)
        ids.append(answer.json()["id"])
    assert ids[0] != ids[1]
