"""Parsing for a small request is bounded, stops when its client leaves, and runs in a process of its own.

Asserts on bytes, files and processes, never on elapsed time.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.models.imports import _check_student
from swiftkv_platform.control_plane.parsing import ParserPool, make_spec_parsers
from swiftkv_platform.data.checks import check_upload
from swiftkv_platform.limits import CHECK_CPU_SECONDS, CHECKED_BYTES, MIB, UPLOAD_ROW_VALUES
from swiftkv_platform.local.ray_head import find_free_ports
from swiftkv_platform.security.keys import create_key
from swiftkv_platform.security.principals import Scope
from tests.security.conftest import DeploymentPlane, deployment_plane
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow("starts a control plane as a process, and processes that it parses in")

PATIENCE_S = 60.0
NUM_FILES = 100
ENDS_BY_ITSELF_S = CHECK_CPU_SECONDS.default
JOB: dict[str, Any] = {"name": "t", "model": {"name_or_path": "org/teacher"}}


def stat_of(pid: int) -> list[str]:
    """Fields of `/proc/PID/stat` from the third on; none for a process that has ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return [] if fields[0] in "ZX" else fields
    return []


def children_of(*pids: int) -> list[int]:
    """Living processes below these, by their parents."""
    parents = {int(path.name): stat_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [pid for pid, stat in parents.items() if stat and int(stat[1]) in pids]
    return found + children_of(*found) if found else []


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; 0 if it has ended."""
    stat = stat_of(pid)
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def send_spec(url: str, authorization: str, spec: dict[str, Any]) -> socket.socket:
    """Send a spec to be validated; return the connection, without waiting for the answer."""
    address, body = urlsplit(url), json.dumps(spec).encode()
    head = (
        f"POST /jobs/validate HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: {authorization}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)
    connection.sendall(head.encode() + body)
    return connection


@dataclass
class Plane:
    """A control plane as a process of its own, which a test may kill."""

    directory: Path
    process: subprocess.Popen[bytes]
    url: str
    key: str
    client: httpx.Client
    sockets: list[socket.socket] = field(default_factory=list)

    def bytes_read(self) -> int:
        """Bytes that the control plane's own process has read."""
        lines = Path(f"/proc/{self.process.pid}/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("rchar")))

    def parsers(self) -> list[int]:
        """Parser processes: their parent, the server process, is a child of the control plane."""
        children = [pid for pid in children_of(self.process.pid) if int(stat_of(pid)[1]) == self.process.pid]
        return children_of(*children)

    def send(self, spec: dict[str, Any]) -> socket.socket:
        self.sockets.append(send_spec(self.url, f"Bearer {self.key}", spec))
        return self.sockets[-1]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Plane]:
    keys, [port] = tmp_path / "keys.yaml", find_free_ports([0])
    key = create_key(keys, name="eve", tenant="eve", scopes=frozenset({Scope.ADMIN}))
    variables = {
        "SWIFTKV_HOME": str(tmp_path),
        "SWIFTKV_PORT": str(port),
        "SWIFTKV_API_KEYS_FILE": str(keys),
        "SWIFTKV_RAY_DASHBOARD_URL": "http://127.0.0.1:1",
        "SWIFTKV_SOURCE_ROOTS": json.dumps([str(tmp_path)]),
    }
    command = [sys.executable, "-m", "swiftkv_platform.control_plane"]
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=PATIENCE_S) as client:
        plane = Plane(tmp_path, started, url, key, client)

        def answers() -> bool:
            assert started.poll() is None, (tmp_path / "log").read_text()
            with suppress(httpx.HTTPError):
                return client.get("/healthz").is_success
            return False

        try:
            eventually(answers, "the control plane answers")
            yield plane
        finally:
            for connection in plane.sockets:
                connection.close()
            started.kill()
            started.wait()


