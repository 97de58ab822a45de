"""Uploaded files over HTTP: kept whole or not at all, within limits, for as long as a job needs them."""

import gzip
import hashlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types import FileDeleted, FileObject

from swiftkv_platform.contract.attempts import file_key, new_file_id
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.files.repository import File
from swiftkv_platform.control_plane.files.service import FileSweeper
from swiftkv_platform.data.checks import MAX_ROW_BYTES
from swiftkv_platform.errors import DatabaseUnavailableError
from tests.unit.control_plane.routes.conftest import SPEC, URL, Server, Start, refusal, served_control_plane

pytestmark = pytest.mark.slow("starts an application for each test")

ROWS = "".join(json.dumps({"messages": [{"role": "user", "content": f"{i}?"}]}) + "\n" for i in range(3)).encode()


@pytest.fixture
def openai(server: Server) -> OpenAI:
    return OpenAI(api_key="none", base_url=f"{URL}/v1", http_client=server.client, max_retries=0)


def upload(client: httpx.Client, rows: bytes = ROWS, name: str = "rows.jsonl", **fields: str) -> httpx.Response:
    return client.post("/v1/files", files={"file": (name, rows)}, data={"purpose": "fine-tune", **fields})


def uploaded(server: Server, rows: bytes = ROWS) -> str:
    answer = upload(server.client, rows)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def nothing_is_kept(server: Server) -> bool:
    return not list(server.parts.objects.list("files")) and server.get("/v1/files")["data"] == []


def naming(file_id: str) -> dict[str, Any]:
    return {"data": {"sources": [{"name_or_path": file_id}]}}


