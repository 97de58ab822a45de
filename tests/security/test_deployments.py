"""Routes of deployments: no tenant takes, shadows or discovers another's, and a proxied prompt never ends in a 5xx."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.repository import DeploymentState, DeploymentStatus
from tests.security.conftest import DeploymentPlane, deployment_plane
from tests.support.fakes.scripted_server import Answer, Script, json_answer, serve
from tests.support.threads import at_once
from tests.support.waiting import eventually
from tests.unit.control_plane.routes.conftest import refusal

pytestmark = pytest.mark.slow("starts an application for each test")


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
        assert plane.deploy("acme", route_prefix=prefix).status_code == 409, "both mean /t/acme, which is taken"


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
        assert changed.status_code == 200, "a template granted earlier stays"
    with deployment_plane(tmp_path, sqlite_database, keys=False) as plane:
        assert plane.deployed("default", **template)["chat_template"] == "{{ messages }}", "no grant without keys"


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


def test_metrics_of_replicas_are_read_with_the_callers_key(tmp_path: Path, sqlite_database: Database) -> None:
    script = Script()
    script.on("GET", "/t/acme/metrics", Answer(200, b'swiftkv:replica_info{replica="one"} 1\n'))
    with serve(script) as serve_url, deployment_plane(tmp_path, sqlite_database, serve_url=serve_url) as plane:
        deployment = plane.deployed("acme")["id"]
        state = DeploymentState(DeploymentStatus.RUNNING, "", 1)
        plane.parts.deployments.set_deployment_state(deployment, state)
        path = f"/deployments/{deployment}/metrics"
        assert plane.ask("acme", "GET", path).json()["replicas"] == [{"replica": "one", "values": {}}]
        assert plane.ask("other", "GET", path).status_code == 404
        assert [each.headers["authorization"] for each in script.requests] == [plane.headers("acme")["authorization"]]


TENANTS = """
tenants:
  acme: {max_gpus: 8, max_cpus: 16}
