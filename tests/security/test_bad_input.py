"""Bodies, queries, paths and headers that no caller sends in good faith: each is refused with a 4xx that names what it
refuses, and nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from swiftkv_platform.api.schemas import JobAnswer
from swiftkv_platform.settings import Settings
from tests.security.bad_bodies import SPECS, BadBody
from tests.unit.api.conftest import SPEC, Server, control_plane, make_parts

JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def _short_logs() -> Iterator[None]:
    """Without configuration, structlog draws each traceback with all variables, which takes seconds."""
    with capture_logs():
        yield


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    """A control plane that refuses all it is sent, so that one does for all."""
    with asking(tmp_path_factory.mktemp("door"), empty_database) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    with asking(tmp_path, empty_database) as server:
        yield server


@contextmanager
def asking(directory: Path, empty_database: Path) -> Iterator[Server]:
    """A control plane that answers a bug with 500, as a caller would see it."""
    parts = make_parts(directory, empty_database)
    settings = Settings(home=directory, max_request_bytes=1 << 20, _env_file=None)
    with control_plane(parts, settings) as client:
        client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        yield Server(client, parts, settings)


def refusal(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The problem document of a refusal."""
    assert response.status_code in (statuses or (422,)), (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/problem+json"
    assert len(response.content) < 8192, "a refusal does not repeat all it was sent"
    document: dict[str, Any] = response.json()
    return document


def check_untouched(server: Server) -> None:
    """Nothing was stored, and the list can be read."""
    assert server.get("/jobs")["data"] == []
    assert not any(server.parts.jobs.count_by_status().values())


@pytest.mark.parametrize("path", ["/jobs", "/jobs/validate"])
@pytest.mark.parametrize("bad", SPECS, ids=lambda bad: bad.name)
def test_a_hostile_spec_is_refused_and_not_stored(door: Server, bad: BadBody, path: str) -> None:
    response = door.client.post(path, content=bad.content, headers=JSON)
    errors = refusal(response, 422, 400)["errors"]
    assert any(error["message"] for error in errors)
    assert any(str(error["field"]).startswith(str(bad.field)) for error in errors), errors
    check_untouched(door)


@pytest.mark.parametrize(
    "query",
    [
        {"after": "1" * 23},
        {"after": "9223372036854775808"},
        {"after": "²"},
        {"after": "-1"},
        {"after": "1\0"},
        {"limit": "1" * 5000},
        {"limit": "NaN"},
        {"order": "\0"},
    ],
    ids=repr,
)
def test_a_page_that_cannot_be_is_refused(server: Server, query: dict[str, str]) -> None:
    job_id = server.submit()["id"]
    [error] = refusal(server.client.get(f"/jobs/{job_id}/metrics", params=query))["errors"]
    assert error["field"] in query


@pytest.mark.parametrize(
    ("query", "field"),
    [
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
    ],
)
def test_a_filter_that_cannot_be_is_refused(door: Server, query: str, field: str) -> None:
    [error] = refusal(door.client.get(f"/jobs?{query}"))["errors"]
    assert error["field"].startswith(field)


@pytest.mark.parametrize(
    "path", ["/jobs/%00", "/jobs/a%00b/events", "/models/%00", "/deployments/%00", "/jobs/x/artifacts/%00"]
)
def test_a_path_with_nul_is_refused(door: Server, path: str) -> None:
    [error] = refusal(door.client.get(path))["errors"]
    assert error["field"] == "path"


@pytest.mark.parametrize("value", [b"a\x00b", b"x" * 256, b""])
def test_an_idempotency_key_that_cannot_be_is_refused(door: Server, value: bytes) -> None:
    response = door.client.post("/jobs", json=SPEC, headers=[(b"Idempotency-Key", value)])
    [error] = refusal(response)["errors"]
    assert error["field"].lower() == "idempotency-key"
    check_untouched(door)


@pytest.mark.parametrize("body", ["NaN", "Infinity", "1e999", "-1", '"\\ud800"'])
def test_a_cost_cap_that_is_no_number_is_refused(server: Server, body: str) -> None:
    job_id = server.submit()["id"]
    server.client.post(f"/jobs/{job_id}/pause")
    response = server.client.post(f"/jobs/{job_id}/resume", content=f'{{"cost_cap": {body}}}', headers=JSON)
    [error] = refusal(response)["errors"]
    assert error["field"] == "cost_cap"
    assert server.get(f"/jobs/{job_id}")["status"] == "paused"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/session", r'{"api_key": "\ud800"}', "api_key"),
        ("/deployments", r'{"model": "a\u0000b"}', "model"),
        ("/models/mdl_1/promote", r'{"alias": "production", "reason": "\ud800"}', "reason"),
    ],
)
def test_every_route_is_behind_the_same_door(door: Server, path: str, body: str, field: str) -> None:
    [error] = refusal(door.client.post(path, content=body, headers=JSON))["errors"]
    assert error["field"] == field


def test_text_of_every_language_passes(server: Server) -> None:
    metadata = {
        "emoji": "\U0001f600",
        "schlüssel": "naïve NaN Infinity 12345678901234567890",
        "日本": "\\ud800 as text",
    }
    assert server.submit(metadata=metadata)["metadata"] == metadata
    assert len(server.get("/jobs", **{"metadata.日本": "\\ud800 as text"})["data"]) == 1


def test_an_answer_that_cannot_be_written_stores_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    with monkeypatch.context() as patch:
        patch.setattr(JobAnswer, "of", broken)
        assert server.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "k"}).status_code == 500
    check_untouched(server)
    job = server.client.post("/jobs", json=SPEC, headers={"Idempotency-Key": "k"})
    assert job.status_code == 201


@pytest.mark.parametrize("action", ["cancel", "pause"])
def test_a_change_whose_answer_cannot_be_written_is_not_made(
    server: Server, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    job_id = server.submit()["id"]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(JobAnswer, "of", broken)
        assert server.client.post(f"/jobs/{job_id}/{action}").status_code == 500
    assert server.get(f"/jobs/{job_id}")["status"] == "queued"
