"""Concurrent changes of deployments and aliases: none is lost, and conflicting ones are refused."""

from collections import Counter
from functools import partial
from typing import Any

import httpx
import pytest

from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.deployments.repository import Deployment
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.security.conftest import DeploymentPlane
from tests.support.threads import at_once
from tests.unit.control_plane.routes.conftest import refusal

pytestmark = pytest.mark.slow("starts an application for each test")

FIELDS: list[dict[str, Any]] = [
    {"model": ""},
    {"max_replicas": 7},
    {"target_ongoing_requests": 3.5},
    {"upscale_delay_s": 11.5},
    {"candidate": {"share": 0.25}},
    {"engine": {"dtype": "float32"}},
    {"engine": {"swiftkv": False}},
    {"engine": {"max_num_seqs": 3}},
    {"engine": {"kv_cache_bytes": 4096}},
    {"engine": {"stream_interval_s": 0.0}},
    {"engine": {"seed": 5}},
]
"""Changes, each of another field; the test fills in the model."""


def patch(plane: DeploymentPlane, deployment: str, body: Any, if_match: str | None = None) -> httpx.Response:
    headers = {} if if_match is None else {"if-match": if_match}
    return plane.ask("acme", "PATCH", f"/deployments/{deployment}", body, headers)


def get(plane: DeploymentPlane, path: str) -> Any:
    response = plane.ask("acme", "GET", path)
    assert response.status_code == 200, response.text
    return response.json()


def test_changes_of_different_fields_all_take_effect(plane: DeploymentPlane) -> None:
    model, other = plane.model("acme"), plane.model("acme")
    candidate = {"model": other}
    made = [plane.deployed("acme", model, route_prefix=prefix, candidate=candidate)["id"] for prefix in ("/a", "/b")]
    changes = [{"model": other} if "model" in change else change for change in FIELDS]
    answers = at_once(partial(patch, plane, deployment, change) for change in changes for deployment in made)
    assert Counter(answer.status_code for answer in answers) == {200: 2 * len(FIELDS)}
    for deployment in made:
        found = get(plane, f"/deployments/{deployment}")
        for change in changes:
            for name, value in change.items():
                told = found[name] if not isinstance(value, dict) else {key: found[name][key] for key in value}
                assert told == value, name
        assert found["candidate"]["model"] == other, "a change of the share keeps the model"
        assert found["version"] == 1 + len(changes)


def test_a_change_may_name_the_version_that_it_is_made_of(plane: DeploymentPlane) -> None:
    deployment = plane.deployed("acme")["id"]
    seen = plane.ask("acme", "GET", f"/deployments/{deployment}")
    assert (seen.headers["etag"], seen.json()["version"]) == ('"1"', 1)
    answers = at_once(partial(patch, plane, deployment, {"max_replicas": n}, '"1"') for n in range(2, 22))
    assert Counter(answer.status_code for answer in answers) == {200: 1, 412: 19}
    [changed] = [answer for answer in answers if answer.status_code == 200]
    assert (changed.headers["etag"], changed.json()["version"]) == ('"2"', 2)
    for header, status in (('"2"', 200), ('"2"', 412), ('"2", "3"', 200), ("*", 200), ("yesterday", 422)):
        answer = patch(plane, deployment, {"upscale_delay_s": len(header) + status}, header)
        assert answer.status_code == status, (header, answer.text)
    assert patch(plane, "dep_x", {}, '"1"').status_code == 404


def test_a_null_takes_an_engine_option_back(plane: DeploymentPlane) -> None:
    deployment = plane.deployed("acme", engine={"max_num_seqs": 3, "block_size": 32})["id"]
    assert patch(plane, deployment, {"engine": {"block_size": None}}).json()["engine"] == {"max_num_seqs": 3}
    assert patch(plane, deployment, {"engine": {"seed": 1}}).json()["engine"] == {"max_num_seqs": 3, "seed": 1}
    assert patch(plane, deployment, {"engine": None}).json()["engine"] == {}
    refusal(patch(plane, deployment, {"candidate": {"share": 0.5}}))  # there is no candidate to change


def promote(plane: DeploymentPlane, model: str, if_match: str | None = None) -> httpx.Response:
    headers = {} if if_match is None else {"if-match": if_match}
    return plane.ask("acme", "POST", f"/models/{model}/promote", {"reason": "better"}, headers)


def test_promotions_at_once_are_refused_or_follow_each_other(plane: DeploymentPlane) -> None:
    models = [plane.model("acme") for _ in range(20)]
    assert promote(plane, models[0]).headers["etag"] == '"1"'
    deployment = plane.deployed("acme", "production")["id"]
    answers = at_once(partial(promote, plane, model) for model in models)
    assert {answer.status_code for answer in answers} <= {200, 409}
    alias = get(plane, "/aliases/production")
    history = [item["model"] for item in alias["history"]]
    assert [item["previous"] for item in alias["history"]] == [None, *history[:-1]]
    assert alias["version"] == len(history)
    assert get(plane, f"/deployments/{deployment}")["model"] == history[-1]
    etag = plane.ask("acme", "GET", "/aliases/production").headers["etag"]
    assert etag == f'"{len(history)}"'
    others = [model for model in models if model != history[-1]][:10]
    answers = at_once(partial(promote, plane, model, etag) for model in others)
    assert Counter(answer.status_code for answer in answers) == {200: 1, 412: 9}

    def roll_back(if_match: str) -> httpx.Response:
        headers = {"if-match": if_match}
        return plane.ask("acme", "POST", "/aliases/production/rollback", {"reason": "worse"}, headers)

    assert roll_back(etag).status_code == 412
    back = roll_back(f'"{len(history) + 1}"')
    assert (back.status_code, back.json()["model"]) == (200, history[-1])


def test_a_deployment_that_was_asked_for_before_a_promotion_follows_it(plane: DeploymentPlane) -> None:
    """Between looking an alias up and storing the deployment, another model may have been promoted."""
    before, after = plane.model("acme"), plane.model("acme")
    promote(plane, after)
    spec = ResolvedDeployment(
        id=new_id("dep"),
        model=before,
        artifact_uri="s3://bucket/before",
        route_prefix="/late",
        alias="production",
        tenant="acme",
    )
    stored = plane.parts.deployments.create_deployment(Deployment(spec, "acme", 1))
    assert (stored.spec.model, stored.spec.artifact_uri) == (after, "s3://bucket/artifact")
    assert get(plane, f"/deployments/{spec.id}")["model"] == after


def test_every_deployment_of_an_alias_has_what_was_promoted_last(plane: DeploymentPlane) -> None:
    models = [plane.model("acme") for _ in range(12)]
    promote(plane, models[0])
    pinned = [plane.deployed("acme", models[0], route_prefix=f"/pinned{number}")["id"] for number in range(6)]
    calls = [partial(promote, plane, model) for model in models]
    calls += [partial(plane.deploy, "acme", "production", route_prefix=f"/new{number}") for number in range(6)]
    calls += [partial(patch, plane, deployment, {"model": "production"}) for deployment in pinned]
    at_once(calls[number * 7 % len(calls)] for number in range(len(calls)))
    current = get(plane, "/aliases/production")["model"]
    followers = [item for item in get(plane, "/deployments?limit=100")["data"] if item["alias"] == "production"]
    assert followers
    assert {item["model"] for item in followers} == {current}
