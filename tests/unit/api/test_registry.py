"""Aliases, rollbacks, lineage and comparisons."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.orchestration.comparison import Figure, compare
from swiftkv_platform.orchestration.deployment import DeploymentStatus
from swiftkv_platform.orchestration.job import Model
from tests.unit.api.conftest import Server, refusal


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
