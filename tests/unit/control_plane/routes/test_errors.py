"""Every refusal is a problem document that names what is wrong; requests of foreign web pages are refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from swiftkv_platform.control_plane import responses
from swiftkv_platform.errors import DatabaseUnavailableError
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal


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
        ({"swiftkv": {"num_key_value_layers": 0}}, "swiftkv.num_key_value_layers", 0, "1 to 10,000"),
        ({"training": {"seeds": 1}}, "training.seeds", 1, "keep_best, load_optimizer_state, max_steps"),
        ({"training": {"batch_sise": 1}}, "training.batch_sise", 1, "(did you mean batch_size?); accepted"),
        ({"batch_size": 1}, "batch_size", 1, "unknown key (did you mean training.batch_size?); accepted"),
        ({"num_key_value_layers": 1}, "num_key_value_layers", 1, "sweep.num_key_value_layers?)"),
        ({"data": {"sources": [{"name_or_path": "a", "k": 1}]}}, "data.sources[0].k", 1, "sample_count"),
        ({"hue": "red"}, "hue", "red", "unknown key; accepted here: checkpoint, data"),
        ({"name": "x" * 101}, "name", "x" * 101, "100"),
        ({"sharding": {"strategy": "zero9"}}, "sharding.strategy", "zero9", "'ddp', 'fsdp2' or 'deepspeed'"),
        (
            {"training": {"batch_size": 3}, "resources": {"num_workers": 2}},
            "training.batch_size",
            3,
            "must be a multiple of resources.num_workers x training.micro_batch_size = 2",
        ),
    ],
)
def test_a_refused_spec_names_field_value_and_what_is_accepted(
    server: Server, body: dict[str, Any], field: str, value: Any, message: str
) -> None:
    document = problem(server.client.post("/jobs", json={"name": "x", **body}), 422)
    [error] = document["errors"]
    assert (error["field"], error["value"]) == (field, value)
    assert message in error["message"]
    assert field in document["detail"]
    assert document["code"] == "invalid_input"
    assert server.get("/jobs")["data"] == []


def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    response = server.client.post("/jobs", content=b"{", headers={"Content-Type": "application/json"})
    [error] = problem(response, 422)["errors"]
    assert error["field"] is None
    assert "not valid JSON" in error["message"]


def test_a_student_is_no_teacher(server: Server, teacher: dict[str, str]) -> None:
    config = Path(teacher["name_or_path"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama_swiftkv"}))
    for path in ("/jobs", "/jobs/validate"):
        error = refusal(server.client.post(path, json={"name": "test", "model": teacher}))
        assert error["field"] == "model.name_or_path"
        assert "which is a SwiftKV student already; use the teacher that it was made from" in error["message"]


def test_what_is_missing_or_out_of_the_teachers_range_is_named(server: Server, teacher: dict[str, str]) -> None:
    [error] = problem(server.client.post("/jobs", json={}), 422)["errors"]
    assert (error["field"], error["value"], "missing" in error["message"]) == ("name", None, True)
    body = {"name": "test", "model": teacher, "swiftkv": {"num_key_value_layers": 12}}
    for path in ("/jobs", "/jobs/validate"):
        [error] = problem(server.client.post(path, json=body), 422)["errors"]
        assert (error["field"], error["value"]) == ("swiftkv.num_key_value_layers", 12)
        assert "1..11" in error["message"]


def test_the_frameworks_refusals_are_problems_too(server: Server) -> None:
    unknown = problem(server.client.get("/jobs/x"), 404)
    assert unknown["errors"] == [{"field": "job_id", "value": "x", "message": unknown["detail"]}]
    assert problem(server.client.get("/nowhere"), 404)["instance"] == "/nowhere"
    refused = server.client.put("/jobs", json={})
    problem(refused, 405)
    assert "POST" in refused.headers["allow"]
    [error] = problem(server.client.get("/jobs", params={"limit": 0}), 422)["errors"]
    assert (error["field"], error["value"]) == ("limit", "0")
    [error] = problem(server.client.get("/jobs", params={"after": "job_x"}), 422)["errors"]
    assert (error["field"], error["value"]) == ("after", "job_x")


def test_routes_of_a_model_are_asked_of_its_deployment(server: Server) -> None:
    """Clients of OpenAI's fine-tuning routes ask the control plane for models too: it points to deployments."""
    said = "URL/v1/chat/completions with the `url` that GET /deployments returns"
    for method, path, is_told in (
        ("GET", "/v1/models", True),
        ("POST", "/v1/chat/completions", True),
        ("GET", "/v1/files/file-none", False),
    ):
        answer = server.client.request(method, path)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (404, is_told)


