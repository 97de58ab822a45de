"""Bodies, queries, paths and headers that no caller sends in good faith: each is refused with a 4xx that names what it
refuses, and nothing of it is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from swiftkv_platform.api.schemas import JobAnswer
from tests.unit.api.conftest import SPEC, Server, Start

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
"""Values that are refused, as JSON, by the field that the refusal is to name."""
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
"""Keys that are refused and what stands in lists, with the field."""
BODIES = (b"[" * 200_000 + b"]" * 200_000, b'{"name": "\xed\xa0\x80"}', rb'"\ud800"')


def bad_bodies() -> Iterator[tuple[bytes, str]]:
    """Bodies that no job may have, with the field that the refusal is to name."""
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
    """A control plane that answers a bug with 500, as a caller would see it."""
    server = start(max_request_bytes=1 << 20)
    server.client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    return server


def refused(response: httpx.Response, *statuses: int) -> list[dict[str, Any]]:
    """The errors of a refusal."""
    assert response.status_code in (statuses or (422,)), (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/problem+json"
    assert len(response.content) < 8192, "a refusal does not repeat all it was sent"
    errors: list[dict[str, Any]] = response.json()["errors"]
    return errors


def check_untouched(server: Server) -> None:
    """Nothing was stored, and the list can be read."""
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
        patch.setattr(JobAnswer, "of", broken)
        assert server.client.post("/jobs", json=SPEC, headers=key).status_code == 500
    check_untouched(server)
    made = server.client.post("/jobs", json=SPEC, headers=key)
    assert made.status_code == 201
    with monkeypatch.context() as patch:
        patch.setattr(JobAnswer, "of", broken)
        for action in ("cancel", "pause"):
            assert server.client.post(f"/jobs/{made.json()['id']}/{action}").status_code == 500
    assert server.get(f"/jobs/{made.json()['id']}")["status"] == "queued"
