"""API keys: no access without one, nothing beyond its scopes, nothing of another tenant's; over every route."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.support.fakes.scripted_server import Script, json_answer, serve
from tests.unit.control_plane.routes.conftest import SPEC, URL, Server, Start, StillClock, refusal

pytestmark = pytest.mark.slow("starts an application for each test")

OPEN = {"/healthz", "/readyz", "/readyz/{check}", "/metrics"}
"""Routes without a key, which tell nothing of any tenant."""

As = Callable[..., TestClient]


@pytest.fixture
def as_(start: Start, tmp_path: Path) -> As:
    """Return a function that makes a client with a new key of a tenant, on the same state but with keys."""
    path = tmp_path / "keys.json"
    create_key(path, name="operator", tenant="operators", scopes=frozenset({Scope.ADMIN}))
    client = start("http://swiftkv.example", max_request_bytes=4096, api_keys_file=path).client

    def connect(tenant: str | None, *scopes: Scope) -> TestClient:
        client.headers.pop("authorization", None)
        if tenant is not None:
            name = f"key{len(path.read_text())}"
            token = create_key(path, name=name, tenant=tenant, scopes=frozenset(scopes or {Scope.ADMIN}))
            client.headers["authorization"] = f"Bearer {token}"
        return client

    return connect


FACES = ("/jobs", "/v1/fine_tuning/jobs")
BODIES: dict[tuple[str, str], dict[str, Any] | None] = {
    ("POST", "/jobs"): SPEC,
    ("POST", "/jobs/validate"): SPEC,
    **dict.fromkeys(("POST", f"{jobs}/{{job_id}}/{verb}") for jobs in FACES for verb in ("cancel", "pause", "resume")),
    ("DELETE", "/jobs/{job_id}"): None,
    ("DELETE", "/models/{model_id}"): None,
    ("POST", "/v1/files"): {},
    ("DELETE", "/v1/files/{file_id}"): None,
    ("POST", "/v1/fine_tuning/jobs"): {"model": "org/teacher", "training_file": "org/data"},
    ("POST", "/models"): {"from_checkpoint": "{job_id}:2"},
    ("POST", "/models/import"): {"source": "/nowhere"},
    ("POST", "/models/{model_id}/publish"): {"to": "s3://stolen/model"},
    ("POST", "/models/{model_id}/promote"): {"alias": "stolen", "reason": "mine now"},
    ("POST", "/aliases/{alias}/rollback"): {"reason": "mine now"},
    ("POST", "/deployments"): {"model": "{model_id}", "route_prefix": "/stolen"},
    ("PATCH", "/deployments/{deployment_id}"): {"max_replicas": 2},
    ("DELETE", "/deployments/{deployment_id}"): None,
    ("POST", "/deployments/{deployment_id}/rollouts/{job_id}/rollback"): {"reason": "mine now"},
    ("DELETE", "/deployments/{deployment_id}/traffic"): None,
    ("POST", "/deployments/{deployment_id}/generate"): {"prompt": "x"},
    ("POST", "/deployments/{deployment_id}/chat/completions"): {"messages": [{"role": "user", "content": "x"}]},
}
"""Bodies for each route that changes or asks something; a route that is missing here fails the tests."""

UPLOAD: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": b'{"text": "x"}\n'}}

NOBODYS = {
    "job_id": "job_x",
    "model_id": "mdl_x",
    "other_id": "mdl_x",
    "task": "own",
    "deployment_id": "dep_x",
    "path": "x",
    "tracking_path": "x",
    "alias": "nobodys",
    "file_id": "file-x",
}


def routes(client: TestClient) -> list[tuple[str, str]]:
    paths: dict[str, dict[str, Any]] = client.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods if path not in OPEN]


def call(client: TestClient, method: str, path: str, ids: dict[str, str]) -> httpx.Response:
    body = BODIES[method, path] if method != "GET" else None
    if (method, path) == ("POST", "/v1/files"):
        return client.request(method, path, **UPLOAD)
    if body is not None:
        body = {name: value.format(**ids) if isinstance(value, str) else value for name, value in body.items()}
    return client.request(method, path.format(**ids), json=body)


def code_of(refused: httpx.Response) -> str:
    """The code of an error, also of one in OpenAI's form."""
    answer: dict[str, Any] = refused.json()
    return str(answer.get("error", answer)["code"])


