"""Changes of deployments and aliases that are made at once: none is lost, and what contradicts another is refused."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import httpx

from swiftkv_platform.orchestration.deployment import Deployment
from swiftkv_platform.orchestration.job import new_id
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.security.deployment_planes import DeploymentPlane, at_once

FIELDS: list[dict[str, Any]] = [
    {"model": ""},
    {"max_replicas": 7},
    {"target_ongoing_requests": 3.5},
    {"upscale_delay_s": 11.5},
    {"downscale_delay_s": 222.0},
    {"candidate": {"share": 0.25}},
    {"shadow": {"share": 0.125}},
    {"engine": {"dtype": "float32"}},
    {"engine": {"swiftkv": False}},
    {"engine": {"device": "cpu"}},
    {"engine": {"max_model_len": 512}},
    {"engine": {"max_num_seqs": 3}},
    {"engine": {"max_num_batched_tokens": 77}},
    {"engine": {"kv_cache_bytes": 4096}},
    {"engine": {"kv_cache_dtype": "int8"}},
    {"engine": {"block_size": 32}},
    {"engine": {"enable_prefix_caching": False}},
    {"engine": {"fuse_weights": False}},
    {"engine": {"native_kernels": False}},
    {"engine": {"max_num_waiting": 9}},
    {"engine": {"max_waiting_prompt_tokens": 999}},
    {"engine": {"max_queue_s": 1.5}},
    {"engine": {"stream_interval_s": 0.0}},
    {"engine": {"seed": 5}},
    {"engine": {"num_threads": 2}},
]
"""Changes of as many different fields; the model's name is put in by the test."""


def patch(plane: DeploymentPlane, deployment: str, body: Any, if_match: str | None = None) -> httpx.Response:
    headers = {} if if_match is None else {"if-match": if_match}
    return plane.ask("acme", "PATCH", f"/deployments/{deployment}", body, headers)


def get(plane: DeploymentPlane, path: str) -> Any:
    response = plane.ask("acme", "GET", path)
    assert response.status_code == 200, response.text
    return response.json()


def test_no_change_is_lost_to_one_of_another_field(plane: DeploymentPlane) -> None:
    deployment = plane.deployed("acme")["id"]
    names = ("max_replicas", "target_ongoing_requests", "upscale_delay_s", "downscale_delay_s")
    for number in range(1, 11):
        answers = at_once([functools.partial(patch, plane, deployment, {name: number}) for name in names])
        assert Counter(answer.status_code for answer in answers) == {200: 4}
        found = get(plane, f"/deployments/{deployment}")
        assert {name: found[name] for name in names} == dict.fromkeys(names, number)


def test_fifty_changes_of_different_fields_all_take_effect(plane: DeploymentPlane) -> None:
    """25 fields of each of two deployments, since there are not fifty."""
    model, other = plane.model("acme"), plane.model("acme")
    beside = {"candidate": {"model": other}, "shadow": {"against": "teacher"}}
    made = [plane.deployed("acme", model, route_prefix=prefix, **beside)["id"] for prefix in ("/a", "/b")]
    changes = [{"model": other} if "model" in change else change for change in FIELDS]
    calls = [functools.partial(patch, plane, deployment, change) for change in changes for deployment in made]
    assert len(calls) == 50
    answers = at_once(calls)
    assert Counter(answer.status_code for answer in answers) == {200: 50}
    for deployment in made:
        found = get(plane, f"/deployments/{deployment}")
        for change in changes:
            for name, value in change.items():
                told = found[name] if not isinstance(value, dict) else {key: found[name][key] for key in value}
                assert told == value, name
        assert found["candidate"]["model"] == other, "a share replaces no model"
        assert found["version"] == 1 + len(changes)


