"""Imports of models that are too large, change while they are copied, or whose client leaves."""

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from sqlalchemy import func, select
from starlette.requests import ClientDisconnect

from swiftkv_platform.contract.attempts import MANIFEST
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.database.tables import ModelRow
from swiftkv_platform.control_plane.models.imports import ModelImporter
from swiftkv_platform.control_plane.parsing import make_import_parsers
from swiftkv_platform.errors import ModelError
from swiftkv_platform.limits import (
    IMPORT_DEPTH,
    IMPORT_FILES,
    IMPORT_SMALL_FILE_BYTES,
    MODEL_METADATA_BYTES,
    MODEL_METADATA_VALUES,
)
from swiftkv_platform.private_directories import open_workspace
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Boundary
from swiftkv_platform.storage.downloads import list_directory
from swiftkv_platform.storage.object_store import LocalObjectStore
from swiftkv_platform.web.limiters import Client
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal, served_control_plane
from tests.unit.control_plane.routes.test_imports import student

pytestmark = pytest.mark.slow("starts an application for each test")

CALLER = Caller("default", "ann")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def refused(server: Server, source: Path, status: int = 422) -> dict[str, Any]:
    error = refusal(server.client.post("/models/import", json={"source": str(source)}), status)
    assert server.get("/models")["data"] == []
    assert list(server.parts.objects.list("models")) == []
    return error


@pytest.mark.parametrize("limit", ["quota", "operator"])
def test_what_does_not_fit_is_not_copied(start: Start, tmp_path: Path, temporary: Path, limit: str) -> None:
    """Its apparent size counts: a sparse file would fill the store with zeros."""
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(yaml.safe_dump({"default": {"max_stored_bytes": 1 << 20} if limit == "quota" else {}}))
    server = start(
        changed={"policies": TenantPolicies(tenants)}, max_import_bytes=1 << 20 if limit == "operator" else 1 << 40
    )
    source = student(tmp_path)
    with (source / "model.safetensors").open("wb") as weights:
        weights.truncate(2 << 30)
    reads: list[str] = []
    opened = os.open

    def watched(path: Any, *arguments: Any, **options: Any) -> int:
        reads.append(str(path))
        return opened(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", watched)
        error = refused(server, source, 429 if limit == "quota" else 422)
    assert error["field"] == ("max_stored_bytes" if limit == "quota" else "source")
    assert "model.safetensors" not in reads
    assert list(temporary.iterdir()) == []


def many(source: Path) -> None:
    for number in range(IMPORT_FILES.default):
        (source / f"{number}.json").touch()


def deep(source: Path) -> None:
    (source / "/".join(["a"] * (IMPORT_DEPTH.default + 1))).mkdir(parents=True)
    (source / "/".join(["a"] * (IMPORT_DEPTH.default + 1)) / "file").touch()


def long_small_file(source: Path) -> None:
    with (source / "tokenizer.json").open("wb") as file:
        file.truncate(IMPORT_SMALL_FILE_BYTES.default + 1)


def many_long_small_files(source: Path) -> None:
    for number in range(5):
        with (source / f"{number}.json").open("wb") as file:
            file.truncate(IMPORT_SMALL_FILE_BYTES.default)


def pipe(source: Path) -> None:
    os.mkfifo(source / "vocab.json")


def loop(source: Path) -> None:
    (source / "again").symlink_to(source)


def device(source: Path) -> None:
    (source / "vocab.json").symlink_to("/dev/zero")


def long_manifest(source: Path) -> None:
    write_manifest(source, {"samples": ["x" * MODEL_METADATA_BYTES.default]})


def full_manifest(source: Path) -> None:
    write_manifest(source, {"samples": [[]] * (MODEL_METADATA_VALUES.default + 1)})


def brackets(source: Path) -> None:
    write_manifest(source, {"samples": [[]] * (3 << 20)})


def dotted_names(source: Path) -> None:
    """A comparison joins the keys of a report, so that one long key costs as often as there are values below it."""
    write_manifest(source, {"k" * 100_000: {str(number): number for number in range(1000)}})


def write_manifest(source: Path, metrics: dict[str, Any]) -> None:
    manifest = json.loads((source / MANIFEST).read_text())
    (source / MANIFEST).write_text(json.dumps({**manifest, "metrics": metrics}))


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "many files": (many, "more than 4096 files"),
    "many directories": (deep, "nested directories"),
    "a long tokenizer": (long_small_file, "only weights"),
    "many long files": (many_long_small_files, "in total"),
    "a pipe": (pipe, "not a regular file"),
    "a link to its own directory": (loop, "not a regular file"),
    "a device": (device, "not a regular file"),
    "a long report": (long_manifest, "bytes"),
    "a report of many values": (full_manifest, "values"),
    "brackets": (brackets, "values"),
    "one long key": (dotted_names, "bytes"),
}