def test_every_route_that_changes_something_is_covered(as_: As) -> None:
    assert {route for route in routes(as_(None)) if route[0] != "GET"} == set(BODIES)


def test_without_a_key_nothing_is_answered(as_: As) -> None:
    client = as_(None)
    for method, path in routes(client):
        refused = call(client, method, path, NOBODYS)
        assert (refused.status_code, code_of(refused)) == (401, "unauthenticated"), (method, path)
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert client.get("/healthz").status_code == 200


def test_a_key_opens_no_more_than_its_scopes(as_: As) -> None:
    client = as_("acme", Scope.JOBS_READ)
    assert client.get("/jobs").status_code == 200
    for method, path in routes(client):
        if method != "GET":
            refused = call(client, method, path, NOBODYS)
            assert (refused.status_code, code_of(refused)) == (403, "forbidden"), (method, path)
    assert as_("acme", Scope.JOBS_WRITE).post("/jobs", json=SPEC).status_code == 201
    assert as_("acme", Scope.JOBS_WRITE).get("/jobs").status_code == 403


def test_a_rollout_needs_a_deployment_of_the_tenant_and_a_key_that_may_deploy(as_: As, server: Server) -> None:
    model = made_model(as_, server, "acme")
    deployment = as_("acme").post("/deployments", json={"model": model, "route_prefix": "/chat"}).json()["id"]
    rolled = {**SPEC, "rollout": {"deployment": deployment}}
    assert as_("acme", Scope.JOBS_WRITE).post("/jobs", json=rolled).status_code == 403
    assert as_("acme", Scope.JOBS_WRITE, Scope.DEPLOY).post("/jobs", json=rolled).status_code == 201
    for path in ("/jobs", "/jobs/validate"):
        assert refusal(as_("other").post(path, json=rolled))["field"] == "rollout.deployment"
    continued = {**SPEC, "training": {"from": deployment, "max_steps": 1}}
    assert refusal(as_("other").post("/jobs", json=continued))["field"] == "training.from"
    made = as_("acme").post("/jobs", json=continued)
    assert made.json()["spec"]["training"]["from"] == model, "the model that is served at submission"


@pytest.mark.parametrize("by_cookie", [False, True])
def test_a_deployment_is_asked_with_the_callers_own_key(
    server: Server, start: Start, tmp_path: Path, by_cookie: bool
) -> None:
    """Replicas that have the key file would refuse a request by the control plane itself."""
    path, script = tmp_path / "keys.json", Script()
    token = create_key(path, name="ann", tenant="default", scopes=frozenset({Scope.ADMIN}))
    script.on("POST", "/generate", json_answer({"choices": []}))
    deployment = server.client.post("/deployments", json={"model": server.succeed()["distilled_model"]}).json()["id"]
    with serve(script) as url:
        client = start("http://swiftkv.example", api_keys_file=path, serve_url=url).client
        if by_cookie:
            assert client.post("/session", json={"api_key": token}).status_code == 204
        else:
            client.headers["authorization"] = f"Bearer {token}"
        assert client.post(f"/deployments/{deployment}/generate", json={"prompt": "x"}).json() == {"choices": []}
    [asked] = script.sent("POST", "/generate")
    assert (asked.headers["authorization"], asked.body) == (f"Bearer {token}", {"prompt": "x"})