def test_a_body_over_the_limit_is_refused_announced_or_not(server: Server) -> None:
    large = b'{"name": "' + b"x" * 5000 + b'"}'
    headers = {"Content-Type": "application/json"}
    assert "4096" in problem(server.client.post("/jobs", content=large, headers=headers), 413)["detail"]
    in_pieces = (large[start : start + 100] for start in range(0, len(large), 100))
    problem(server.client.post("/jobs", content=in_pieces, headers=headers), 413)


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

    monkeypatch.setattr(server.parts.database, "begin_read", away)
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


def test_a_web_page_cannot_submit_but_the_servers_own_and_programs_can(server: Server) -> None:
    def submit(headers: dict[str, str]) -> Any:
        sent = {"Content-Type": "application/json", **headers}
        return server.client.post("/jobs", content=json.dumps(SPEC), headers=sent)

    for headers, status, code in (
        ({"Host": "evil.example"}, 403, "host_not_allowed"),
        ({"Host": "127.0.0.1.evil.example:8000"}, 403, "host_not_allowed"),
        ({"Host": ""}, 403, "host_not_allowed"),
        ({"Origin": "http://evil.example"}, 403, "origin_not_allowed"),
        ({"Origin": "http://127.0.0.1:9999"}, 403, "origin_not_allowed"),
        ({"Origin": "null"}, 403, "origin_not_allowed"),
        ({"Content-Type": "text/plain"}, 415, "content_type_not_allowed"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "content_type_not_allowed"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "content_type_not_allowed"),
    ):
        assert problem(submit(headers), status)["code"] == code
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):  # a form needs no preflight
        refused = server.client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "fine-tune"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert server.get("/jobs")["data"] == server.get("/v1/files")["data"] == []
    for headers in (
        {"Origin": "http://127.0.0.1:8000"},
        {"Host": "localhost:1234", "Origin": "http://localhost:1234"},
        {"Host": "[::1]:8000"},
        {"Content-Type": "application/json; charset=utf-8"},
    ):
        assert submit(headers).status_code == 201, headers


@pytest.mark.parametrize("path", ["/jobs", "/jobs/validate", "/deployments", "/v1/files"])
def test_a_compressed_body_is_refused_with_a_cure(server: Server, path: str) -> None:
    for encoding in ("gzip", "br", "identity, deflate"):
        kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
        headers = {"Content-Type": kind, "Content-Encoding": encoding}
        answer = server.client.post(path, content=gzip.compress(json.dumps(SPEC).encode()), headers=headers)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
        assert "send the body uncompressed" in answer.text
    assert server.get("/jobs")["data"] == []


def test_a_body_of_errors_is_looked_through_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing every two of them would take minutes of CPU time for one body."""
    looked: list[int] = []
    real = responses.drop_redundant_errors
    monkeypatch.setattr(responses, "drop_redundant_errors", lambda found: (looked.append(len(found)), real(found))[1])
    client = start().client
    many = {f"key_{number}": number for number in range(1020)}
    document = problem(client.post("/jobs", json={"name": "x", **many, "training": many}), 422)
    assert len(document["errors"]) == 20
    assert looked == [200]
    document = problem(client.post("/jobs", json={"name": "x", "training": {**many, **dict.fromkeys("abcdefg")}}), 422)
    assert document["errors"][0]["message"] == "training has 1027 keys; the limit is 1024"
    for wrong in ({"tasks": [{"zz": 1}] * 3000}, {"needle_lengths": [0] * 3000}):
        looked.clear()
        problem(client.post("/jobs", json={"name": "x", "evaluation": wrong}), 422)
        assert looked[0] < 5
    assert problem(client.post("/jobs", json={"name": "x", "tags": [0] * 20_000}), 413)["code"].endswith("too_large")
