"""Models: aliases, rollbacks, lineage, comparisons, copies where the operator allows them, and deletions."""

import time
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.deployments.repository import DeploymentStatus
from swiftkv_platform.control_plane.models.repository import Model
from swiftkv_platform.control_plane.models.responses import make_comparison
from swiftkv_platform.control_plane.retention import RetentionRepository, RetentionStore, RetentionSweeper
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal

pytestmark = pytest.mark.slow("starts an application for each test")


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
    assert promote(server, first) == promoted, "a repeated promotion changes nothing"
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
    assert "points lost on ifeval is 0.4 (limit evaluation.max_drop: 1)" in refused["message"]
    assert server.client.get("/aliases/production").status_code == 404
    assert server.client.post("/deployments", json={"model": model}).status_code == 201, "deploying it is allowed"
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
    assert (pinned["model"], pinned["alias"]) == (models[2], None), "a model named by its id follows no alias"
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
        {
            "id": deployment["id"],
            "route_prefix": "/",
            "alias": "production",
            "status": "pending",
            "unknown_since": None,
        }
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
    assert post(server, "/deployments", {"model": job["id"]}, 201)["model"] == model, "a job names its model"
    for body in ({"alias": "production"}, {"reason": ""}, {"reason": "x", "alias": "mdl_x"}):
        post(server, f"/models/{model}/promote", body, 422)
    for path in ("/aliases/nothing/rollback", "/models/mdl_x/promote"):
        post(server, path, {"reason": "x"}, 404)
    assert server.client.get("/aliases/nothing").status_code == 404


def test_a_name_is_a_models_while_one_alone_has_it(server: Server, models: list[str]) -> None:
    first, _, third = models
    for name, body in (("second", {}), ("third", {"candidate": {"model": "first"}})):
        made = post(server, "/deployments", {"model": name, "route_prefix": f"/{name}", **body}, 201)
        assert made["model"] == models[("first", "second", "third").index(name)]
        assert made["alias"] is None, "a later model of that name is not swapped in"
    assert made["candidate"]["model"] == first
    assert promote(server, "third", alias="second")["model"] == third
    post(server, "/models/second/promote", {"alias": "canary", "reason": "what `second` stands for"})
    assert server.get("/aliases/canary")["model"] == server.get("/models/second")["id"] == third, "an alias goes first"
    assert server.get("/models/first/compare/third")["b"] == server.get("/models/third/lineage")["model"] == third
    assert server.client.delete("/models/first").status_code == 404, "deletion takes only an id"
    again = server.succeed(name="first")["distilled_model"]
    for path, body in (("/deployments", {"model": "first"}), ("/models/first/promote", {"alias": "a", "reason": "b"})):
        refused = refusal(server.client.post(path, json=body))
        assert (refused["field"], refused["message"].endswith(f"(newest first): {again}, {first}")) == ("model", True)
    assert "use the id of one" in refusal(server.client.get("/models/first"))["message"]


def described(metrics: dict[str, Any], **lineage: Any) -> Model:
    return Model("mdl_x", "acme", "m", "job_x", 1, 100, "s3://b/a", "d", 1, lineage, metrics)


def test_figures_say_which_is_better_and_lineage_whether_that_counts() -> None:
    def model(kl: float, top1: float, ratio: float, mmlu: float, fingerprint: str, group: int) -> Model:
        tasks = [{"task": "mmlu", "student": mmlu}]
        metrics = {"distilled": {"kl": kl, "top1_agreement": top1}, "kv_bytes_ratio": ratio, "tasks": tasks}
        spec = {"swiftkv": {"key_value_group_size": group}, "optimizer": {"learning_rate": 0.1}}
        return described(metrics, teacher="t", data_fingerprint=fingerprint, spec=spec)

    found = make_comparison(model(0.1, 0.9, 0.75, 60.0, "x", 2), model(0.2, 0.8, 0.5, 61.0, "y", 4))
    figures = {figure.name: (figure.a, figure.b, figure.better) for figure in found.figures}
    assert figures["distilled.kl"] == (0.1, 0.2, "a")
    assert figures["distilled.top1_agreement"][2] == "a"
    assert figures["kv_bytes_ratio"][2] == "b"
    assert figures["tasks.mmlu.student"] == (60.0, 61.0, "b")
    assert figures["distilled.perplexity"] == (None, None, None)
    less = {"task": "wikitext", "student": 9.0, "higher_is_better": False}
    perplexity = make_comparison(described({"tasks": [less]}), described({"tasks": [less | {"student": 8.0}]})).figures[
        -1
    ]
    assert dict(perplexity) == {"name": "tasks.wikitext.student", "a": 9.0, "b": 8.0, "better": "b"}
    assert [dict(each) for each in found.differences] == [{"name": "data_fingerprint", "a": "x", "b": "y"}]
    groups = {"name": "swiftkv.key_value_group_size", "a": 2, "b": 4}
    assert [dict(each) for each in found.spec_differences] == [groups]


PLACE = "s3://models/default/one"


@pytest.fixture
def opened(start: Start) -> Server:
    """A control plane whose operator has opened places for publishing to each tenant."""
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
    assert opened.client.delete(f"/models/{model}").status_code == 409, "a model that is being copied was deleted"
    opened.tick()
    request = opened.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert (request.spec.is_publish_only, request.traceparent) == (True, traced["traceparent"])
    assert request.parent is not None
    assert request.parent.key == AttemptId(parent["id"], 1).artifact_prefix
    opened.end(job["id"])
    done = opened.get(f"/jobs/{job['id']}")
    assert (done["status"], done["distilled_model"]) == ("succeeded", None)
    assert done["result"] == {"published": {"model": model, "to": PLACE}}
    assert [each["id"] for each in opened.get("/models")["data"]] == [model]


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
        assert refusal(refused)["field"] == "publish.to", "not an address of a place"
    closed = refusal(server.client.post("/jobs", json={**SPEC, "publish": {"to": PLACE}}))
    assert "SWIFTKV_PUBLISH_TARGETS" in closed["message"]


def sweep(server: Server) -> dict[str, int]:
    """Run a round of the sweeper; return the number of objects removed, by kind."""
    rows, objects = RetentionRepository(server.parts.database), RetentionStore(server.parts.objects)
    sweeper = RetentionSweeper(rows, objects, server.settings, server.parts.clock)
    removed: dict[str, int] = {}
    for swept in sweeper.run_round():
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


def test_metrics_show_what_the_sweeper_counted(server: Server, start: Start) -> None:
    server.succeed()
    client, deadline = start().client, time.monotonic() + 30
    while 'swiftkv_database_rows{table="jobs"} 1.0' not in (text := client.get("/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert 'swiftkv_store_objects{kind="artifacts"} 2.0' in text
    assert 'swiftkv_store_bytes{kind="logs"}' in text
    assert "swiftkv_orphans_stopped_total 0.0" in text
