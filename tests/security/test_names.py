"""Names that nothing could have are refused by field, and organisations of the hub by policy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from swiftkv_platform.api.app import create_app
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data.opening import read_source
from swiftkv_platform.database.session import Database
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.attempt.downloads import access_of
from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import HubSource, PathSource, SourceRules, parse_source
from swiftkv_platform.specs import DataSourceSpec, JobSpec
from swiftkv_platform.storage.local_store import LocalObjectStore
from tests.components import make_components

IMPOSSIBLE = [
    "~nosuchuser/rows",
    "x" * 5000,
    "org/" + "x" * 5000,
    "/" + "/".join(["x" * 200] * 20),
    "/data/" + "x" * 300,
    "s3://bucket/" + "x" * 5000,
    "builtin:" + "x" * 5000,
    "/data/a\0b",
    "org/a\0b",
    "s3://bucket/a\0b",
    "/data/a\nb",
]
FIELDS: dict[str, Any] = {
    "model.name_or_path": lambda name: {"model": {"name_or_path": name}},
    "data.sources[0].name_or_path": lambda name: {"data": {"sources": [{"name_or_path": name}]}},
    "evaluation.tasks[0]": lambda name: {"evaluation": {"tasks": [f"{name}.yaml"]}},
    "evaluation.tasks[0].data_dir": lambda name: {
        "evaluation": {"tasks": [{"name": "builtin:gsm8k", "data_dir": name}]}
    },
}


@pytest.fixture(params=["open", "restricted"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    roots = None if request.param == "open" else (str(tmp_path / "acme"),)
    return Settings(home=tmp_path, source_roots=roots, reconcile_interval_s=1e6, _env_file=None)


@pytest.fixture
def client(tmp_path: Path, empty_database: Path, settings: Settings) -> Iterator[TestClient]:
    database = Database(f"sqlite:///{shutil.copy(empty_database, tmp_path / 'test.db')}")
    parts = make_components(database, LocalObjectStore(tmp_path / "store"))
    app = create_app(settings, components=parts)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as found:
        yield found


@pytest.mark.parametrize("field", FIELDS)
def test_impossible_names_are_answered_with_422(client: TestClient, field: str) -> None:
    answers = {}
    for name in IMPOSSIBLE:
        body = json.dumps({"name": "t", **FIELDS[field](name)})
        for route in ("/jobs", "/jobs/validate"):
            answer = client.post(route, content=body, headers={"content-type": "application/json"})
            answers[name[:20], route] = answer.status_code
            assert field.partition("[")[0] in answer.text
    assert set(answers.values()) == {422}, answers
    assert client.get("/jobs").json()["data"] == []


def test_what_cannot_be_encoded_is_no_name() -> None:
    with pytest.raises(InvalidInputError, match="cannot be encoded") as caught:
        parse_source("/data/\ud800", field="f")
    assert str(caught.value).isascii()
    assert str(caught.value.value).isascii()


@pytest.mark.parametrize("revision", ["../../other", "a/../../b", "x" * 5000, "\0", "", "/etc/passwd"])
def test_a_revision_stays_within_the_cache(client: TestClient, revision: str) -> None:
    answer = client.post("/jobs", json={"name": "t", "model": {"name_or_path": "org/teacher", "revision": revision}})
    assert answer.status_code == 422
    assert "model.revision" in answer.text


def test_what_cannot_be_opened_is_the_callers_to_put_right(
    client: TestClient, settings: Settings, tmp_path: Path
) -> None:
    """A pipe would block the control plane for ever; a loop of links leads nowhere."""
    root = tmp_path / "acme"
    (root / "teacher").mkdir(parents=True)
    os.mkfifo(root / "rows.jsonl")
    os.mkfifo(root / "teacher" / "config.json")
    (root / "loop.jsonl").symlink_to("loop.jsonl")
    (root / "link.jsonl").symlink_to("/etc/hostname")
    for name in ("rows.jsonl", "loop.jsonl", *(("link.jsonl",) if settings.source_roots else ())):
        source = {"name": "t", "data": {"sources": [{"name_or_path": str(root / name)}]}}
        answer = client.post("/jobs/validate", json=source)
        assert answer.status_code == 422, (name, answer.text)
    model = {"name": "t", "model": {"name_or_path": str(root / "teacher")}}
    assert client.post("/jobs/validate", json=model).status_code == 422


@pytest.mark.parametrize(
    ("name", "relative_paths", "kind"),
    [
        ("org/rows", True, PathSource),
        ("org/rows", False, HubSource),
        ("org/elsewhere", True, HubSource),
        ("./org/rows", False, PathSource),
        ("hf://datasets/org/rows", True, PathSource),
        ("http://127.0.0.1/rows.jsonl", False, PathSource),
        ("org:rows", False, PathSource),
        ("../rows", False, PathSource),
    ],
)
def test_a_name_means_one_thing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, relative_paths: bool, kind: type[Any]
) -> None:
    (tmp_path / "org" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_source(name, field="f", relative_paths=relative_paths), kind)


def test_what_shadows_a_hub_id_is_refused_by_the_worker_where_paths_have_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "rows").mkdir(parents=True)
    (tmp_path / "org" / "rows" / "rows.jsonl").write_text('{"text": "another tenant\'s"}\n')
    monkeypatch.chdir(tmp_path)
    source = DataSourceSpec(name_or_path="org/rows")
    with pytest.raises(InvalidInputError, match="hub id") as caught:
        read_source(source, path="data.sources[0]", remote=None, access=SourceRules(()).access("acme"))
    assert caught.value.field == "data.sources[0].name_or_path"
    [table] = read_source(source, path="data.sources[0]", remote=None)
    assert table.count() == 1


def test_a_tenant_may_be_held_to_organisations_of_the_hub(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(
        "default: {hub_organizations: [meta-llama, gpt2]}\ntenants: {research: {hub_organizations: null}}\n"
    )
    policies = Tenants(file)
    access = {
        name: SourceRules(()).access(name, policies.policy(name).hub_organizations) for name in ("acme", "research")
    }

    def job(model: str, data: str = "meta-llama/rows") -> JobSpec:
        document = {"name": "t", "model": {"name_or_path": model}, "data": {"sources": [{"name_or_path": data}]}}
        return JobSpec.model_validate(document)

    access["acme"].check(job("meta-llama/Llama-3.1-8B"))
    access["acme"].check(job("gpt2"))
    access["research"].check(job("secret/model", "secret/rows"))
    for closed, field in (
        (job("secret/model"), "model.name_or_path"),
        (job("meta-llama-/x"), "model.name_or_path"),
        (job("gpt2", "secret/rows"), "data.sources[0].name_or_path"),
    ):
        with pytest.raises(InvalidInputError, match="meta-llama, gpt2") as caught:
            access["acme"].check(closed)
        assert caught.value.field == field
    request = AttemptRequest(
        job_id="job_1", attempt=1, spec=job("gpt2"), run_id="r", allowed_roots=(), hub_organizations=("gpt2",)
    )
    with pytest.raises(InvalidInputError, match="may not read"):
        read_source(DataSourceSpec(name_or_path="secret/rows"), path="d", remote=None, access=access_of(request))
