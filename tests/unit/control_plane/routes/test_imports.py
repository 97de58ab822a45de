"""Imports of models: what they accept, and what an import that dies leaves behind."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.models.imports import ModelImporter
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.control_plane.parsing import make_import_parsers
from swiftkv_platform.control_plane.retention import DAY_S
from swiftkv_platform.errors import StorageError
from swiftkv_platform.storage.artifacts import hash_manifest, publish_directory, read_manifest
from swiftkv_platform.storage.object_store import LocalObjectStore
from swiftkv_platform.web.limiters import Client
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal
from tests.unit.control_plane.routes.test_registry import post, promote, sweep

pytestmark = pytest.mark.slow("starts an application for each test")

REPORT = {"perplexity_ratio": 1.05, "tasks": [], "distilled": {"kl": 0.1}}


def student(directory: Path, *, spec: dict[str, Any] | None = None, **metrics: Any) -> Path:
    """Write a student: with a `spec`, as `swiftkv distill` does, with a manifest; else as `swiftkv convert` does."""
    made = directory / "made"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama_swiftkv"}))
    (made / "model.safetensors").write_bytes(b"weights")
    if spec is None:
        return made
    lineage = {"job_id": "job_elsewhere", "attempt": 1, "teacher": "org/teacher", "spec": spec}
    publish_directory(
        LocalObjectStore(directory), made, "distilled", kind="artifact", lineage=lineage, metrics={**REPORT, **metrics}
    )
    return directory / "distilled"


@pytest.mark.parametrize("spec", [SPEC, None], ids=["distilled", "converted"])
def test_an_imported_model_lives_as_others_do(server: Server, tmp_path: Path, spec: dict[str, Any] | None) -> None:
    source = student(tmp_path, spec=spec)
    model = post(server, "/models/import", {"source": str(source)}, 201)
    assert (model["job_id"], model["name"]) == (None, "test" if spec else "made")
    assert model["lineage"]["imported_from"] == str(source)
    assert model["verdict"] == ("Perplexity on held-out text is 1.05x the teacher's." if spec else None)
    assert server.get(f"/models/{model['id']}") == server.get("/models")["data"][0] == model
    prefix = f"models/{model['id']}"
    assert model["artifact_uri"] == f"{server.parts.objects.uri}/{prefix}"
    assert model["manifest_digest"] == hash_manifest(read_manifest(server.parts.objects, prefix))
    lineage = server.get(f"/models/{model['id']}/lineage")
    assert (lineage["job_id"], lineage["ancestors"]) == (None, [])
    other = server.succeed()["distilled_model"]
    server.get(f"/models/{model['id']}/compare/{other}")
    theirs = server.get(f"/models/{other}")["size"]
    assert server.get("/quota")["stored_bytes"] == model["size"] + theirs
    deployment = post(server, "/deployments", {"model": model["id"]}, 201)
    assert deployment["artifact_uri"] == model["artifact_uri"]
    promote(server, other, "candidate")
    path = f"/models/{model['id']}"
    assert deployment["id"] in refusal(server.client.delete(path), 409)["message"]
    server.client.delete(f"/deployments/{deployment['id']}")
    server.tick()
    server.tick()
    assert server.client.delete(path).status_code == 204
    assert sweep(server)["deleted"] == 3
    assert (list(server.parts.objects.list(prefix)), server.get("/quota")["stored_bytes"]) == ([], theirs)


def test_a_path_of_another_process_is_refused(server: Server) -> None:
    for source in ("./made", "made", "~/made"):
        error = refusal(server.client.post("/models/import", json={"source": source}))
        assert (error["field"], error["value"]) == ("source", source)
        assert "a relative path" in error["message"]


def test_an_empty_directory_is_refused(server: Server, tmp_path: Path) -> None:
    error = refusal(server.client.post("/models/import", json={"source": str(tmp_path)}))
    assert error["field"] == "source"
    assert "which has no config.json that can be read; use a student's directory" in error["message"]


class Interrupted(ModelRepository):
    """A registry that runs `copying` while an import copies objects, and `copied` before the row is written."""

    copying: Callable[[], None] = staticmethod(lambda: None)
    copied: Callable[[], None] = staticmethod(lambda: None)

    def schedule_import_cleanup(self, prefix: str, **options: Any) -> None:
        super().schedule_import_cleanup(prefix, **options)
        self.copying()

    def register_import(self, model: Model, **options: Any) -> None:
        self.copied()
        super().register_import(model, **options)


def killed() -> None:
    raise KeyboardInterrupt


def interrupted(server: Server, **during: Callable[[], None]) -> ModelImporter:
    registry = Interrupted(server.parts.database)
    vars(registry).update(during)
    return ModelImporter(replace(server.parts, registry=registry), server.settings, Client(), make_import_parsers())


def imported(server: Server) -> int:
    return len([*server.parts.objects.list("models")])


def test_what_an_import_that_died_has_copied_goes_after_a_day_and_no_model_does(server: Server, tmp_path: Path) -> None:
    source, caller = student(tmp_path, spec=SPEC), Caller("default", "ann")
    kept = post(server, "/models/import", {"source": str(source)}, 201)
    files = imported(server)
    with pytest.raises(KeyboardInterrupt):
        interrupted(server, copied=killed).import_model(str(source), None, caller)
    assert imported(server) == 2 * files
    server.wait(DAY_S - 60)
    assert (sweep(server), imported(server)) == ({}, 2 * files), "the import may still be running"
    server.wait(120)
    sweep(server)
    assert imported(server) == files
    assert [model["id"] for model in server.get("/models")["data"]] == [kept["id"]]
    slow = interrupted(server, copying=lambda: server.wait(DAY_S / 2 - 60)).import_model(str(source), None, caller)
    server.wait(DAY_S)
    sweep(server)
    assert imported(server) == 2 * files
    assert slow.id in {model["id"] for model in server.get("/models")["data"]}


@pytest.mark.parametrize("swept", [False, True])
def test_an_import_that_has_taken_too_long_is_refused(server: Server, tmp_path: Path, swept: bool) -> None:
    """An import that was frozen for hours fails, whether a sweep has removed its objects or not."""

    def frozen() -> None:
        server.wait(DAY_S / 2 + 60 if not swept else DAY_S + 60)
        assert bool(sweep(server)) == swept

    with pytest.raises(StorageError, match="too long"):
        interrupted(server, copying=frozen).import_model(
            str(student(tmp_path, spec=SPEC)), None, Caller("default", "ann")
        )
    assert (imported(server), server.get("/models")["data"]) == (0, [])


def test_a_job_continues_from_an_imported_model_whose_spec_is_known(server: Server, tmp_path: Path) -> None:
    model = post(server, "/models/import", {"source": str(student(tmp_path, spec=SPEC))}, 201)
    job = server.submit(training={"from": model["id"]})
    server.tick()
    request = server.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert request.parent is not None
    assert (request.parent.key, request.parent.sha256) == (f"models/{model['id']}", model["manifest_digest"])
    assert job["id"] in refusal(server.client.delete(f"/models/{model['id']}"), 409)["message"]
    made = server.get(f"/jobs/{job['id']}")
    assert made["spec"]["training"]["from"] == model["id"]
    bare = post(server, "/models/import", {"source": str(tmp_path / "made")}, 201)
    refused = refusal(server.client.post("/jobs", json={**SPEC, "training": {"from": bare["id"]}}))
    assert "the spec of its training" in refused["message"]


WRONG: dict[str, Any] = {
    "changed weights": ({}, "model.safetensors", "other", "differs from its manifest.json"),
    "a teacher": ({}, "config.json", '{"model_type": "llama"}', "not a SwiftKV student"),
    "a manifest of another form": ({}, "manifest.json", "{}", "cannot be read"),
    "code": ({}, "config.json", '{"model_type": "llama_swiftkv", "attn_implementation": "a/b"}', "names the code"),
    "an adapter": ({}, "swiftkv_adapter.json", "{}", "swiftkv export"),
    "gates of another form": ({"gates": 5}, None, "", "unknown format"),
    "tasks of another form": ({"tasks": [{"task": "needle_many"}]}, None, "", "unknown format"),
    "characters that no database takes": ({"note": "\0"}, None, "", "unknown format"),
}


@pytest.mark.parametrize(("metrics", "file", "content", "said"), WRONG.values(), ids=WRONG)
def test_what_is_no_student_as_it_was_made_is_not_imported(
    server: Server, tmp_path: Path, metrics: dict[str, Any], file: str | None, content: str, said: str
) -> None:
    source = student(tmp_path, spec=SPEC, **metrics)
    if file is not None:
        (source / file).write_text(content)
    error = refusal(server.client.post("/models/import", json={"source": str(source)}))
    assert (error["field"], said in error["message"]) == ("source", True), error
    assert server.get("/models")["data"] == list(server.parts.objects.list("models")) == []


def test_a_source_is_read_by_the_rules_of_its_tenant(start: Start, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    opened.mkdir()
    server = start(source_roots=(str(opened),), tenants_file=None)
    source = student(tmp_path, spec=SPEC)
    for closed in (str(source), "s3://bucket/model", "org/model", "../made"):
        refused = refusal(server.client.post("/models/import", json={"source": closed}))
        assert refused["field"] == "source"
    inside = opened / "model"
    inside.mkdir()
    for path in source.iterdir():
        (inside / path.name).symlink_to(path)
    assert "links to a path" in refusal(server.client.post("/models/import", json={"source": str(inside)}))["message"]
