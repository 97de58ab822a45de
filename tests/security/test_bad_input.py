"""Bodies, queries, paths and headers that no caller sends in good faith: each is refused with a 4xx that names the
cause, and nothing of it is stored.
"""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from swiftkv_platform.control_plane.jobs.responses import JobResponse
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.web import safe_json
from swiftkv_platform.web.safe_json import exceeds_limits, load_json
from tests.contract.serving.replicas import asgi_client
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start

JSON = {"Content-Type": "application/json"}
DIGITS, LONG = "1" + "0" * 400, json.dumps("x" * 5000)
VALUES: Mapping[str, tuple[str, ...]] = {
    "metadata.a": (r'"\ud800"', r'"x\uDFFFy"', r'"x\u0000y"', json.dumps("x" * 50_000), "[" * 150 + "]" * 150),
    "training.max_steps": (DIGITS, "1" + "0" * 5000, str(1 << 63), str((1 << 63) - 1)),
    "training.seed": (str(-(1 << 63) - 1),),
    "training.batch_size": ("1000000000",),
    "distillation.hidden_loss_layer": (f"-{DIGITS}",),
    "optimizer.learning_rate": ("NaN", "1e999"),
    "limits.cost_cap": ("Infinity",),
    "model.name_or_path": (LONG,),
    "resources.accelerator_type": (LONG,),
    "resources.num_workers": ("100000000", "1000000000000"),
    "tracking.wandb.project": (LONG,),
}
"""Refused values, as JSON, by the field that the refusal must name."""
SECTIONS = (
    (r'"metadata": {"\ud800": "a"}', r"metadata.\ud800"),
    (r'"metadata": {"x\u0000y": "a"}', r"metadata.x\x00y"),
    (r'"metadata": {"a\"b": "a"}', "metadata"),
    (f'"metadata": {{"{"x" * 500}": "a"}}', "metadata"),
    (r'"\ud800": 1', r"\ud800"),
    (f"{LONG}: 1", "x" * 64),
    (r'"tracking": {"wandb": {"tags": ["a", "\udc00"]}}', "tracking.wandb.tags[1]"),
    (f'"data": {{"sources": [{{"name_or_path": {LONG}}}]}}', "data.sources[0].name_or_path"),
    (f'"evaluation": {{"tasks": [{{"name": {LONG}}}]}}', "evaluation.tasks[0].name"),
    ('"evaluation": {"tasks": [{"name": "x", "zzz": 1}]}', "evaluation.tasks[0].zzz"),
    ('"resources": {"num_workers": {"min": 1, "max": 100000000}}', "resources.num_workers.max"),
    ('"resources": {"num_workers": {"min": 1, "max": 2, "zzz": 1}}', "resources.num_workers.zzz"),
)
"""Sections with refused keys or list items, with the field that the refusal must name."""
BODIES = (b"[" * 10_000 + b"]" * 10_000, b'{"name": "\xed\xa0\x80"}', rb'"\ud800"')


def bad_bodies() -> Iterator[tuple[bytes, str]]:
    """Yield bodies that no job may have, each with the field that the refusal must name."""
    start = '{"name": "test", "model": {"name_or_path": "org/teacher"}, '
    for field, values in VALUES.items():
        *outer, name = field.split(".")
        for value in values:
            section = f'"{name}": {value}'
            for key in reversed(outer):
                section = f'"{key}": {{{section}}}'
            yield f"{start}{section}}}".encode(), field
    for section, field in SECTIONS:
        yield f"{start}{section}}}".encode(), field
    for body in BODIES:
        yield body, "body"


@pytest.fixture
def server(start: Start) -> Server:
    """A control plane that answers 500 where it has a bug, instead of raising into the test."""
    server = start(max_request_bytes=1 << 20)
    server.client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    return server