def test_a_tenant_reaches_nothing_of_anothers(as_: As, server: Server) -> None:
    file = as_("acme").post("/v1/files", **UPLOAD).json()["id"]
    naming = {"data": {"sources": [{"name_or_path": file}]}}
    job = as_("acme").post("/jobs", json={**SPEC, **naming}).json()
    assert (job["tenant"], job["created_by"][:3]) == ("acme", "key")
    server.run(job["id"]).artifact(tasks=[{"task": "own", "metric": "contains", "row_results": "000-own"}])
    server.parts.objects.put_bytes(AttemptId(job["id"], 1).row_results_key("000-own"), b"")
    tracked = "attempts/1/tracking/offline-run-20261123_000000-a/run-a.wandb"
    server.parts.objects.put_bytes(f"jobs/{job['id']}/{tracked}", b"recorded")
    server.end(job["id"])
    model = as_("acme").get(f"/jobs/{job['id']}").json()["distilled_model"]
    promoted = as_("acme").post(f"/models/{model}/promote", json={"alias": "production", "reason": "good"})
    deployment = as_("acme").post("/deployments", json={"model": "production", "route_prefix": "/taken"}).json()
    ids = {
        "job_id": job["id"],
        "model_id": model,
        "other_id": model,
        "task": "own",
        "deployment_id": deployment["id"],
        "path": "data.bin",
        "tracking_path": tracked,
        "alias": "production",
        "file_id": file,
    }
    theirs = {file, job["id"], model, deployment["id"], promoted.json()["id"], "production", "acme"}
    own = as_("acme")
    assert {call(own, "GET", path, ids).status_code for method, path in routes(own) if method == "GET"} == {200}
    before = whole(own, ids)

    stranger = as_("other")
    for method, path in routes(stranger):
        answer = call(stranger, method, path, ids)
        where = (method, path, answer.text)
        if "{" in path:
            assert answer.status_code == 404, where
        elif method == "GET":
            assert answer.status_code == 200, where
            if path == "/audit":  # holds what the stranger itself has asked for
                assert {entry["tenant"] for entry in answer.json()["data"]} <= {"other"}, where
                continue
            assert not any(found in answer.text for found in theirs), where
        elif path in ("/deployments", "/models/import") or (method, path) == ("POST", "/models"):
            assert answer.status_code == 422, where
        else:
            assert answer.status_code in (200, 201), where  # its own job
    for path in ("/jobs", "/jobs/validate"):
        assert refusal(stranger.post(path, json={**SPEC, **naming}))["field"] == "data.sources[0].name_or_path"
    refused = stranger.post("/v1/fine_tuning/jobs", json={"model": "org/teacher", "training_file": file})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "training_file")
    for model_name in (job["id"], "production"):
        refused = stranger.post("/deployments", json={"model": model_name, "route_prefix": "/stolen"})
        assert refused.status_code == 422, refused.text
    lists = {"/jobs": job["id"], "/models": model, "/deployments": deployment["id"]}
    for path, foreign in {**lists, "/v1/files": file, "/v1/fine_tuning/jobs": job["id"]}.items():
        assert stranger.get(path, params={"after": foreign}).status_code in (400, 422), "a foreign id is no cursor"
    assert whole(as_("acme"), ids) == before