def test_of_fifty_changes_of_one_field_those_that_hold_are_told_so(plane: DeploymentPlane) -> None:
    deployment = plane.deployed("acme")["id"]
    calls = [functools.partial(patch, plane, deployment, {"max_replicas": number}) for number in range(2, 52)]
    answers = dict(zip(range(2, 52), at_once(calls), strict=True))
    assert {answer.status_code for answer in answers.values()} <= {200, 409}
    held = {number: answer.json() for number, answer in answers.items() if answer.status_code == 200}
    assert all(found["max_replicas"] == number for number, found in held.items())
    assert sorted(found["version"] for found in held.values()) == list(range(2, len(held) + 2)), "one after another"
    for answer in answers.values():
        if answer.status_code == 409:
            assert (answer.json()["code"], answer.json()["errors"][0]["field"]) == ("stale_version", "max_replicas")
    last = max(held.values(), key=lambda found: found["version"])
    assert get(plane, f"/deployments/{deployment}")["max_replicas"] == last["max_replicas"]


def test_a_change_may_name_the_version_that_it_is_made_of(plane: DeploymentPlane) -> None:
    deployment = plane.deployed("acme")["id"]
    seen = plane.ask("acme", "GET", f"/deployments/{deployment}")
    assert (seen.headers["etag"], seen.json()["version"]) == ('"1"', 1)
    calls = [functools.partial(patch, plane, deployment, {"max_replicas": n}, '"1"') for n in range(2, 22)]
    answers = at_once(calls)
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
    for body in ({"candidate": {"share": 0.5}}, {"shadow": {"share": 0.5}}):
        refused = patch(plane, deployment, body)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input"), "there is none to change"


def promote(plane: DeploymentPlane, model: str, if_match: str | None = None) -> httpx.Response:
    headers = {} if if_match is None else {"if-match": if_match}
    return plane.ask("acme", "POST", f"/models/{model}/promote", {"reason": "better"}, headers)


def test_promotions_at_once_are_refused_or_follow_each_other(plane: DeploymentPlane) -> None:
    models = [plane.model("acme") for _ in range(20)]
    assert promote(plane, models[0]).headers["etag"] == '"1"'
    deployment = plane.deployed("acme", "production")["id"]
    answers = at_once([functools.partial(promote, plane, model) for model in models])
    assert {answer.status_code for answer in answers} <= {200, 409}
    alias = get(plane, "/aliases/production")
    history = [item["model"] for item in alias["history"]]
    assert [item["previous"] for item in alias["history"]] == [None, *history[:-1]]
    assert alias["version"] == len(history)
    assert get(plane, f"/deployments/{deployment}")["model"] == history[-1]
    etag = plane.ask("acme", "GET", "/aliases/production").headers["etag"]
    assert etag == f'"{len(history)}"'
    others = [model for model in models if model != history[-1]][:10]
    answers = at_once([functools.partial(promote, plane, model, etag) for model in others])
    assert Counter(answer.status_code for answer in answers) == {200: 1, 412: 9}
    headers = {"if-match": etag}
    back = plane.ask("acme", "POST", "/aliases/production/rollback", {"reason": "worse"}, headers)
    assert back.status_code == 412
    headers = {"if-match": f'"{len(history) + 1}"'}
    back = plane.ask("acme", "POST", "/aliases/production/rollback", {"reason": "worse"}, headers)
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
    stored = plane.parts.catalog.create_deployment(Deployment(spec, "acme", 1))
    assert (stored.spec.model, stored.spec.artifact_uri) == (after, "s3://bucket/artifact")
    assert get(plane, f"/deployments/{spec.id}")["model"] == after


def test_every_deployment_of_an_alias_has_what_was_promoted_last(plane: DeploymentPlane) -> None:
    models = [plane.model("acme") for _ in range(12)]
    promote(plane, models[0])
    pinned = [plane.deployed("acme", models[0], route_prefix=f"/pinned{number}")["id"] for number in range(6)]
    create = functools.partial(plane.deploy, "acme", "production")
    calls = [functools.partial(promote, plane, model) for model in models]
    calls += [functools.partial(create, route_prefix=f"/new{number}") for number in range(6)]
    calls += [functools.partial(patch, plane, deployment, {"model": "production"}) for deployment in pinned]
    at_once([calls[number * 7 % len(calls)] for number in range(len(calls))])
    current = get(plane, "/aliases/production")["model"]
    followers = [item for item in get(plane, "/deployments?limit=100")["data"] if item["alias"] == "production"]
    assert followers
    assert {item["model"] for item in followers} == {current}