@pytest.mark.parametrize(("make", "said"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_sources_are_refused(
    server: Server, tmp_path: Path, temporary: Path, make: Callable[[Path], None], said: str
) -> None:
    source = student(tmp_path, spec=SPEC)
    make(source)
    error = refused(server, source)
    assert (error["field"], said in error["message"]) == ("source", True), error
    assert len(error["message"]) < 1000
    assert list(temporary.iterdir()) == []


def grow(weights: Path) -> None:
    with weights.open("ab") as file:
        file.write(b"more")


def shrink(weights: Path) -> None:
    weights.write_bytes(b"")


def replace_by_link(weights: Path) -> None:
    secret = weights.parent.parent / "secret"
    secret.write_bytes(weights.read_bytes())
    weights.unlink()
    weights.symlink_to(secret)


def replace_by_pipe(weights: Path) -> None:
    weights.unlink()
    os.mkfifo(weights)


def replace_directory_by_link(weights: Path) -> None:
    elsewhere = weights.parent.parent / "elsewhere"
    shutil.move(weights.parent, elsewhere)
    weights.parent.symlink_to(elsewhere)


CHANGES = [grow, shrink, replace_by_link, replace_by_pipe, replace_directory_by_link]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_after_it_was_listed_is_not_copied(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Whoever owns the source may swap it between the check and the copy."""
    inside = tmp_path / "opened" / "model"
    inside.mkdir(parents=True)
    weights = inside / "model.safetensors"
    weights.write_bytes(b"weights")
    [file] = list_directory(inside, Boundary.from_directories(tmp_path / "opened"), field="source")
    change(weights)
    with pytest.raises(ModelError, match=r"changed during the import|not a regular file"):
        b"".join(file.stream_with_size_check())


def test_a_copy_ends_when_its_client_leaves(server: Server, tmp_path: Path, temporary: Path) -> None:
    source = student(tmp_path)
    with (source / "model.safetensors").open("wb") as weights:
        weights.truncate(64 << 20)

    class Leaving(Client):
        seen = 0

        def check_connected(self) -> None:
            self.seen += 1
            if self.seen > 8:
                raise ClientDisconnect

    client = Leaving()
    with pytest.raises(ClientDisconnect):
        ModelImporter(server.parts, server.settings, client, make_import_parsers()).import_model(
            str(source), None, CALLER
        )
    assert client.seen == 9
    assert list(server.parts.objects.list("models")) == list(temporary.iterdir()) == []
    assert server.get("/models")["data"] == []


def test_a_copy_ends_soon_after_its_connection(start: Start, parts: Components, tmp_path: Path) -> None:
    source = student(tmp_path)
    started = threading.Event()
    with (source / "model.safetensors").open("wb") as weights:
        weights.truncate(512 << 30)

    class Endless(LocalObjectStore):
        """Throws away what is copied, so that the copy would last for an hour."""

        def upload_chunks(self, pieces: Iterator[bytes], key: str, size: int) -> None:
            for _ in pieces:
                started.set()

        def free_bytes(self) -> int | None:
            return None

    objects = Endless(Path(parts.objects.uri))
    with served_control_plane(replace(parts, objects=objects), Settings(home=tmp_path, _env_file=None)) as url:  # type: ignore[call-arg]
        address = urlsplit(url)
        body = json.dumps({"source": str(source)}).encode()
        head = f"POST /models/import HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert started.wait(30.0)
        until = time.monotonic() + 10.0
        with parts.database.begin_read() as session:
            assert session.scalar(select(func.count()).select_from(ModelRow)) == 0
        while any(path.name.startswith("models") and [*path.rglob("*")] for path in (tmp_path / "store").iterdir()):
            assert time.monotonic() < until, "the copy goes on although nobody waits for it"
            time.sleep(0.05)


def test_few_imports_run_at_a_time(server: Server, tmp_path: Path) -> None:
    limiter = server.client.app.state.import_parsers.limiter  # type: ignore[attr-defined]
    with limiter.hold("default", "local"), limiter.hold("default", "local"):
        response = server.client.post("/models/import", json={"source": str(student(tmp_path))})
    assert response.status_code == 429
    assert "Retry-After" in response.headers


def test_the_workspace_of_a_process_that_died_is_removed_at_the_next_start(start: Start, temporary: Path) -> None:
    with open_workspace() as alive:
        abandoned = temporary / "swiftkv-work-abandoned"
        abandoned.mkdir()
        (abandoned / "model").write_bytes(b"weights")
        linked = temporary / "swiftkv-work-linked"
        linked.symlink_to(alive)
        start()
        assert {path.name for path in temporary.iterdir()} == {alive.name, linked.name}
        assert alive.is_dir()
    assert [path.name for path in temporary.iterdir()] == [linked.name]


def test_an_object_that_was_being_written_by_a_process_that_died_goes(server: Server, tmp_path: Path) -> None:
    from swiftkv_platform.control_plane.retention import RetentionStore

    root = Path(server.parts.objects.uri)
    (root / "models" / "mdl_dead").mkdir(parents=True)
    (root / "models" / "mdl_dead" / ".swiftkv-tmp-1").write_bytes(b"half")
    RetentionStore(server.parts.objects).remove_objects("models/mdl_dead", limit=10)
    assert not (root / "models" / "mdl_dead").exists()
