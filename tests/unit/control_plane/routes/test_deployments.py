"""The deployment routes."""

from typing import Any

import pytest

from swiftkv_platform.control_plane.deployments.repository import DeploymentStatus
from tests.support.fakes.scripted_server import Script, json_answer, serve
from tests.unit.control_plane.routes.conftest import Server, Start, refusal


@pytest.fixture
def model(server: Server) -> str:
    return str(server.succeed()["distilled_model"])


def deploy(server: Server, model: str, **options: Any) -> Any:
    return server.client.post("/deployments", json={"model": model, **options})


def test_a_deployment_comes_up_and_goes_away(server: Server, model: str) -> None:
    response = deploy(server, model, max_replicas=2, engine={"dtype": "float32"})
    assert response.status_code == 201
    created = response.json()
    path = f"/deployments/{created['id']}"
    assert response.headers["location"] == path
    assert (created["status"], created["model"], created["url"]) == ("pending", model, "http://127.0.0.1:8001")
    assert (created["min_replicas"], created["max_replicas"], created["target_ongoing_requests"]) == (1, 2, None)

    server.tick()
    [spec] = server.serving.applied[-1]
    assert (spec.id, spec.model, spec.engine) == (created["id"], model, {"dtype": "float32"})
    assert spec.artifact_uri == server.get(f"/models/{model}")["artifact_uri"]
    assert created["load_seconds"] == {}
    seconds = {"fetch": 1.5, "load": 2.0, "check": 0.25}
    server.serving.become(created["id"], DeploymentStatus.RUNNING, replicas=1, load_seconds=seconds)
    server.tick()
    assert (server.get(path)["status"], server.get(path)["replicas"]) == ("running", 1)
    assert server.get(path)["load_seconds"] == seconds
    assert server.get("/deployments")["data"] == [server.get(path)]

    for _ in range(2):
        deleted = server.client.delete(path)
        assert (deleted.status_code, deleted.json()["status"]) == (202, "deleting")
    server.tick()
    server.serving.forget()
    server.tick()
    assert server.client.get(path).status_code == 404
    assert server.client.delete(path).status_code == 404


def test_options_that_no_engine_knows_are_refused_before_anything_starts(server: Server, model: str) -> None:
    path = f"/deployments/{deploy(server, model).json()['id']}"
    for options, field, message in (
        ({"colour": "red"}, "engine.colour", "unknown option; accepted here: backend, block_size"),
        ({"max_num_seq": 8}, "engine.max_num_seq", "unknown option (did you mean max_num_seqs?); accepted here: "),
        ({"max_num_seqs": 0}, "engine.max_num_seqs", "1 to 1,048,576"),
        ({"dtype": 8}, "engine.dtype", "'auto'"),
        ({"backend": "sglang"}, "engine.backend", "'vllm'"),
        ({"backend": "vllm", "kv_cache_dtype": "int8"}, "engine.kv_cache_dtype", "needs backend native"),
    ):
        for refused in (
            deploy(server, model, route_prefix="/other", engine=options),
            server.client.patch(path, json={"engine": options}),
        ):
            error = refusal(refused)
            assert (error["field"], message in error["message"]) == (field, True)
    assert len(server.get("/deployments")["data"]) == 1


def test_a_candidate_is_part_of_what_is_served(server: Server, model: str) -> None:
    other = str(server.succeed()["distilled_model"])
    candidate = {"model": other, "share": 0.1}
    created = deploy(server, model, candidate=candidate).json()
    path = f"/deployments/{created['id']}"
    artifact_uri = server.get(f"/models/{other}")["artifact_uri"]
    assert created["candidate"] == {**candidate, "artifact_uri": artifact_uri}
    server.tick()
    [spec] = server.serving.applied[-1]
    assert spec.model_dump()["candidate"] == created["candidate"]
    for body, field in (
        ({"candidate": {"model": "mdl_unknown"}}, "candidate.model"),
        ({"candidate": {**candidate, "share": 2}}, "candidate.share"),
    ):
        assert refusal(server.client.patch(path, json=body))["field"] == field
    assert server.client.patch(path, json={"candidate": None}).json()["candidate"] is None


def test_another_model_is_swapped_in(server: Server, model: str) -> None:
    path = f"/deployments/{deploy(server, model, max_replicas=2).json()['id']}"
    server.tick()
    server.serving.become(path.rpartition("/")[2], DeploymentStatus.RUNNING, replicas=1)
    server.tick()
    other = str(server.succeed()["distilled_model"])
    response = server.client.patch(path, json={"model": other, "engine": {"max_num_seqs": 8}})
    changed = response.json()
    assert (response.status_code, changed["model"], changed["status"]) == (200, other, "swapping")
    assert (changed["engine"], changed["max_replicas"]) == ({"max_num_seqs": 8}, 2)
    assert changed["artifact_uri"] == server.get(f"/models/{other}")["artifact_uri"]
    server.tick()
    assert server.serving.applied[-1][0].model == other
    assert server.get(path)["status"] == "swapping", "the cluster has not said anything of the new model yet"
    server.tick()
    assert server.get(path)["status"] == "running"

    for body, field in (
        ({"model": "mdl_unknown"}, "model"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"min_replicas": 3}, "max_replicas"),
        ({"min_replicas": None}, "min_replicas"),
        ({"route_prefix": "/other"}, "route_prefix"),
    ):
        assert refusal(server.client.patch(path, json=body))["field"] == field
    server.client.delete(path)
    assert server.client.patch(path, json={"max_replicas": 4}).status_code == 409
    assert server.client.patch("/deployments/dep_unknown", json={}).status_code == 404


def test_a_chat_is_passed_on_to_the_deployment_with_its_tools(start: Start) -> None:
    script = Script()
    script.on("POST", "/chat/v1/chat/completions", json_answer({"object": "chat.completion"}))
    with serve(script) as serve_url:
        server = start(serve_url=serve_url)
        model = server.succeed()["distilled_model"]
        deployment = deploy(server, model, route_prefix="/chat").json()["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "?"}], "tools": []}
        answer = server.client.post(f"/deployments/{deployment}/chat/completions", json=body)
        assert answer.json() == {"object": "chat.completion"}
        missing = server.client.post("/deployments/dep_none/chat/completions", json=body)
    assert missing.status_code == 404
    [request] = script.sent("POST", "/chat/v1/chat/completions")
    assert request.body == body
