"""Routes of deployments: no tenant takes, shadows or learns of another's, and a proxied prompt never ends in a 5xx."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from swiftkv_platform.database.session import Database
from tests.fakes.scripted_server import Script, json_answer, serve
from tests.security.conftest import DeploymentPlane, deployment_plane
from tests.threads import at_once
from tests.unit.api.conftest import refusal


def test_a_tenants_routes_live_below_its_own(plane: DeploymentPlane) -> None:
    for asked, given in (
        (None, "/t/acme"),
        ("/chat", "/t/acme/chat"),
        ("/t", "/t/acme/t"),
        ("/t/acme/two", "/t/acme/two"),
    ):
        deployed = plane.deployed("acme", **({} if asked is None else {"route_prefix": asked}))
        assert (deployed["route_prefix"], deployed["url"]) == (given, f"http://127.0.0.1:8001{given}")
    for prefix in ("/", "/t/acme"):
        assert plane.deploy("acme", route_prefix=prefix).status_code == 409, "that is /t/acme too"


def test_no_tenant_deploys_below_anothers(plane: DeploymentPlane) -> None:
    plane.deployed("acme", route_prefix="/chat")
    for prefix in ("/t/acme", "/t/acme/chat", "/t/acme/chat/generate", "/t/nobodys/chat"):
        assert refusal(plane.deploy("other", route_prefix=prefix), 403)["field"] == "route_prefix"
    for prefix in ("/t/other/../acme/chat", "/..", "/a/./b", "/" + 199 * "a"):
        assert refusal(plane.deploy("other", route_prefix=prefix))["field"] == "route_prefix"
    assert plane.deployed("other", route_prefix="/chat/generate")["route_prefix"] == "/t/other/chat/generate"


def test_what_lies_outside_is_the_operators_to_give(tmp_path: Path, sqlite_database: Database) -> None:
    tenants = "tenants:\n  acme: {route_prefixes: [/, /chat]}\n  rival: {route_prefixes: [/, /chat/generate]}\n"
    with deployment_plane(tmp_path, sqlite_database, tenants=tenants) as plane:
        assert plane.deployed("acme")["route_prefix"] == "/"
        assert plane.deployed("other")["route_prefix"] == "/t/other"
        assert plane.deployed("acme", route_prefix="/chat")["route_prefix"] == "/chat"
        assert plane.deployed("other", route_prefix="/chat")["route_prefix"] == "/t/other/chat"
        for prefix in ("/", "/chat/generate"):
            refused = plane.deploy("rival", route_prefix=prefix)
            assert refusal(refused, 409)["field"] == "route_prefix"
            assert not any(told in refused.text for told in ("dep_", "acme", '"/chat"', "'/chat'")), refused.text


def test_a_chat_template_is_the_operators_to_grant(tmp_path: Path, sqlite_database: Database) -> None:
    template = {"chat_template": "{{ messages }}"}
    tenants = "tenants:\n  acme: {chat_templates: true}\n"
    with deployment_plane(tmp_path, sqlite_database, tenants=tenants) as plane:
        granted = plane.deployed("acme", tool_call_parser="hermes", **template)
        assert (granted["chat_template"], granted["tool_call_parser"]) == ("{{ messages }}", "hermes")
        assert refusal(plane.deploy("other", **template), 403)["field"] == "chat_template"
        path = f"/deployments/{plane.deployed('other', tool_call_parser='llama3')['id']}"
        assert refusal(plane.ask("other", "PATCH", path, template), 403)["field"] == "chat_template"
        assert plane.ask("other", "PATCH", path, {"chat_template": None}).status_code == 200
        for wrong in ("", "x" * 65_537):
            assert plane.deploy("acme", chat_template=wrong).status_code == 422
    with deployment_plane(tmp_path, sqlite_database, tenants="default: {}\n") as plane:
        changed = plane.ask("acme", "PATCH", f"/deployments/{granted['id']}", {"max_replicas": 2})
        assert changed.status_code == 200, "what was granted before stays"
    with deployment_plane(tmp_path, sqlite_database, keys=False) as plane:
        assert plane.deployed("default", **template)["chat_template"] == "{{ messages }}", "without keys, no grant"


@pytest.mark.parametrize("keys", [True, False])
def test_no_deployment_takes_requests_of_another(tmp_path: Path, sqlite_database: Database, keys: bool) -> None:
    pairs = (("/a", "/a/generate"), ("/a", "/a/v1/chat"), ("/", "/v1"), ("/", "/metrics"), ("/", "/health/x"))
    with deployment_plane(tmp_path, sqlite_database, keys=keys) as plane:
        for pair in (*pairs, *(pair[::-1] for pair in pairs)):
            holder = plane.deployed("default", route_prefix=pair[0])
            refused = plane.deploy("default", route_prefix=pair[1])
            assert refusal(refused, 409)["field"] == "route_prefix"
            assert holder["id"] in refused.text, "its own deployment may be named"
            other = plane.deployed("default", route_prefix="/a/b")  # takes nothing of either
            for gone in (holder, other):
                plane.parts.catalog.remove_deployment(gone["id"])


def test_of_many_who_want_a_route_at_once_one_gets_it(plane: DeploymentPlane) -> None:
    model = plane.model("acme")
    for prefixes in (["/a"] * 20, ["/b", "/b/generate"] * 10):
        answers = at_once(partial(plane.deploy, "acme", model, route_prefix=prefix) for prefix in prefixes)
        assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 19}


def test_deployments_from_before_there_were_keys_keep_their_routes(tmp_path: Path, sqlite_database: Database) -> None:
    with deployment_plane(tmp_path, sqlite_database, keys=False) as plane:
        before = plane.deployed("default", route_prefix="/chat")
    with deployment_plane(tmp_path, sqlite_database) as plane:
        path = f"/deployments/{before['id']}"
        assert plane.ask("default", "GET", path).json()["route_prefix"] == before["route_prefix"] == "/chat"
        changed = plane.ask("default", "PATCH", path, {"max_replicas": 2}).json()
        assert (changed["route_prefix"], changed["max_replicas"]) == ("/chat", 2)


def test_a_proxied_prompt_that_no_replica_could_read_is_refused(tmp_path: Path, sqlite_database: Database) -> None:
    script = Script()
    script.on("POST", "/t/acme/generate", json_answer({"detail": "no prompt"}, 422))
    with serve(script) as serve_url, deployment_plane(tmp_path, sqlite_database, serve_url=serve_url) as plane:
        deployment = plane.deployed("acme")["id"]
        headers = {**plane.headers("acme"), "content-type": "application/json"}
        for body, field in (
            ('{"prompt": "x", "temperature": NaN}', "temperature"),
            ('{"prompt": "x", "temperature": 1e999}', "temperature"),
            ('{"prompt": "x", "stop": ["a", "\\udfff"]}', "stop[1]"),
            ('{"prompt": "x", "logit_bias": {"7": NaN}}', "logit_bias.7"),
            ('{"prompt": "x", "\\ud800": 1}', None),
            ('{"prompt": ' + 900 * "[" + 900 * "]" + "}", None),
            ('{"prompt": ' + 100_000 * "[" + 100_000 * "]" + "}", None),
            ('{"seed": ' + 5000 * "9" + "}", None),
            ("[1]", None),
        ):
            answer = plane.client.post(f"/deployments/{deployment}/generate", content=body, headers=headers)
            assert 400 <= answer.status_code < 500, answer.text
            if field is not None:
                assert [error["field"] for error in answer.json()["errors"]] == [field]
                assert script.requests == [], "nothing reaches a replica"


def test_an_engine_option_that_would_stop_everybodys_deployments_is_refused(plane: DeploymentPlane) -> None:
    """All tenants' deployments go to Serve in one document, which cannot hold it."""
    deployment, model = plane.deployed("acme")["id"], plane.model("acme")
    headers = {**plane.headers("acme"), "content-type": "application/json"}
    for number in ("Infinity", "1e999", "NaN", "9" * 30):
        engine = f'"engine": {{"grammar_timeout_s": {number}}}'
        for method, path, body in (
            ("POST", "/deployments", f'{{"model": "{model}", "route_prefix": "/b", {engine}}}'),
            ("PATCH", f"/deployments/{deployment}", f"{{{engine}}}"),
        ):
            refused = plane.client.request(method, path, content=body, headers=headers)
            assert refusal(refused)["field"] == "engine.grammar_timeout_s"
    assert [item.spec.engine for item in plane.parts.catalog.all_deployments()] == [{}]