def test_openais_client_uploads_lists_reads_and_deletes(openai: OpenAI, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(ROWS)
    with path.open("rb") as stream:
        made = openai.files.create(
            file=stream, purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    FileObject.model_validate(made.model_dump(), strict=True)
    described = (made.filename, made.bytes, made.status, made.purpose)
    assert described == ("chats.jsonl", len(ROWS), "processed", "fine-tune")
    assert made.expires_at == made.created_at + 3600
    assert made.model_extra == {"sha256": hashlib.sha256(ROWS).hexdigest(), "rows": 3, "format": "messages"}
    assert server.parts.objects.get_bytes(file_key("default", made.id)) == ROWS
    second = openai.files.create(file=b'{"text": "x"}\n', purpose="fine-tune")
    assert [each.id for each in openai.files.list(limit=1)] == [second.id, made.id], "page after page"
    assert [each.id for each in openai.files.list(purpose="vision")] == []
    assert openai.files.retrieve(made.id) == made
    assert openai.files.content(made.id).read() == ROWS
    deleted = openai.files.delete(made.id)
    FileDeleted.model_validate(deleted.model_dump(), strict=True)
    assert deleted.deleted
    assert [entry.key for entry in server.parts.objects.list("files")] == [file_key("default", second.id)]
    assert server.client.get(f"/v1/files/{made.id}/content").status_code == 404


def nested(key: str, *, outside: bool = False, as_text: bool = False) -> bytes:
    """A chat with 900 nested lists, in the last message or `outside` of the messages; `as_text`: in a string."""
    lists = f'[{{"a": {"[" * 900}{"]" * 900}}}]'
    extra = f'"{key}": {json.dumps(lists) if as_text else lists}'
    inside, beside = ("", f", {extra}") if outside else (f", {extra}", "")
    turns = f'{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b"{inside}}}'
    return f'{{"messages": [{turns}]{beside}}}'.encode()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (b"\n \n", "has no rows"),
        (b'{"text": "x"}\nnonsense\n', "line 2, column 1 is not JSON"),
        (b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
        (b'{"text": "x"}\n{"other": 1}\n', "line 2, has the columns other"),
        (b'{"text": "' + b"x" * MAX_ROW_BYTES + b'"}\n', "the limit of a row"),
        (b'{"text": "x"}\n' * 6, "more than 5 rows"),
        (b"[" * 60_000, "not JSON"),
        (b"[" * 100_000, "line 1 has more than 65536 JSON values"),
        (json.dumps({"text": "x", **{f"c{i}": 1 for i in range(64)}}).encode(), "has 65 columns"),
        (rb'{"text": "x", "\ud800": 1}', r"has the column '\ud800'"),
        (b'{"text": "x"}\n' + rb'{"text": "x", "a\u0000": 1}', r"line 2 has the column 'a\x00'"),
        (rb'{"messages": [{"role": "user", "content": "a", "\ud800": "b"}]}', "half of a surrogate pair"),
        (nested("tool_calls"), "more than 100 deep"),
        (nested("metadata"), "more than 100 deep"),
        (nested("tools", outside=True), "more than 100 deep"),
        (nested("tools", outside=True, as_text=True), "more than 100 deep"),
        (gzip.compress(b'{"text": "x"}\n'), "is gzip-compressed; plain JSON Lines"),
        (b"PAR1" + bytes(9), "is Parquet; plain JSON Lines"),
        (b"PK\x03\x04" + bytes(9), "is a ZIP archive"),
    ],
    ids=range(19),
)
def test_a_row_that_could_not_be_trained_on_is_told_and_nothing_is_kept(start: Start, rows: bytes, told: str) -> None:
    server = start(max_file_rows=5)
    refused = upload(server.client, rows)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("data_error", "file", "invalid_request_error")
    assert told in error["message"]
    assert "/tmp" not in error["message"]
    assert nothing_is_kept(server)


def test_a_field_that_is_refused_is_named(server: Server) -> None:
    anchor, created = "expires_after[anchor]", "created_at"
    fields: list[tuple[dict[str, str], str, str]] = [
        ({"purpose": "batch"}, "a.jsonl", "purpose"),
        ({anchor: "now"}, "a.jsonl", "expires_after.anchor"),
        ({anchor: created}, "a.jsonl", "expires_after.seconds"),
        ({anchor: created, "expires_after[seconds]": "60"}, "a.jsonl", "expires_after.seconds"),
        ({}, "x" * 256, "file"),
    ]
    for sent, name, param in fields:
        refused = upload(server.client, name=name, **sent)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    missing = server.client.post("/v1/files", files={"other": b"x"}, data={"purpose": "fine-tune"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
    assert server.client.post("/v1/files", json={"purpose": "fine-tune"}).status_code == 415
    broken = server.client.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 400
    assert nothing_is_kept(server)
    assert upload(server.client, name="../../etc/passwd").json()["filename"] == "passwd", "a path keeps only its name"
    assert upload(server.client, name="C:\\rows.jsonl").json()["filename"] == "rows.jsonl"


def test_an_upload_that_ends_half_way_leaves_nothing(server: Server) -> None:
    """A form whose body ends before its last boundary is refused, and nothing is kept."""
    request = server.client.build_request("POST", "/v1/files", files={"file": ROWS}, data={"purpose": "fine-tune"})
    kind, whole = request.headers["content-type"], request.read()

    def part_of_it() -> Iterator[bytes]:
        yield whole[: len(whole) // 2]

    cut = server.client.post("/v1/files", content=part_of_it(), headers={"content-type": kind})
    assert cut.status_code == 400
    assert nothing_is_kept(server)


def test_clients_that_go_away_half_way_leave_neither_file_nor_place(server: Server) -> None:
    with served_control_plane(server.parts, server.settings) as url, httpx.Client(base_url=url) as client:
        request = client.build_request("POST", "/v1/files", files={"file": ROWS}, data={"purpose": "fine-tune"})
        whole, address = request.read(), (request.url.host, request.url.port or 80)
        head = f"POST /v1/files HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\n"
        head += f"Content-Type: {request.headers['content-type']}\r\nContent-Length: {len(whole)}\r\n\r\n"
        for _ in range(4):
            with socket.create_connection(address) as connection:
                connection.sendall(head.encode() + whole[: len(whole) // 2])
        deadline = time.monotonic() + 30.0
        while (kept := upload(client)).status_code == 429:
            assert time.monotonic() < deadline, "uploads that broke off still hold their places"
        assert kept.status_code == 200
        assert [each["id"] for each in client.get("/v1/files").json()["data"]] == [kept.json()["id"]]
    assert len(list(server.parts.objects.list("files"))) == 1


def test_uploads_at_a_time_are_limited(server: Server) -> None:
    app: Any = server.client.app  # type: ignore[attr-defined]
    limiter = app.state.upload_parsers.limiter
    for held in (["default"] * 2, [f"tenant{number}" for number in range(8)]):
        with ExitStack() as stack:
            for number, tenant in enumerate(held):
                stack.enter_context(limiter.hold(tenant, f"key{number}"))
            refused = upload(server.client)
            assert (refused.status_code, float(refused.headers["Retry-After"]) > 1) == (429, True), refused.text
        assert upload(server.client).status_code == 200


class Failing:
    """A repository of files whose database goes away when a row is added."""

    def __init__(self, server: Server, error: Exception) -> None:
        self._files = server.parts.files
        self._error = error

    def add(self, _file: File, **_options: object) -> File:
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


@pytest.mark.parametrize("error", [DatabaseUnavailableError("away"), ValueError("a bug")])
def test_an_upload_whose_row_cannot_be_stored_leaves_nothing(server: Server, start: Start, error: Exception) -> None:
    client = start(changed={"files": Failing(server, error)}).client
    client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    assert upload(client).status_code == (503 if isinstance(error, DatabaseUnavailableError) else 500)
    sweeper = FileSweeper(server.parts.files, server.parts.objects, clock=lambda: 1e12)
    sweeper.tick()
    assert nothing_is_kept(server)


def test_a_tenant_has_limits_of_its_own(start: Start, tmp_path: Path) -> None:
    limits = {"max_file_bytes": len(ROWS), "max_file_rows": 3, "max_stored_bytes": 2 * len(ROWS)}
    (tmp_path / "tenants.yaml").write_text(json.dumps({"default": limits}))
    server = start(changed={"policies": TenantPolicies(tmp_path / "tenants.yaml")})
    client = server.client
    assert upload(client, ROWS + b"\n").json()["error"]["param"] == "file"
    assert upload(client, b'{"text": "x"}\n' * 4).json()["error"]["code"] == "data_error"
    first = upload(client).json()["id"]
    assert upload(client).status_code == 200
    over = upload(client)
    assert (over.status_code, over.json()["error"]["code"]) == (429, "quota_exceeded")
    assert len(list(server.parts.objects.list("files"))) == 2, "the refused one is gone"
    assert client.delete(f"/v1/files/{first}").status_code == 200
    assert upload(client).status_code == 200
    quota = client.get("/quota").json()
    assert (quota["stored_bytes"], quota["max_stored_bytes"]) == (2 * len(ROWS), 2 * len(ROWS))


def test_what_is_too_large_is_refused_before_it_is_read(start: Start) -> None:
    client = start(max_file_bytes=1024).client
    refused = upload(client, b" " * (1 << 17))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_entity_too_large")
    assert upload(client, b'{"text": "x"}' + b" " * 2000).status_code == 400
    assert upload(client).status_code == 200


def test_a_job_takes_a_file_as_its_data_and_no_other(server: Server) -> None:
    file_id = uploaded(server)
    estimate = server.client.post("/jobs/validate", json={**SPEC, **naming(file_id)}).json()
    assert estimate["sources"] == [
        {
            "name_or_path": file_id,
            "num_files": 1,
            "num_bytes": len(ROWS),
            "formats": ["messages"],
            "unread_columns": [],
            "not_checked": None,
        }
    ]
    job = server.submit(**naming(file_id))["id"]
    server.tick()
    request = json.loads(server.parts.objects.get_bytes(f"jobs/{job}/attempts/1/attempt.json"))
    stored = request["files"][file_id]
    assert stored["uri"] == f"{server.parts.objects.uri}/files/default/{file_id}.jsonl"
    assert stored["sha256"] == hashlib.sha256(ROWS).hexdigest()
    as_text = {"data": {"sources": [{"name_or_path": file_id, "format": "text"}]}}
    for section, field, told in (
        (naming(new_file_id()), "data.sources[0].name_or_path", "no file with this id is uploaded"),
        ({"model": {"name_or_path": file_id}}, "model.name_or_path", "an uploaded file of rows"),
        (as_text, "data.sources[0].name_or_path", "has the columns messages"),
    ):
        for path in ("/jobs", "/jobs/validate"):
            error = refusal(server.client.post(path, json={**SPEC, **section}))
            assert (error["field"], told in error["message"]) == (field, True)


def test_a_file_ends_when_its_time_is_over_and_no_job_uses_it(server: Server) -> None:
    life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    used = upload(server.client, **life).json()["id"]
    unused, lasting = upload(server.client, **life).json()["id"], uploaded(server)
    job = server.submit(**naming(used))["id"]
    server.wait(3601)
    assert server.client.post("/jobs", json={**SPEC, **naming(unused)}).status_code == 422
    server.tick()
    assert used in json.loads(server.parts.objects.get_bytes(f"jobs/{job}/attempts/1/attempt.json"))["files"]
    sweeper = FileSweeper(server.parts.files, server.parts.objects, server.parts.clock)
    sweeper.tick()
    assert {each["id"] for each in server.get("/v1/files")["data"]} == {used, lasting}
    server.client.post(f"/jobs/{job}/cancel")
    server.tick()
    server.tick()
    assert server.get(f"/jobs/{job}")["status"] == "cancelled"
    server.wait(601)
    sweeper.tick()
    assert [each["id"] for each in server.get("/v1/files")["data"]] == [lasting]
    assert [entry.key for entry in server.parts.objects.list("files")] == [file_key("default", lasting)]