def test_refusals_tell_nothing_of_another_tenants(as_: As, server: Server) -> None:
    """However a request touches another tenant's objects, its answer repeats only what the request itself names."""
    before_keys = server.client.post(
        "/deployments", json={"model": server.succeed()["distilled_model"], "route_prefix": "/legacy"}
    ).json()
    theirs = {before_keys["id"], before_keys["model"], "/legacy"}
    own = made_model(as_, server, "other")
    model = made_model(as_, server, "acme")
    as_("acme").post(f"/models/{model}/promote", json={"alias": "production", "reason": "secret"})
    for prefix in ("/chat", "/a/generate"):
        made = as_("acme").post("/deployments", json={"model": "production", "route_prefix": prefix}).json()
        theirs |= {made["id"], made["model"], made["route_prefix"], "acme", "secret", "production"}
    stranger = as_("other")
    deployment = stranger.post("/deployments", json={"model": own, "route_prefix": "/mine"}).json()["id"]
    bodies: list[dict[str, Any]] = [
        {"model": name, "route_prefix": prefix, **options}
        for name in (own, model, "production")
        for prefix in ("/chat", "/a", "/legacy", "/legacy/v1", "/t/acme/chat", "/t/acme", "/t/acme/../x", "/mine")
        for options in ({}, {"candidate": {"model": model}}, {"engine": {"x": 1}}, {"max_replicas": 10**6})
    ]
    asked = [("POST", "/deployments", body, {}) for body in bodies]
    for body in ({"model": model}, {"model": "production"}, {"candidate": {"model": model}}, {"route_prefix": "/chat"}):
        asked += [("PATCH", f"/deployments/{deployment}", body, tag) for tag in ({}, {"if-match": '"9"'})]
    asked += [("POST", f"/models/{own}/promote", {"reason": "x", "alias": "production"}, {"if-match": '"1"'})]
    asked += [("POST", "/aliases/production/rollback", {"reason": "x"}, {})]
    statuses = set()
    for method, path, body, headers in asked:
        answer = stranger.request(method, path, json=body, headers=headers)
        sent = path + json.dumps(body)
        told = {each for each in theirs if each in answer.text and each not in sent}
        assert not told, (method, path, body, answer.text)
        assert answer.status_code < 500
        statuses.add(answer.status_code)
    assert statuses == {201, 403, 404, 409, 412, 422}


def made_model(as_: As, server: Server, tenant: str) -> str:
    """Let the tenant distil a model; return its id."""
    job = as_(tenant).post("/jobs", json=SPEC).json()["id"]
    server.run(job).artifact()
    server.end(job)
    return str(as_(tenant).get(f"/jobs/{job}").json()["distilled_model"])


def whole(client: TestClient, ids: dict[str, str]) -> dict[str, Any]:
    """Answers of all routes that a tenant can read, except what other tenants' jobs or time may change, and those whose
    reading is recorded in the audit trail."""
    passing = {"/quota", "/deployments/{deployment_id}/metrics", "/deployments/{deployment_id}/traffic/rows"}
    return {
        path: call(client, "GET", path, ids).text
        for method, path in routes(client)
        if method == "GET" and path not in passing
    }


def test_with_keys_local_files_are_closed_until_the_operator_opens_them(as_: As, tmp_path: Path) -> None:
    source = {"data": {"sources": [{"name_or_path": str(tmp_path)}]}}
    for path in ("/jobs", "/jobs/validate"):
        error = refusal(as_("acme").post(path, json={**SPEC, **source}))
        assert error["field"] == "data.sources[0].name_or_path"


def test_a_key_that_asks_too_often_is_told_to_wait(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    tokens = [create_key(path, name=n, tenant="acme", scopes=frozenset({Scope.ADMIN})) for n in ("hasty", "calm")]
    clock = StillClock()
    client = start("http://swiftkv.example", {"clock": clock}, api_keys_file=path, requests_per_minute=30).client
    hasty, calm = ({"authorization": f"Bearer {token}"} for token in tokens)
    statuses = [client.get("/jobs", headers=hasty).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]
    refused = client.get("/jobs", headers=hasty)
    assert (refused.json()["code"], refused.headers["Retry-After"]) == ("rate_limited", "2"), "30 a minute"
    assert client.get("/jobs", headers=calm).status_code == 200
    clock.now += 1.0
    assert client.get("/jobs", headers=hasty).headers["Retry-After"] == "1"
    clock.now += 1.0
    assert [client.get("/jobs", headers=hasty).status_code for _ in range(2)] == [200, 429]


def test_every_answer_tells_browsers_what_they_may_do(server: Server) -> None:
    app = server.client.app
    assert isinstance(app, FastAPI)

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("a bug")

    client = TestClient(app, base_url=URL, raise_server_exceptions=False)
    pages = ("/", "/docs", "/docs/assets/start.js")
    for path in (*pages, "/jobs", "/jobs/x", "/nowhere", "/healthz", "/openapi.json", "/broken"):
        headers = client.get(path).headers
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer"), path
        assert headers["X-Frame-Options"] == "DENY", path
        form_action = "form-action 'self'" if path in pages else "form-action 'none'"
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"base-uri 'none'", form_action, "frame-ancestors 'none'"} <= {*policy}, path
    assert client.get("/broken").status_code == 500
    rebound = client.get("/jobs", headers={"host": "rebound.example"})
    assert (rebound.status_code, rebound.headers["X-Frame-Options"]) == (403, "DENY")
    assert server.client.get("/jobs").headers["Cache-Control"] == "no-store"


