"""Models: aliases, rollbacks, lineage, comparisons, copies where the operator allows them, and deletions."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, source_rules, tenant_access
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.deployments.deployment import DeploymentStatus
from swiftkv_platform.control_plane.jobs.ports import SubmissionStatus
from swiftkv_platform.control_plane.models.comparison import Figure, compare
from swiftkv_platform.control_plane.models.imports import ModelImports
from swiftkv_platform.control_plane.models.model import Model
from swiftkv_platform.control_plane.models.rows import Registry
from swiftkv_platform.control_plane.upkeep.objects import RetainedObjects
from swiftkv_platform.control_plane.upkeep.retention import DAY_S, retention
from swiftkv_platform.control_plane.upkeep.rows import RetainedRows
from swiftkv_platform.control_plane.upkeep.sweeper import Sweeper
from swiftkv_platform.errors import StorageError
from swiftkv_platform.storage.artifacts import manifest_digest, publish_directory, read_manifest
from swiftkv_platform.storage.local_store import LocalObjectStore
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal


@pytest.fixture
def models(server: Server) -> list[str]:
    return [server.succeed(name=name)["distilled_model"] for name in ("first", "second", "third")]


def post(server: Server, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def promote(server: Server, model: str, alias: str = "production", reason: str = "better") -> dict[str, Any]:
    return post(server, f"/models/{model}/promote", {"alias": alias, "reason": reason})


def roll_back(server: Server, status: int = 200) -> dict[str, Any]:
    return post(server, "/aliases/production/rollback", {"reason": "it stutters"}, status)


def test_promotions_and_rollbacks_are_kept_with_who_and_why(server: Server, models: list[str]) -> None:
    first, second, third = models
    promoted = promote(server, first, reason="the first")
    assert (promoted["action"], promoted["model"], promoted["previous"]) == ("promote", first, None)
    assert (promoted["by"], promoted["reason"]) == ("local", "the first")
    assert promote(server, first) == promoted, "again is the same"
    promote(server, second)
    promote(server, third)
    assert (roll_back(server)["model"], roll_back(server)["model"]) == (second, first)
    assert roll_back(server, 409)["code"] == "conflict"
    promote(server, third)
    back = roll_back(server)
    told = [back[name] for name in ("action", "model", "previous", "reason")]
    assert told == ["rollback", first, third, "it stutters"]
    alias = server.get("/aliases/production")
    history = [*["promote"] * 3, *["rollback"] * 2, "promote", "rollback"]
    assert (alias["model"], [item["action"] for item in alias["history"]]) == (first, history)
    assert server.get("/aliases")["data"] == [alias]


def test_aliases_come_in_pages_with_their_newest_changes(server: Server, models: list[str]) -> None:
    names = [f"alias-{letter}" for letter in "abcde"]
    for name in (*names, names[0]):
        promote(server, models[0], name)
    for number in range(30):
        promote(server, models[number % 2], "busy")
    whole = server.get("/aliases")
    assert ([each["id"] for each in whole["data"]], whole["has_more"]) == ([*names, "busy"], False)
    busy = server.get("/aliases/busy")
    assert len(busy["history"]) == 30
    assert whole["data"][-1] == {**busy, "history": busy["history"][-20:]}
    page = server.get("/aliases", limit=4)
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (names[:4], True)
    rest = server.get("/aliases", limit=4, after=page["last_id"])
    assert [each["id"] for each in rest["data"]] == [names[4], "busy"]
    backwards = server.get("/aliases", order="desc", limit=1)
    assert [each["id"] for each in backwards["data"]] == ["busy"]
    assert server.client.get("/aliases", params={"limit": 1001}).status_code == 422


def test_a_model_with_an_undecided_gate_is_promoted_only_on_a_word(server: Server) -> None:
    gate = {"field": "evaluation.max_drop", "subject": "points lost on ifeval", "value": 0.4, "limit": 1.0}
    passed = {**gate, "outcome": "passed", "passed": True}
    model = server.succeed(report={"gates": [{**gate, "outcome": "undecided", "passed": False}, passed]})[
        "distilled_model"
    ]
    asked = {"alias": "production", "reason": "good enough"}
    refused = refusal(server.client.post(f"/models/{model}/promote", json=asked), 409)
    assert refused["field"] == "accept_undecided"
    assert "points lost on ifeval is 0.4, evaluation.max_drop asks for 1" in refused["message"]
    assert server.client.get("/aliases/production").status_code == 404
    assert server.client.post("/deployments", json={"model": model}).status_code == 201, "to try it out"
    assert post(server, f"/models/{model}/promote", {**asked, "accept_undecided": True})["model"] == model


def test_a_deployment_of_an_alias_follows_it(server: Server, models: list[str]) -> None:
    promote(server, models[0])
    created = server.client.post("/deployments", json={"model": "production"}).json()
    other = server.client.post("/deployments", json={"model": models[0], "route_prefix": "/other"}).json()
    assert (created["model"], created["alias"], other["alias"]) == (models[0], "production", None)
    server.tick()
    for deployment in (created, other):
        server.serving.become(deployment["id"], DeploymentStatus.RUNNING, replicas=1)
    server.tick()
    promote(server, models[1])
    swapped = server.get(f"/deployments/{created['id']}")
    assert (swapped["model"], swapped["status"]) == (models[1], "swapping")
    assert swapped["artifact_uri"] == server.get(f"/models/{models[1]}")["artifact_uri"]
    assert server.get(f"/deployments/{other['id']}")["model"] == models[0]
    server.tick()
    assert {spec.model for spec in server.serving.applied[-1]} == {models[0], models[1]}
    roll_back(server)
    assert server.get(f"/deployments/{created['id']}")["model"] == models[0]
    pinned = server.client.patch(f"/deployments/{created['id']}", json={"model": models[2]}).json()
    assert (pinned["model"], pinned["alias"]) == (models[2], None), "named by its id it follows nothing any more"
    promote(server, models[1])
    assert server.get(f"/deployments/{created['id']}")["model"] == models[2]


def test_lineage_leads_from_the_data_to_the_deployments(server: Server, models: list[str]) -> None:
    promote(server, models[0])
    deployment = server.client.post("/deployments", json={"model": "production"}).json()
    lineage = server.get(f"/models/{models[0]}/lineage")
    assert (lineage["teacher"], lineage["model"], lineage["aliases"]) == ("tiny", models[0], ["production"])
    assert lineage["job_id"] == server.get(f"/models/{models[0]}")["job_id"]
    assert [item["reason"] for item in lineage["promotions"]] == ["better"]
    assert lineage["deployments"] == [
        {"id": deployment["id"], "route_prefix": "/", "alias": "production", "status": "pending"}
    ]
    promote(server, models[1])
    before = server.get(f"/models/{models[0]}/lineage")
    assert (before["aliases"], before["deployments"], len(before["promotions"])) == ([], [], 2)


def test_two_models_are_compared(server: Server, models: list[str]) -> None:
    comparison = server.get(f"/models/{models[0]}/compare/{models[1]}")
    figures = {figure["name"]: figure for figure in comparison["figures"]}
    assert figures["distilled.kl"] == {"name": "distilled.kl", "a": 0.1, "b": 0.1, "better": None}
    assert (comparison["differences"], figures["kv_bytes_ratio"]["a"]) == ([], None)
    assert server.client.get(f"/models/{models[0]}/compare/mdl_x").status_code == 404


def test_what_stands_for_no_model_is_refused(server: Server) -> None:
    job = server.succeed()
    model = job["distilled_model"]
    for name in ("mdl_x", "job_x", "production", ""):
        assert refusal(server.client.post("/deployments", json={"model": name}))["field"] == "model"
    assert post(server, "/deployments", {"model": job["id"]}, 201)["model"] == model, "a job stands for its own"
    for body in ({"alias": "production"}, {"reason": ""}, {"reason": "x", "alias": "mdl_x"}):
        post(server, f"/models/{model}/promote", body, 422)
    for path in ("/aliases/nothing/rollback", "/models/mdl_x/promote"):
        post(server, path, {"reason": "x"}, 404)
    assert server.client.get("/aliases/nothing").status_code == 404


def described(metrics: dict[str, Any], **lineage: Any) -> Model:
    return Model("mdl_x", "acme", "m", "job_x", 1, 100, "s3://b/a", "d", 1, lineage, metrics)


def test_figures_say_which_is_better_and_lineage_whether_that_counts() -> None:
    def model(kl: float, top1: float, ratio: float, mmlu: float, fingerprint: str, group: int) -> Model:
        tasks = [{"task": "mmlu", "student": mmlu}]
        metrics = {"distilled": {"kl": kl, "top1_agreement": top1}, "kv_bytes_ratio": ratio, "tasks": tasks}
        spec = {"swiftkv": {"key_value_group_size": group}, "optimizer": {"learning_rate": 0.1}}
        return described(metrics, teacher="t", data_fingerprint=fingerprint, spec=spec)

    found = compare(model(0.1, 0.9, 0.75, 60.0, "x", 2), model(0.2, 0.8, 0.5, 61.0, "y", 4))
    figures = {figure.name: figure for figure in found.figures}
    assert figures["distilled.kl"] == Figure("distilled.kl", 0.1, 0.2, "a")
    assert figures["distilled.top1_agreement"].better == "a"
    assert figures["kv_bytes_ratio"].better == "b"
    assert figures["tasks.mmlu.student"] == Figure("tasks.mmlu.student", 60.0, 61.0, "b")
    assert figures["distilled.perplexity"] == Figure("distilled.perplexity", None, None, None)
    less = {"task": "wikitext", "student": 9.0, "higher_is_better": False}
    perplexities = compare(described({"tasks": [less]}), described({"tasks": [less | {"student": 8.0}]})).figures
    assert perplexities[-1] == Figure("tasks.wikitext.student", 9.0, 8.0, "b")
    assert found.differences == {"data_fingerprint": ("x", "y")}
    assert found.spec_differences == {"swiftkv.key_value_group_size": (2, 4)}


PLACE = "s3://models/default/one"


@pytest.fixture
def opened(start: Start) -> Server:
    """A control plane whose operator opens places of each tenant."""
    return start(publish_targets=("s3://models/{tenant}/", "hf://acme"))


def test_a_model_is_published_by_a_job_that_makes_none(opened: Server) -> None:
    parent = opened.succeed()
    model = parent["distilled_model"]
    traced = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    response = opened.client.post(f"/models/{model}/publish", json={"to": f"{PLACE}/"}, headers=traced)
    assert response.status_code == 201, response.text
    job = response.json()
    assert response.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["name"], job["spec"]["publish"]) == ("publish-test", {"adapter": False, "to": PLACE, "private": True})
    assert opened.client.delete(f"/models/{model}").status_code == 409, "what is being copied is deleted"
    opened.tick()
    request = opened.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert (request.spec.only_publishes, request.traceparent) == (True, traced["traceparent"])
    assert request.parent is not None
    assert request.parent.key == AttemptId(parent["id"], 1).artifact_prefix
    opened.end(job["id"])
    done = opened.get(f"/jobs/{job['id']}")
    assert (done["status"], done["distilled_model"]) == ("succeeded", None)
    assert done["result"] == {"published": {"model": model, "to": PLACE}}
    assert [each["id"] for each in opened.get("/models")["data"]] == [model]


def test_a_publication_that_fails_is_no_success(opened: Server) -> None:
    model = opened.succeed()["distilled_model"]
    job = opened.client.post(f"/models/{model}/publish", json={"to": "hf://acme/one"}).json()["id"]
    opened.tick()
    opened.worker(job).say("error", "refused", code="conflict", retryable=False)
    opened.end(job, SubmissionStatus.FAILED)
    assert opened.get(f"/jobs/{job}")["status"] == "failed"


def test_places_that_the_operator_has_not_opened_are_closed(opened: Server, server: Server) -> None:
    model = opened.succeed()["distilled_model"]
    for place in ("s3://models/other/one", "s3://models/default-2/one", "hf://acme2/one", "/tmp/one"):
        publish = {"to": place}
        for path, body in (
            (f"/models/{model}/publish", publish),
            ("/jobs", {**SPEC, "publish": publish}),
            ("/jobs/validate", {**SPEC, "publish": publish}),
        ):
            error = refusal(opened.client.post(path, json=body))
            assert (error["field"], "s3://models/default" in error["message"]) == ("publish.to", True)
    for place in ("acme/one", "hf://one", "s3://bucket", "hf://acme/../one", "/models/../etc", "hf://a/b/c"):
        refused = opened.client.post("/jobs", json={**SPEC, "publish": {"to": place}})
        assert refusal(refused)["field"] == "publish.to", "it is no place"
    closed = refusal(server.client.post("/jobs", json={**SPEC, "publish": {"to": PLACE}}))
    assert "SWIFTKV_PUBLISH_TARGETS" in closed["message"]


def sweep(server: Server) -> dict[str, int]:
    """Objects that a round removes, by kind."""
    rows, objects = RetainedRows(server.parts.database), RetainedObjects(server.parts.objects)
    sweeper = Sweeper(rows, objects, retention(server.settings), server.parts.clock)
    removed: dict[str, int] = {}
    for swept in sweeper.round():
        removed[swept.kind] = removed.get(swept.kind, 0) + swept.objects
    return removed


def test_a_deleted_job_is_unknown_and_its_objects_go_with_the_sweeper(server: Server) -> None:
    job, kept = server.succeed(), server.succeed(name="kept")
    assert server.client.delete(f"/jobs/{job['id']}").status_code == 204
    for path in (f"/jobs/{job['id']}", f"/jobs/{job['id']}/events", f"/models/{job['distilled_model']}"):
        assert server.client.get(path).status_code == 404, path
    assert server.client.delete(f"/jobs/{job['id']}").status_code == 404
    assert list(server.parts.objects.list(f"jobs/{job['id']}"))
    assert sweep(server)["deleted"] > 0
    assert list(server.parts.objects.list(f"jobs/{job['id']}")) == []
    assert server.get(f"/models/{kept['distilled_model']}")["job_id"] == kept["id"]
    assert server.get(f"/jobs/{kept['id']}/artifacts")["data"]


def test_a_deleted_model_leaves_a_job_without_artifacts(server: Server) -> None:
    job = server.succeed()
    assert server.client.delete(f"/models/{job['distilled_model']}").status_code == 204
    left = server.get(f"/jobs/{job['id']}")
    assert (left["status"], left["distilled_model"], left["artifact_uri"]) == ("succeeded", None, None)
    sweep(server)
    assert server.get(f"/jobs/{job['id']}/artifacts")["data"] == []
    assert b"trained" in server.client.get(f"/jobs/{job['id']}/logs").content


def test_a_hold_is_a_conflict_that_names_its_holder(server: Server) -> None:
    job = server.succeed()
    model = job["distilled_model"]
    deployment = server.client.post("/deployments", json={"model": model, "route_prefix": "/"}).json()
    for path in (f"/models/{model}", f"/jobs/{job['id']}"):
        assert deployment["id"] in refusal(server.client.delete(path), 409)["message"]
    assert "cancel it" in refusal(server.client.delete(f"/jobs/{server.submit()['id']}"), 409)["message"]


def test_metrics_show_what_the_sweeper_counted(server: Server, start: Start) -> None:
    server.succeed()
    client, deadline = start().client, time.monotonic() + 30
    while 'swiftkv_database_rows{table="jobs"} 1.0' not in (text := client.get("/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert 'swiftkv_store_objects{kind="artifacts"} 2.0' in text
    assert 'swiftkv_store_bytes{kind="logs"}' in text
    assert "swiftkv_orphans_stopped_total 0.0" in text


REPORT = {"perplexity_ratio": 1.05, "tasks": [], "distilled": {"kl": 0.1}}


def student(directory: Path, *, spec: dict[str, Any] | None = None, **metrics: Any) -> Path:
    """A student as `swiftkv distill` leaves it, with a manifest; without a spec, as `swiftkv convert` does."""
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
    assert model["verdict"] == ("On the held-out text its perplexity is 1.05x the teacher's." if spec else None)
    assert server.get(f"/models/{model['id']}") == server.get("/models")["data"][0] == model
    prefix = f"models/{model['id']}"
    assert model["artifact_uri"] == f"{server.parts.objects.uri}/{prefix}"
    assert model["manifest_digest"] == manifest_digest(read_manifest(server.parts.objects, prefix))
    lineage = server.get(f"/models/{model['id']}/lineage")
    assert (lineage["job_id"], lineage["ancestors"]) == (None, [])
    other = server.succeed()["distilled_model"]
    server.get(f"/models/{model['id']}/compare/{other}")
    assert server.get("/quota")["stored_bytes"] == model["size"]
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
    assert (list(server.parts.objects.list(prefix)), server.get("/quota")["stored_bytes"]) == ([], 0)


class Interrupted(Registry):
    """A registry before whose row something happens."""

    before: Callable[[], None]

    def add_model(self, model: Model, **options: Any) -> None:
        self.before()
        super().add_model(model, **options)


def killed() -> None:
    raise KeyboardInterrupt


def interrupted(server: Server, before: Callable[[], None]) -> ModelImports:
    registry, access = (
        Interrupted(server.parts.database),
        partial(tenant_access, source_rules(server.settings), NO_LIMITS),
    )
    registry.before = before
    return ModelImports(registry, server.parts.objects, clock=server.parts.clock, access=access)


def imported(server: Server) -> int:
    return len([*server.parts.objects.list("models")])


def test_what_an_import_that_died_has_copied_goes_after_a_day_and_no_model_does(server: Server, tmp_path: Path) -> None:
    source, caller = student(tmp_path, spec=SPEC), Caller("default", "ann")
    kept = post(server, "/models/import", {"source": str(source)}, 201)
    files = imported(server)
    with pytest.raises(KeyboardInterrupt):
        interrupted(server, killed).add(str(source), None, caller)
    assert imported(server) == 2 * files
    server.wait(DAY_S - 60)
    assert (sweep(server), imported(server)) == ({}, 2 * files), "it may still be on its way"
    server.wait(120)
    sweep(server)
    assert imported(server) == files
    assert [model["id"] for model in server.get("/models")["data"]] == [kept["id"]]
    slow = interrupted(server, lambda: server.wait(DAY_S / 2 - 60)).add(str(source), None, caller)
    server.wait(DAY_S)
    sweep(server)
    assert imported(server) == 2 * files
    assert slow.id in {model["id"] for model in server.get("/models")["data"]}


@pytest.mark.parametrize("swept", [False, True])
def test_an_import_that_has_taken_too_long_is_refused(server: Server, tmp_path: Path, swept: bool) -> None:
    """As one of a process that was stopped for hours; its objects may be about to go, or gone."""

    def frozen() -> None:
        server.wait(DAY_S / 2 + 60 if not swept else DAY_S + 60)
        assert bool(sweep(server)) == swept

    with pytest.raises(StorageError, match="too long"):
        interrupted(server, frozen).add(str(student(tmp_path, spec=SPEC)), None, Caller("default", "ann"))
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
    assert "by which spec" in refused["message"]


WRONG: dict[str, Any] = {
    "changed weights": ({}, "model.safetensors", "other", "differs from its manifest.json"),
    "a teacher": ({}, "config.json", '{"model_type": "llama"}', "no SwiftKV student"),
    "a manifest of another form": ({}, "manifest.json", "{}", "cannot be read"),
    "code": ({}, "config.json", '{"model_type": "llama_swiftkv", "attn_implementation": "a/b"}', "names the code"),
    "an adapter": ({}, "swiftkv_adapter.json", "{}", "swiftkv export"),
    "gates of another form": ({"gates": 5}, None, "", "another form"),
    "tasks of another form": ({"tasks": [{"task": "needle_many"}]}, None, "", "another form"),
    "characters that no database takes": ({"note": "\0"}, None, "", "another form"),
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
    assert "leads to a place" in refusal(server.client.post("/models/import", json={"source": str(inside)}))["message"]