def refused(response: httpx.Response, *statuses: int) -> list[dict[str, Any]]:
    """Check that the request was refused, in a short answer; return its errors."""
    assert response.status_code in (statuses or (422,)), (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/problem+json"
    assert len(response.content) < 8192, "a refusal does not repeat the whole request"
    errors: list[dict[str, Any]] = response.json()["errors"]
    return errors


def check_untouched(server: Server) -> None:
    """Check that nothing was stored and that the list of jobs can be read."""
    assert server.get("/jobs")["data"] == []
    assert not any(server.parts.jobs.count_by_status().values())


@pytest.mark.parametrize("path", ["/jobs", "/jobs/validate"])
def test_a_hostile_spec_is_refused_and_not_stored(server: Server, path: str) -> None:
    for body, field in bad_bodies():
        errors = refused(server.client.post(path, content=body, headers=JSON), 422, 400)
        assert any(error["message"] for error in errors)
        assert any(str(error["field"]).startswith(field) for error in errors), (errors, field)
        check_untouched(server)


def test_a_query_or_path_that_cannot_be_is_refused(server: Server) -> None:
    for query, field in (
        ("after=%00", "after"),
        ("after=" + "x" * 5000, "after"),
        ("model=a%00b", "model"),
        ("model=%ED%A0%80", "model"),
        ("model=%FF", "model"),
        ("metadata.a%22b=1", 'metadata.a"b'),
        ("metadata.a%5Cb=1", "metadata.a\\b"),
        ("metadata.=1", "metadata."),
        ("metadata.a=%00", "metadata.a"),
        ("metadata.%ED%A0%80=1", "metadata."),
        ("metadata." + "x" * 5000 + "=1", "metadata."),
        ("status=%00", "status"),
    ):
        [error] = refused(server.client.get(f"/jobs?{query}"))
        assert error["field"].startswith(field)
    for path in ("/jobs/%00", "/jobs/a%00b/events", "/models/%00", "/deployments/%00", "/jobs/x/artifacts/%00"):
        [error] = refused(server.client.get(path))
        assert error["field"] == "path"
    job_id = server.submit()["id"]
    for value in ("1" * 23, "9223372036854775808", "²", "-1", "1\0"):
        [error] = refused(server.client.get(f"/jobs/{job_id}/metrics", params={"after": value}))
        assert error["field"] == "after"
    for name, value in (("limit", "1" * 5000), ("limit", "NaN"), ("order", "\0")):
        [error] = refused(server.client.get(f"/jobs/{job_id}/metrics", params={name: value}))
        assert error["field"] == name


def test_every_route_is_behind_the_same_door(server: Server) -> None:
    for path, body, field in (
        ("/session", r'{"api_key": "\ud800"}', "api_key"),
        ("/deployments", r'{"model": "a\u0000b"}', "model"),
        ("/models/mdl_1/promote", r'{"alias": "production", "reason": "\ud800"}', "reason"),
    ):
        [error] = refused(server.client.post(path, content=body, headers=JSON))
        assert error["field"] == field
    for key in (b"a\x00b", b"x" * 256, b""):
        [error] = refused(server.client.post("/jobs", json=SPEC, headers=[(b"Idempotency-Key", key)]))
        assert error["field"].lower() == "idempotency-key"
    check_untouched(server)
    job_id = server.submit()["id"]
    server.client.post(f"/jobs/{job_id}/pause")
    for cap in ("NaN", "Infinity", "1e999", "-1", '"\\ud800"'):
        body = f'{{"cost_cap": {cap}}}'
        [error] = refused(server.client.post(f"/jobs/{job_id}/resume", content=body, headers=JSON))
        assert error["field"] == "cost_cap"
    assert server.get(f"/jobs/{job_id}")["status"] == "paused"


def test_text_of_every_language_passes(server: Server) -> None:
    metadata = {
        "emoji": "\U0001f600",
        "schlüssel": "naïve NaN Infinity 12345678901234567890",
        "日本": "\\ud800 as text",
    }
    assert server.submit(metadata=metadata)["metadata"] == metadata
    assert len(server.get("/jobs", **{"metadata.日本": "\\ud800 as text"})["data"]) == 1


def test_a_change_whose_answer_cannot_be_written_is_not_made(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    key = {"Idempotency-Key": "k"}
    with monkeypatch.context() as patch:
        patch.setattr(JobResponse, "from_job", broken)
        assert server.client.post("/jobs", json=SPEC, headers=key).status_code == 500
    check_untouched(server)
    made = server.client.post("/jobs", json=SPEC, headers=key)
    assert made.status_code == 201
    with monkeypatch.context() as patch:
        patch.setattr(JobResponse, "from_job", broken)
        for action in ("cancel", "pause"):
            assert server.client.post(f"/jobs/{made.json()['id']}/{action}").status_code == 500
    assert server.get(f"/jobs/{made.json()['id']}")["status"] == "queued"


LONG = "def f(x):\n    return {'a': [x]}  # NaN\n" * 400_000
"""A prompt of 16 MB, with brackets."""


@pytest.mark.parametrize("padding", ["", "x" * (2 << 20)], ids=["small", "large"])
def test_it_finds_what_is_hostile_wherever_it_is(padding: str) -> None:
    hostile = [r'"\ud800"', r'"\uDFFF"', r'"\u0000"', "9" * 19, str(-(1 << 63) - 1), "NaN", "-Infinity", "1e999"]
    for value in hostile:
        with pytest.raises(InvalidInputError) as caught:
            load_json(f'{{"prompt": "{padding}", "nested": [{{"a b": [0, {value}]}}]}}'.encode())
        assert str(caught.value.field).startswith("nested[0].a b")
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(InvalidInputError):
            load_json(f'{{"prompt": "{padding}", "a": "\\ud800"}}'.encode(encoding))
    for depth in (safe_json.MAX_DEPTH - 2, safe_json.MAX_DEPTH + 1, 100_000):
        body = f'{{"prompt": "{padding}", "a": {"[" * depth}{"]" * depth}}}'.encode()
        with nullcontext() if depth < safe_json.MAX_DEPTH else pytest.raises(InvalidInputError, match="deep"):
            load_json(body)


def test_it_lets_everything_else_pass() -> None:
    limits = [str(2**63 - 1), str(-(2**63)), "1.7976931348623157e308", "1e-999", "0." + "1" * 40]
    for good in (r'"\ud83d\ude00"', '"\\\\ud800 NaN 1e999 99999999999999999999"', *limits, "[]"):
        load_json(good.encode())
        load_json(f'{{"prompt": "{"x" * (2 << 20)}", "a": {good}}}'.encode())


def test_nul_passes_where_no_database_is() -> None:
    good = r'{"prompt": "a\u0000b"}'
    load_json(good.encode(), allow_nul=True)
    with pytest.raises(InvalidInputError, match="NUL"):
        load_json(good.encode())
    with pytest.raises(InvalidInputError, match="NUL"):
        load_json(rb'{"a\u0000b": 1}', allow_nul=True)


def test_a_large_good_body_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*_: object, **__: object) -> None:
        raise AssertionError("a second pass over a good body")

    monkeypatch.setattr(safe_json, "_check_value", walked)
    load_json(json.dumps({"prompt": "word " * 3_000_000, "max_tokens": 16}).encode())
    load_json(json.dumps({"prompt": list(range(100_000)) * 20}).encode())


@pytest.mark.parametrize("piece", [2, 3, 7, 1 << 18])
@pytest.mark.parametrize("part", ["[]", "{}", "1", '""', '{"a":1}', "[[]]", '"[,"', "null", '"\\\\"', '"\\\\\\"["'])
def test_values_are_counted_as_a_parser_would_count_them(
    part: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commas and brackets in strings do not count, and it does not matter where a piece of the body ends."""
    monkeypatch.setattr(safe_json, "_PIECE_BYTES", piece)
    body = f'["{"[,{" * 1000}", {", ".join([part] * 500)}]'.encode()
    values = [len(found) for found in _kinds(json.loads(body))]
    num_strings, num_others = values
    assert not exceeds_limits(body, num_others + len(json.loads(body)), num_strings)
    assert exceeds_limits(body, num_others // 2, num_strings) or exceeds_limits(body, num_others, num_strings - 1)


def _kinds(value: Any) -> tuple[list[Any], list[Any]]:
    """Strings, including keys, and all other values."""
    strings, others, pending = [], [], [value]
    while pending:
        match item := pending.pop():
            case str():
                strings.append(item)
                continue
            case list():
                pending.extend(item)
            case dict():
                pending.extend([*item.keys(), *item.values()])
        others.append(item)
    return strings, others


HOSTILE = [
    (r'{"prompt": "a", "request_id": "\ud800"}', "request_id"),
    ('{"prompt": "a", "temperature": NaN}', "temperature"),
    ('{"prompt": "a", "temperature": 1e999}', "temperature"),
    (f'{{"prompt": "a", "max_tokens": {10**400}}}', "max_tokens"),
    (f'{{"prompt": [1, 2, {2**64}]}}', "prompt"),
]


async def test_a_replica_refuses_in_its_own_words_and_openais_clients_in_theirs() -> None:
    replica = asgi_client(create_http_app(ReplicaState()))
    for body, field in HOSTILE:
        response = await replica.post("/generate", content=body, headers=JSON)
        assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
        [error] = response.json()["errors"]
        assert (error["field"], error["message"] != "") == (field, True)
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await replica.post(path, content=body, headers=JSON)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(18):
            yield b"x" * (1 << 20)

    grown = await replica.post("/generate", content=pieces(), headers=JSON)
    assert grown.status_code == 413, "the body grows too large while it is read"
