"""Routes of deployments: no tenant takes, shadows or learns of another's, and a proxied prompt never ends in a 5xx."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest

from swiftkv_platform.database.session import Database
from tests.fakes.scripted_server import Script, json_answer, serve
from tests.security.deployment_planes import DeploymentPlane, at_once, deployment_plane


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, "/t/acme"),
        ("/", "/t/acme"),
        ("/chat", "/t/acme/chat"),
        ("/t", "/t/acme/t"),
        ("/t/acme", "/t/acme"),
        ("/t/acme/chat", "/t/acme/chat"),
    ],
)
def test_a_tenants_routes_live_below_its_own(plane: DeploymentPlane, asked: str | None, given: str) -> None:
    deployed = plane.deployed("acme", **({} if asked is None else {"route_prefix": asked}))
    assert (deployed["route_prefix"], deployed["url"]) == (given, f"http://127.0.0.1:8001{given}")


def test_no_tenant_deploys_below_anothers(plane: DeploymentPlane) -> None:
    plane.deployed("acme", route_prefix="/chat")
    for prefix in ("/t/acme", "/t/acme/chat", "/t/acme/chat/generate", "/t/nobodys/chat"):
        refused = plane.deploy("other", route_prefix=prefix)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (403, "route_prefix"), prefix
    for prefix in ("/t/other/../acme/chat", "/..", "/a/./b"):
        refused = plane.deploy("other", route_prefix=prefix)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "route_prefix"), prefix
    assert plane.deployed("other", route_prefix="/chat/generate")["route_prefix"] == "/t/other/chat/generate"
    too_long = plane.deploy("other", route_prefix="/" + 199 * "a")
    assert (too_long.status_code, too_long.json()["errors"][0]["field"]) == (422, "route_prefix")


def test_what_lies_outside_is_the_operators_to_give(tmp_path: Path, database: Database) -> None:
    tenants = "tenants:\n  acme: {route_prefixes: [/, /chat]}\n  rival: {route_prefixes: [/, /chat/generate]}\n"
    with deployment_plane(tmp_path, database, tenants=tenants) as plane:
        assert plane.deployed("acme")["route_prefix"] == "/"
        assert plane.deployed("other")["route_prefix"] == "/t/other"
        assert plane.deployed("acme", route_prefix="/chat")["route_prefix"] == "/chat"
        assert plane.deployed("other", route_prefix="/chat")["route_prefix"] == "/t/other/chat"
        for prefix in ("/", "/chat/generate"):
            refused = plane.deploy("rival", route_prefix=prefix)
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "route_prefix")
            assert not any(told in refused.text for told in ("dep_", "acme", '"/chat"', "'/chat'")), refused.text


def test_a_chat_template_is_the_operators_to_grant(tmp_path: Path, database: Database) -> None:
    tenants = "tenants:\n  acme: {chat_templates: true}\n"
    with deployment_plane(tmp_path, database, tenants=tenants) as plane:
        granted = plane.deployed("acme", chat_template="{{ messages }}", tool_call_parser="hermes")
        assert (granted["chat_template"], granted["tool_call_parser"]) == ("{{ messages }}", "hermes")
        refused = plane.deploy("other", chat_template="{{ messages }}")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (403, "chat_template")
        plain = plane.deployed("other", tool_call_parser="llama3")
        path = f"/deployments/{plain['id']}"
        refused = plane.ask("other", "PATCH", path, {"chat_template": "{{ messages }}"})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (403, "chat_template")
        assert plane.ask("other", "PATCH", path, {"chat_template": None}).status_code == 200
        for wrong in ("", "x" * 65_537):
            assert plane.deploy("acme", chat_template=wrong).status_code == 422
    with deployment_plane(tmp_path, database, tenants="default: {}\n") as plane:
        changed = plane.ask("acme", "PATCH", f"/deployments/{granted['id']}", {"max_replicas": 2})
        assert changed.status_code == 200, "what was granted before stays"


def test_without_keys_a_chat_template_needs_no_grant(tmp_path: Path, sqlite_database: Database) -> None:
    with deployment_plane(tmp_path, sqlite_database, keys=False) as plane:
        assert plane.deployed("default", chat_template="{{ messages }}")["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "pair", [("/a", "/a/generate"), ("/a", "/a/v1/chat"), ("/", "/v1"), ("/", "/metrics"), ("/", "/health/x")]
)
def test_no_deployment_takes_requests_of_another(
    tmp_path: Path, sqlite_database: Database, pair: tuple[str, str], first: int, keys: bool
) -> None:
    with deployment_plane(tmp_path, sqlite_database, keys=keys) as plane:
        holder = plane.deployed("default", route_prefix=pair[first])
        refused = plane.deploy("default", route_prefix=pair[1 - first])
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (409, "route_prefix")
        assert holder["id"] in refused.text, "its own deployment may be named"
        assert plane.deploy("default", route_prefix="/a/b").status_code == 201, "that takes nothing of either"


def test_of_many_who_want_a_route_at_once_one_gets_it(plane: DeploymentPlane) -> None:
    model = plane.model("acme")
    for prefixes in (["/a"] * 20, ["/b", "/b/generate"] * 10):
        answers = at_once([functools.partial(plane.deploy, "acme", model, route_prefix=prefix) for prefix in prefixes])
        assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 19}


def test_deployments_from_before_there_were_keys_keep_their_routes(tmp_path: Path, database: Database) -> None:
    with deployment_plane(tmp_path, database, keys=False) as plane:
        before = plane.deployed("default", route_prefix="/chat")
        assert before["route_prefix"] == "/chat"
    with deployment_plane(tmp_path, database) as plane:
        path = f"/deployments/{before['id']}"
        assert plane.ask("default", "GET", path).json()["route_prefix"] == "/chat"
        changed = plane.ask("default", "PATCH", path, {"max_replicas": 2}).json()
        assert (changed["route_prefix"], changed["max_replicas"]) == ("/chat", 2)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"prompt": "x", "temperature": NaN}', "temperature"),
        ('{"prompt": "x", "top_p": -Infinity}', "top_p"),
        ('{"prompt": "x", "temperature": 1e999}', "temperature"),
        ('{"prompt": "a\\ud800b"}', "prompt"),
        ('{"prompt": "x", "stop": ["a", "\\udfff"]}', "stop[1]"),
        ('{"prompt": "x", "\\ud800": 1}', None),
        ('{"prompt": "x", "logit_bias": {"7": NaN}}', "logit_bias.7"),
        ('{"prompt": ' + 900 * "[" + 900 * "]" + "}", None),
        ('{"prompt": ' + 100_000 * "[" + 100_000 * "]" + "}", None),
        ('{"seed": ' + 5000 * "9" + "}", None),
        ("[1]", None),
    ],
)
def test_a_proxied_prompt_that_no_replica_could_read_is_refused(
    tmp_path: Path, sqlite_database: Database, body: str, field: str | None
) -> None:
    script = Script()
    script.on("POST", "/t/acme/generate", json_answer({"detail": "no prompt"}, 422))
    with serve(script) as serve_url, deployment_plane(tmp_path, sqlite_database, serve_url=serve_url) as plane:
        deployment = plane.deployed("acme")["id"]
        headers = {**plane.headers("acme"), "content-type": "application/json"}
        answer = plane.client.post(f"/deployments/{deployment}/generate", content=body, headers=headers)
        assert 400 <= answer.status_code < 500, answer.text
        if field is not None:
            assert [error["field"] for error in answer.json()["errors"]] == [field]
            assert script.requests == [], "nothing reaches a replica"


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN", "-Infinity", "9" * 30])
def test_an_engine_option_that_would_stop_everybodys_deployments_is_refused(
    tmp_path: Path, sqlite_database: Database, number: str
) -> None:
    """All tenants' deployments go to Serve in one document, which cannot hold it."""
    with deployment_plane(tmp_path, sqlite_database) as plane:
        deployment, model = plane.deployed("acme")["id"], plane.model("acme")
        headers = {**plane.headers("acme"), "content-type": "application/json"}
        engine = f'"engine": {{"grammar_timeout_s": {number}}}'
        for method, path, body in (
            ("POST", "/deployments", f'{{"model": "{model}", "route_prefix": "/b", {engine}}}'),
            ("PATCH", f"/deployments/{deployment}", f"{{{engine}}}"),
        ):
            refused = plane.client.request(method, path, content=body, headers=headers)
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "engine.grammar_timeout_s")
        assert [item.spec.engine for item in plane.parts.catalog.all_deployments()] == [{}]