def sources(*paths: Path) -> dict[str, Any]:
    return {**JOB, "data": {"sources": [{"name_or_path": str(path)} for path in paths]}}


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that decompresses to nothing, in much more CPU time than a check may take: empty members of gzip."""
    path = tmp_path_factory.mktemp("members") / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"", mtime=0) * (6 << 20))
    return path


@pytest.fixture
def endless(members: Path, tmp_path: Path) -> Path:
    path = tmp_path / members.name
    path.hardlink_to(members)
    return path


def test_a_small_request_decodes_no_more_than_its_budget(process: Plane) -> None:
    row = json.dumps({"text": "x", "more": [[]] * 250_000}, separators=(",", ":"))
    assert len(row) < MIB
    (process.directory / "row").write_text(row)
    places = [process.directory / f"s{index}" for index in range(10)]
    for place in places:
        place.mkdir()
        for index in range(NUM_FILES):
            (place / f"{index}.jsonl").hardlink_to(process.directory / "row")
    read_before = process.bytes_read()
    answer = process.client.post("/jobs/validate", json=sources(*places))
    assert answer.status_code == 200, answer.text
    found = answer.json()["sources"]
    unread = sum(
        int(each["not_checked"].split()[3]) if each["num_files"] else NUM_FILES for each in found if each["not_checked"]
    )
    num_read = len(places) * NUM_FILES - unread
    assert 0 < num_read * len(row) <= CHECKED_BYTES.default
    assert found[-1]["not_checked"], "the last source says that it was not read"
    assert process.bytes_read() - read_before < 2 * MIB, "the control plane's own process reads none of the rows"


def test_the_work_for_a_client_ends_when_it_leaves(process: Plane, endless: Path) -> None:
    connection = process.send(sources(endless))
    [parser] = eventually(process.parsers, "a parser process runs")
    used = cpu_seconds(parser)
    connection.close()
    while stat_of(parser):
        used = cpu_seconds(parser) or used
        time.sleep(0.02)
    assert used < ENDS_BY_ITSELF_S / 2, "its limit ended it, not its client"
    assert process.client.post("/jobs/validate", json=JOB).status_code == 200


def test_what_takes_too_long_is_refused_and_names_the_limit(process: Plane, endless: Path) -> None:
    answer = process.client.post("/jobs/validate", json=sources(endless))
    assert answer.status_code == 422, answer.text
    assert f"exceeds the limit of {CHECK_CPU_SECONDS.default} s of CPU time" in answer.json()["detail"]


def test_parser_processes_end_with_a_killed_control_plane(process: Plane, endless: Path) -> None:
    process.send(sources(endless))
    [parser] = eventually(process.parsers, "a parser process runs")
    all_children = children_of(process.process.pid)
    assert parser in all_children
    process.process.send_signal(signal.SIGKILL)
    used = 0.0
    while any(stat_of(pid) for pid in all_children):
        used = cpu_seconds(parser) or used
        time.sleep(0.02)
    assert used < ENDS_BY_ITSELF_S / 2, "its limit ended it, not the control plane's end"


class Counting(ParserPool):
    """Counts the calls of parser processes."""

    def __init__(self, parsers: ParserPool) -> None:
        vars(self).update(vars(parsers))
        self.calls: list[Any] = []

    def _run_in_process(self, client: Any, function: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append(function)
        return super()._run_in_process(client, function, args, kwargs)


@pytest.fixture
def plane(tmp_path: Path, sqlite_database: Database) -> Iterator[DeploymentPlane]:
    with deployment_plane(tmp_path, sqlite_database, source_roots=(str(tmp_path),)) as plane:
        yield plane


def test_requests_that_wait_for_their_turn_do_nothing_once_their_clients_have_left(
    plane: DeploymentPlane, endless: Path
) -> None:
    plane.app.state.spec_parsers = counting = Counting(make_spec_parsers())
    authorization = plane.headers("eve")["authorization"]
    connections = [send_spec(plane.url, authorization, sources(endless)) for _ in range(5)]
    eventually(lambda: counting.calls, "the first request is parsed")
    for connection in reversed(connections):  # the one whose turn it is leaves last
        connection.close()
    assert plane.ask("eve", "POST", "/jobs/validate", JOB).status_code == 200
    assert len(counting.calls) <= 3, "of five that have left, those before the last request ran none but the first"


def test_rows_of_uploads_are_bounded_and_parsed_elsewhere(plane: DeploymentPlane) -> None:
    plane.app.state.upload_parsers = counting = Counting(plane.app.state.upload_parsers)

    def upload(num_lists: int) -> httpx.Response:
        nested = json.dumps({"text": "x", "more": [[]] * num_lists}, separators=(",", ":"))
        rows = f'{{"text": "x"}}\n{nested}\n'.encode()
        return plane.client.post(
            "/v1/files",
            files={"file": ("rows.jsonl", rows)},
            data={"purpose": "fine-tune"},
            headers=plane.headers("eve"),
        )

    most = UPLOAD_ROW_VALUES.default
    assert upload(most // 2 - 8).status_code == 200, "a list counts twice, with the comma after it"
    refused = upload(most)
    assert refused.status_code == 400
    assert f"line 2 has more than {most} JSON values" in refused.json()["error"]["message"]
    assert counting.calls == [check_upload] * 2


def test_configurations_of_imported_models_are_parsed_elsewhere(plane: DeploymentPlane, tmp_path: Path) -> None:
    plane.app.state.import_parsers = counting = Counting(plane.app.state.import_parsers)
    student = tmp_path / "student"
    student.mkdir()
    (student / "config.json").write_text('{"model_type": "llama_swiftkv"}')
    (student / "model.safetensors").write_bytes(b"")
    assert plane.ask("eve", "POST", "/models/import", {"source": str(student)}).status_code == 201
    (student / "config.json").write_text('{"model_type": "llama"}')
    refused = plane.ask("eve", "POST", "/models/import", {"source": str(student)})
    assert refused.status_code == 422
    assert "not a SwiftKV student" in refused.json()["detail"]
    assert counting.calls == [_check_student] * 2
