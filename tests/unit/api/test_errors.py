"""Everything that is refused is a problem document that names what is wrong, and strangers are kept out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from swiftkv_platform.api.app import create_app
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import SPEC, Server


def problem(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert set(document) == {"type", "title", "status", "detail", "instance", "code", "errors"}
    assert document["status"] == status
    return document


@pytest.mark.parametrize(
    ("body", "field", "value", "message"),
    [
        ({"name": "x", "swiftkv": {"num_key_value_layers": 0}}, "swiftkv.num_key_value_layers", 0, "greater than or"),
        ({"name": "x", "training": {"seeds": 1}}, "training.seeds", 1, "keep_best, load_optimizer_state, max_steps"),
        (
            {"name": "x", "training": {"batch_sise": 1}},
            "training.batch_sise",
            1,
            "(did you mean batch_size?); accepted",
        ),
        ({"name": "x", "batch_size": 1}, "batch_size", 1, "unknown key (did you mean training.batch_size?); accepted"),
        (
            {"name": "x", "num_key_value_layers": 1},
            "num_key_value_layers",
            1,
            "(did you mean swiftkv.num_key_value_layers or sweep.num_key_value_layers?)",
        ),
        ({"name": "x", "data": {"sources": [{"name_or_path": "a", "k": 1}]}}, "data.sources[0].k", 1, "sample_count"),
        ({"name": "x", "colour": "red"}, "colour", "red", "unknown key; accepted here: checkpoint, data"),
        ({}, "name", None, "missing"),
        ({"name": "x" * 101}, "name", "x" * 101, "100"),
        (
            {"name": "x", "sharding": {"strategy": "zero9"}},
            "sharding.strategy",
            "zero9",
            "'ddp', 'fsdp2' or 'deepspeed'",
        ),
    ],
)
def test_a_refused_spec_names_field_value_and_what_would_do(
    server: Server, body: dict[str, Any], field: str, value: Any, message: str
) -> None:
    document = problem(server.client.post("/jobs", json=body), 422)
    [error] = document["errors"]
    assert (error["field"], error["value"]) == (field, value)
    assert message in error["message"]
    assert field in document["detail"]
    assert document["code"] == "invalid_input"
    assert server.get("/jobs")["data"] == []


@pytest.mark.parametrize("layers", [12, 40])
def test_layers_out_of_range_name_the_range(server: Server, teacher: dict[str, str], layers: int) -> None:
    body = {"name": "test", "model": teacher, "swiftkv": {"num_key_value_layers": layers}}
    for path in ("/jobs", "/jobs/validate"):
        [error] = problem(server.client.post(path, json=body), 422)["errors"]
        assert (error["field"], error["value"]) == ("swiftkv.num_key_value_layers", layers)
        assert "1..11" in error["message"]


def test_unusable_data_and_models_are_refused(server: Server) -> None:
    body = {"name": "test", "data": {"sources": [{"name_or_path": "/missing.jsonl"}]}}
    document = problem(server.client.post("/jobs", json=body), 422)
    assert document["code"] == "data_error"
    assert document["errors"][0]["field"] == "data.sources[0].name_or_path"
    document = problem(server.client.post("/jobs", json={"name": "test", "model": {"name_or_path": "/no"}}), 422)
    assert (document["code"], document["errors"][0]["value"]) == ("model_error", "/no")


def test_a_rule_over_several_fields_is_told(server: Server) -> None:
    body = {"name": "test", "training": {"batch_size": 3}, "resources": {"num_workers": 2}}
    [error] = problem(server.client.post("/jobs", json=body), 422)["errors"]
    assert (error["field"], error["value"]) == ("training.batch_size", 3)
    assert error["message"].endswith("must be a multiple of resources.num_workers x training.micro_batch_size = 2")


def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    response = server.client.post("/jobs", content=b"{", headers={"Content-Type": "application/json"})
    [error] = problem(response, 422)["errors"]
    assert error["field"] is None
    assert "no JSON" in error["message"]


@pytest.mark.parametrize("path", ["/jobs/x", "/jobs/x/events", "/jobs/x/metrics", "/jobs/x/logs", "/jobs/x/artifacts"])
def test_an_unknown_job_is_not_found(server: Server, path: str) -> None:
    document = problem(server.client.get(path), 404)
    assert document["errors"] == [{"field": "job_id", "value": "x", "message": document["detail"]}]


def test_the_frameworks_refusals_are_problems_too(server: Server) -> None:
    assert problem(server.client.get("/nowhere"), 404)["instance"] == "/nowhere"
    refused = server.client.put("/jobs", json={})
    problem(refused, 405)
    assert "POST" in refused.headers["allow"]
    [error] = problem(server.client.get("/jobs", params={"limit": 0}), 422)["errors"]
    assert (error["field"], error["value"]) == ("limit", "0")
    [error] = problem(server.client.get("/jobs", params={"after": "job_x"}), 422)["errors"]
    assert (error["field"], error["value"]) == ("after", "job_x")


def test_a_body_over_the_limit_is_refused_announced_or_not(server: Server) -> None:
    large = b'{"name": "' + b"x" * 5000 + b'"}'
    headers = {"Content-Type": "application/json"}
    assert "4096" in problem(server.client.post("/jobs", content=large, headers=headers), 413)["detail"]
    in_pieces = (large[start : start + 100] for start in range(0, len(large), 100))
    problem(server.client.post("/jobs", content=in_pieces, headers=headers), 413)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Host": "evil.example"}, 403, "host_not_allowed"),
        ({"Host": "127.0.0.1.evil.example:8000"}, 403, "host_not_allowed"),
        ({"Host": ""}, 403, "host_not_allowed"),
        ({"Origin": "http://evil.example"}, 403, "origin_not_allowed"),
        ({"Origin": "http://127.0.0.1:9999"}, 403, "origin_not_allowed"),
        ({"Origin": "null"}, 403, "origin_not_allowed"),
        ({"Content-Type": "text/plain"}, 415, "content_type_not_allowed"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "content_type_not_allowed"),
    ],
)
def test_a_web_page_cannot_submit(server: Server, headers: dict[str, str], status: int, code: str) -> None:
    sent = {"Content-Type": "application/json", **headers}
    response = server.client.post("/jobs", content=json.dumps(SPEC), headers=sent)
    assert problem(response, status)["code"] == code
    assert server.get("/jobs")["data"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:8000"},
        {"Host": "localhost:1234", "Origin": "http://localhost:1234"},
        {"Host": "[::1]:8000"},
        {"Content-Type": "application/json; charset=utf-8"},
    ],
)
def test_the_servers_own_pages_and_programs_can(server: Server, headers: dict[str, str]) -> None:
    sent = {"Content-Type": "application/json", **headers}
    assert server.client.post("/jobs", content=json.dumps(SPEC), headers=sent).status_code == 201


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org", "::"])
def test_without_keys_only_loopback_is_served(host: str) -> None:
    with pytest.raises(InvalidInputError, match="loopback") as caught:
        create_app(Settings(host=host))
    assert (caught.value.field, caught.value.value) == ("host", host)


def test_readiness_names_what_is_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.get("/healthz") == {"status": "ok"}
    assert server.get("/readyz")["checks"] == {"database": "ok", "ray": "ok", "object_store": "ok"}
    server.cluster.away = True
    server.wait(10)
    response = server.client.get("/readyz")
    document = problem(response, 503)
    assert [error["field"] for error in document["errors"]] == ["ray"]
    assert response.headers["retry-after"]
    assert [error["field"] for error in problem(server.client.get("/readyz/ray"), 503)["errors"]] == ["ray"]
    assert server.get("/readyz/database") == {"status": "ok", "checks": {"database": "ok"}}
    server.cluster.away = False

    def away() -> None:
        raise DatabaseUnavailableError("disk full")

    monkeypatch.setattr(server.parts.database, "reading", away)
    server.wait(10)
    [error] = problem(server.client.get("/readyz"), 503)["errors"]
    assert (error["field"], error["message"]) == ("database", "disk full")
    assert problem(server.client.get("/readyz/database"), 503)["errors"] == [error]


def test_a_dependency_that_is_away_is_a_503_to_repeat(server: Server) -> None:
    job = server.submit()
    server.tick()
    server.cluster.away = True
    response = server.client.get(f"/jobs/{job['id']}/logs")
    assert problem(response, 503)["code"] == "cluster_unavailable"
    assert response.headers["retry-after"]
    assert server.submit(name="other")["status"] == "queued"


def test_a_bug_tells_nothing_about_itself(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.parts.jobs, "get", broken)
    server.client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    with capture_logs() as logs:
        document = problem(server.client.get("/jobs/x"), 500)
    assert document["code"] == "internal_error"
    assert "secret" not in str(document)
    assert any(isinstance(line.get("exc_info"), ZeroDivisionError) for line in logs)


def test_prometheus_sees_jobs_and_loops(server: Server) -> None:
    server.submit()
    server.wait(20)
    text = server.client.get("/metrics").text
    assert 'swiftkv_jobs{status="queued"} 1.0' in text
    assert 'swiftkv_loop_last_success_timestamp_seconds{loop="jobs"}' in text


def test_the_interface_describes_itself(server: Server) -> None:
    paths = server.get("/openapi.json")["paths"]
    assert {"/jobs", "/jobs/{job_id}/events", "/jobs/{job_id}/artifacts/{path}", "/deployments"} <= set(paths)
