"""A machine that has run out of disk, descriptors or memory answers 503, whatever was asked; never 500."""

import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.unit.control_plane.routes.conftest import SPEC, URL, Server

ROWS = b'{"text": "some words of a row"}\n' * 100_000
UPLOAD = {"files": {"file": ("rows.jsonl", ROWS)}, "data": {"purpose": "fine-tune"}}


@contextmanager
def full_disk(limit: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond a size in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def client(server: Server) -> TestClient:
    assert isinstance(server.client.app, FastAPI)
    return TestClient(server.client.app, base_url=URL, raise_server_exceptions=False)


@pytest.mark.parametrize("limit", [0, 1 << 16, 2 << 20], ids=["nothing", "not the spool", "not the copy"])
def test_an_upload_to_a_full_disk_is_refused_and_leaves_nothing(server: Server, client: TestClient, limit: int) -> None:
    before = set(Path(tempfile.gettempdir()).iterdir())
    with full_disk(limit):
        refused = client.post("/v1/files", **UPLOAD)
    assert refused.status_code == 503, refused.text
    assert "Retry-After" in refused.headers
    assert str(tempfile.gettempdir()) not in refused.text
    new = [path.name for path in {*Path(tempfile.gettempdir()).iterdir()} - before]
    assert [name for name in new if name.startswith("upload-")] == []
    assert client.get("/v1/files").json()["data"] == []
    assert client.post("/v1/files", **UPLOAD).status_code == 200, "it works again once there is room"


def test_other_changes_on_a_full_disk_are_refused_too(server: Server, client: TestClient) -> None:
    model = server.succeed()["distilled_model"]
    with full_disk():
        answers = [
            client.post("/jobs", json=SPEC),
            client.post("/deployments", json={"model": model}),
            client.post(f"/models/{model}/promote", json={"alias": "production", "reason": "better"}),
            client.delete(f"/models/{model}"),
        ]
    assert [answer.status_code for answer in answers] == [503] * 4, [answer.text for answer in answers]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *((OSError(code, os.strerror(code)), 503) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE)),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 503),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/secret/place"), 500),
        (PermissionError(errno.EACCES, "Permission denied", "/secret/place"), 500),
    ],
    ids=str,
)
def test_only_what_has_run_out_is_a_503(client: TestClient, error: OSError, status: int) -> None:
    assert isinstance(client.app, FastAPI)

    @client.app.get("/broken")
    def broken() -> None:
        raise error

    answer = client.get("/broken")
    assert answer.status_code == status
    assert answer.json()["code"] == ("storage_error" if status == 503 else "internal_error"), answer.text
    assert "/secret" not in answer.text