"""

GPU = {"device": "cuda", "tensor_parallel_size": 2}


@pytest.fixture
def granted(tmp_path: Path, sqlite_database: Database) -> Iterator[DeploymentPlane]:
    with deployment_plane(tmp_path, sqlite_database, tenants=TENANTS) as plane:
        yield plane


def quota(plane: DeploymentPlane) -> dict[str, Any]:
    answer: dict[str, Any] = plane.ask("acme", "GET", "/quota").json()
    return answer


def test_deployments_hold_what_they_may_grow_to(granted: DeploymentPlane) -> None:
    path = f"/deployments/{granted.deployed('acme', route_prefix='/a', max_replicas=3, engine=GPU)['id']}"
    held = quota(granted)
    assert (held["max_gpus"], held["gpus"], held["max_cpus"], held["cpus"]) == (8, 6, 16, 6)
    assert (held["max_replicas"], held["replicas"]) == (None, 3)
    assert held["held_by_deployments"] == {"gpus": 6, "cpus": 6}
    assert held["held_by_jobs"] == {"gpus": 0, "cpus": 0}

    for options, limit in (
        ({"engine": {**GPU, "tensor_parallel_size": 3}}, "max_gpus"),
        ({"max_replicas": 2, "engine": GPU}, "max_gpus"),
        ({"engine": {"num_threads": 11}}, "max_cpus"),
    ):
        refused = granted.deploy("acme", route_prefix="/b", **options)
        assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded"), refused.text
        assert (refused.json()["errors"][0]["field"], "Retry-After" in refused.headers) == (limit, True)
    model = granted.model("acme")
    for change, status in (
        ({"max_replicas": 5}, 403),
        ({"engine": {"num_threads": 3}}, 403),
        ({"max_replicas": 4}, 200),
        ({"model": model}, 200),
    ):
        assert granted.ask("acme", "PATCH", path, change).status_code == status, change
    assert granted.deploy("acme", route_prefix="/b", engine=GPU).status_code == 429
    assert granted.deploy("other", route_prefix="/b", max_replicas=9).status_code == 201
    granted.ask("acme", "DELETE", path)
    assert granted.deploy("acme", route_prefix="/b", engine=GPU).status_code == 429, "its replicas still run"
    granted.parts.deployments.remove_deployment(path.rpartition("/")[2])
    assert granted.deploy("acme", route_prefix="/b", engine=GPU).status_code == 201


def test_of_many_deployments_at_once_no_more_pass_than_the_quota_holds(granted: DeploymentPlane) -> None:
    deploy = partial(granted.deploy, "acme", granted.model("acme"), engine=GPU)
    answers = at_once(partial(deploy, route_prefix=f"/at{number}") for number in range(20))
    assert Counter(answer.status_code for answer in answers) == {201: 4, 429: 16}
    deployments = [item["id"] for item in granted.ask("acme", "GET", "/deployments").json()["data"]]
    granted.parts.deployments.remove_deployment(deployments.pop())
    patch = partial(granted.ask, "acme", "PATCH", body={"max_replicas": 2})
    changes = at_once(partial(patch, f"/deployments/{deployment}") for deployment in deployments)
    assert Counter(answer.status_code for answer in changes) == {200: 1, 429: 2}
    assert quota(granted)["gpus"] == 8


def test_a_tenants_replicas_are_counted_whatever_they_hold(tmp_path: Path, sqlite_database: Database) -> None:
    granted = "default: {max_replicas: 3}\n"
    with deployment_plane(tmp_path, sqlite_database, tenants=granted, max_deployment_replicas=2) as plane:
        assert plane.deploy("acme", route_prefix="/a", max_replicas=3).status_code == 422, "for a single deployment"
        plane.deployed("acme", route_prefix="/a", max_replicas=2)
        refused = plane.deploy("acme", route_prefix="/b", max_replicas=2)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (429, "max_replicas")
        assert plane.deploy("acme", route_prefix="/b").status_code == 201
        assert (quota(plane)["max_replicas"], quota(plane)["replicas"]) == (3, 3)
    with deployment_plane(tmp_path, sqlite_database, tenants="default: {max_replicas: 1}\n") as plane:
        refused = plane.deploy("other", max_replicas=2)
        assert (refused.status_code, refused.json()["code"]) == (403, "over_quota")
        [first, second] = plane.ask("acme", "GET", "/deployments").json()["data"]
        for deployment, change, status in (
            (first, {"upscale_delay_s": 1.0}, 200),
            (first, {"max_replicas": 2}, 403),
            (second, {"min_replicas": 1, "max_replicas": 1}, 200),
        ):
            answer = plane.ask("acme", "PATCH", f"/deployments/{deployment['id']}", change)
            assert answer.status_code == status, "under a lower quota it stays, and may shrink"


def test_a_job_waits_while_deployments_hold_its_gpus(tmp_path: Path, sqlite_database: Database) -> None:
    loops = {"reconcile_interval_s": 0.05, "max_running_jobs": 9}
    with deployment_plane(tmp_path, sqlite_database, tenants=TENANTS, **loops) as plane:
        deployment = plane.deployed("acme", max_replicas=3, engine=GPU)["id"]
        held_back, free = (submit(plane, tenant) for tenant in ("acme", "free"))
        wait_for_start(plane, "free", free)
        assert plane.ask("acme", "GET", f"/jobs/{held_back}").json()["status"] == "queued"
        plane.parts.deployments.remove_deployment(deployment)
        wait_for_start(plane, "acme", held_back)
        assert quota(plane)["held_by_jobs"]["gpus"] == 4
        refused = plane.deploy("acme", max_replicas=3, engine=GPU)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (429, "max_gpus")
        assert plane.deploy("acme", max_replicas=2, engine=GPU).status_code == 201


def submit(plane: DeploymentPlane, tenant: str) -> str:
    resources = {"num_workers": 4, "gpus_per_worker": 1}
    spec = {"name": "test", "model": {"name_or_path": "org/teacher"}, "resources": resources}
    return str(plane.ask(tenant, "POST", "/jobs", spec).json()["id"])


def wait_for_start(plane: DeploymentPlane, tenant: str, job: str) -> None:
    eventually(lambda: plane.ask(tenant, "GET", f"/jobs/{job}").json()["status"] != "queued", f"{job} starts")