def test_without_keys_only_loopback_is_listened_on(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(InvalidInputError, match="SWIFTKV_API_KEYS_FILE") as caught:
            create_app(Settings(home=tmp_path, host=host, _env_file=None))
        assert (caught.value.field, caught.value.value) == ("host", host)
    path = tmp_path / "keys.json"
    with pytest.raises(InvalidInputError, match=r"keys\.json"):
        create_app(Settings(home=tmp_path, host="0.0.0.0", api_keys_file=path, _env_file=None))
    create_key(path, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    create_app(Settings(home=tmp_path, host="0.0.0.0", api_keys_file=path, _env_file=None))


def test_two_tenants_of_one_place_do_not_write_over_each_other(start: Start, tmp_path: Path) -> None:
    keys, shared = tmp_path / "keys.json", tmp_path / "shared"
    (shared / "acme").mkdir(parents=True)
    (shared / "link").symlink_to(shared / "acme")
    (tmp_path / "elsewhere").mkdir()
    (shared / "out").symlink_to(tmp_path / "elsewhere")
    names = {
        tenant: create_key(keys, name=tenant, tenant=tenant, scopes=frozenset({Scope.ADMIN}))
        for tenant in ("acme", "other")
    }
    targets = ("hf://org", "s3://models", str(shared))
    client = start("http://swiftkv.example", api_keys_file=keys, publish_targets=targets).client

    as_acme = {"authorization": f"Bearer {names['acme']}"}

    def publish(tenant: str, place: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {names[tenant]}"}
        return client.post("/jobs", json={**SPEC, "publish": {"to": place}}, headers=headers)

    for place, same in (
        ("hf://org/one", "hf://org/ONE"),
        ("s3://models/one", "s3://models/one/"),
        (f"{shared}/acme/one", f"{shared}/link/one"),
    ):
        assert publish("acme", place).status_code == 201
        assert publish("acme", same).status_code == 201, "it may replace its own"
        error = refusal(publish("other", same), 409)
        assert (error["field"], "another tenant publishes" in error["message"]) == ("publish.to", True)
        assert "acme" not in error["message"].replace(same, "").replace(place, "")
        assert publish("other", f"{place}-2").status_code == 201
        own = [job["id"] for job in client.get("/jobs", headers=as_acme).json()["data"]]
        for job_id in own:
            client.post(f"/jobs/{job_id}/cancel", headers=as_acme)
        assert publish("other", same).status_code == 201, "a job that was cancelled has left its target"
    error = refusal(publish("acme", f"{shared}/out/one"))
    assert (error["field"], "may not publish" in error["message"]) == ("publish.to", True)


def test_a_file_is_held_by_its_tenants_sources_alone(as_: As) -> None:
    def submit(**spec: Any) -> str:
        job = client.post("/jobs", json={**SPEC, **spec})
        assert job.status_code == 201, job.text
        return str(job.json()["id"])

    client = as_("acme")
    file_id = client.post("/v1/files", **UPLOAD).json()["id"]
    submit(metadata={"x": file_id})
    own = submit(data={"sources": [{"name_or_path": file_id}], "max_length": 32, "validation_fraction": 0.5})
    as_("other")
    theirs = submit(metadata={"x": file_id}, tracking={"wandb": {"tags": [file_id]}})
    assert client.post(f"/jobs/{theirs}/pause").status_code == 200
    as_("acme")
    refused = client.delete(f"/v1/files/{file_id}")
    assert refused.status_code == 409
    assert f"is used by {own};" in refused.text
    assert client.post(f"/jobs/{own}/cancel").status_code == 200
    assert client.delete(f"/v1/files/{file_id}").status_code == 200
