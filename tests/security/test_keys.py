"""Key and tenants files that break while a server runs, expiry of keys, and their last uses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fastapi import Request
from sqlalchemy import event
from structlog.testing import capture_logs
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app as cli
from swiftkv_platform.control_plane.access.sessions import KeyUses, list_last_uses
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.security.keys import KeyRing, Scope, create_key, revoke_key, rotate_key
from swiftkv_platform.serve.access import RequestAuthenticator
from tests.unit.control_plane.routes.conftest import Start, StillClock

ALL = frozenset({Scope.ADMIN})

Break = Callable[[Path], None]


def half_written(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def missing(path: Path) -> None:
    path.unlink()


def unreadable(path: Path) -> None:
    """Put a directory in its place, since root could read a file of any mode."""
    path.unlink()
    path.mkdir()


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def other_shape(path: Path) -> None:
    """Write a hash that is too short, whose error names its value."""
    path.write_text(json.dumps({"keys": [{"name": "ann", "scopes": ["admin"], "sha256": "cafebabe" * 7}]}))


BREAKS = (half_written, missing, unreadable, no_text, other_shape)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "private-place" / "keys.json"


@pytest.fixture
def token(path: Path) -> str:
    return create_key(path, name="ann", tenant="acme", scopes=ALL)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_key_file_that_breaks_serves_on_as_it_was(start: Start, path: Path, token: str, broken: Break) -> None:
    headers = [(b"authorization", f"Bearer {token}".encode())]
    replica, kept = RequestAuthenticator(KeyRing(path), tenant="acme"), path.read_bytes()
    client = start("http://swiftkv.example", api_keys_file=path).client
    broken(path)
    with capture_logs() as logs:
        good = [client.get("/jobs", headers={"authorization": f"Bearer {token}"}) for _ in range(3)]
        wrong = client.get("/jobs", headers={"authorization": "Bearer skv_wrong"})
        assert 'swiftkv_operator_file_usable{file="keys"} 0.0' in client.get("/metrics").text
    assert [answer.status_code for answer in good] == [200, 200, 200]
    assert (wrong.status_code, wrong.json()["code"]) == (401, "unauthenticated")
    for answer in (*good, wrong):
        for told in ("private-place", "keys.json", "cafebabe", "sha256"):
            assert told not in answer.text
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "private-place" in str(warning), "the log names the file, once"
    assert "cafebabe" not in str(warning)
    request = Request({"type": "http", "method": "POST", "path": "/generate", "headers": headers, "state": {}})
    assert replica.admit(request).tenant == "acme"
    with pytest.raises(InvalidInputError, match="private-place") as caught:
        KeyRing(path)  # at startup the operator sees the error
    assert not any(told in str(caught.value) for told in (token, "cafebabe"))
    if path.is_dir():
        path.rmdir()
    path.write_bytes(kept)  # repaired
    revoke_key(path, "ann")
    assert client.get("/jobs", headers={"authorization": f"Bearer {token}"}).status_code == 401


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_whose_mode_was_mended_is_read_again(path: Path, token: str) -> None:
    ring = KeyRing(path)
    create_key(path, name="bob", tenant="acme", scopes=ALL)
    path.chmod(0)
    assert ring.authenticate(f"Bearer {token}").name == "ann"
    path.chmod(0o600)
    assert [key.name for key in ring.list_keys()] == ["ann", "bob"]


@pytest.mark.parametrize("text", ["default: 2020-13-45\n", "{", "[" * 500, "default: {weight: -1}\n", "\x00"])
def test_a_tenants_file_that_breaks_serves_on_as_it_was(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("default: {max_running_jobs: 7}\n")
    tenants = TenantPolicies(file)
    file.write_text(text)
    with capture_logs() as logs:
        assert {tenants.get("acme").max_running_jobs for _ in range(3)} == {7}
    assert len(logs) == 1
    with pytest.raises(InvalidInputError, match=r"tenants\.yaml"):
        TenantPolicies(file)
    file.write_text("default: {max_running_jobs: 8}\n")
    assert tenants.get("acme").max_running_jobs == 8


def test_a_key_expires(start: Start, path: Path) -> None:
    past = create_key(path, name="bob", tenant="acme", scopes=ALL, expires_at=500)
    client = start("http://swiftkv.example", api_keys_file=path).client
    refused = client.get("/jobs", headers={"authorization": f"Bearer {past}"})
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
    assert "expired" in refused.json()["detail"]


def test_the_operator_says_how_long_a_key_is_good(tmp_path: Path) -> None:
    runner, file = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)}), tmp_path / "keys.json"

    def create(text: str) -> Result:
        return runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin", f"--expires-in={text}", "--json"])

    for text in ("90", "d", "-1d", "1.5h", "0s", "999999999999d", "1y"):
        refused = create(text)
        assert (refused.exit_code != 0, "90d" in refused.output, file.exists()) == (True, True, False)
    for text, seconds in (("90d", 90 * 86400), ("12h", 43200), ("30m", 1800), ("45s", 45)):
        file.unlink(missing_ok=True)
        made = create(text)
        assert made.exit_code == 0, made.output
        told = json.loads(made.stdout)["expires_at"]
        [key] = KeyRing(file).list_keys()
        assert key.expires_at == told
        assert abs(told - file.stat().st_mtime - seconds) < 60
    assert "expires" in runner.invoke(cli, ["keys", "list"]).stdout
    assert json.loads(runner.invoke(cli, ["keys", "list", "--json"]).stdout)["keys"][0]["expires_at"] == told


def test_a_use_is_written_once_a_minute(start: Start, tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", StillClock()
    first = create_key(path, name="ann", tenant="acme", scopes=frozenset({Scope.JOBS_READ}))
    second, _ = rotate_key(path, "ann", now=1000, overlap_s=10**6)
    old, new = KeyRing(path).list_keys()
    written = []

    def count(*args: object) -> None:
        if "key_uses" in str(args[2]) and not str(args[2]).startswith("SELECT"):
            written.append(args[2])

    server = start("http://swiftkv.example", {"clock": clock}, api_keys_file=path)
    event.listen(server.parts.database._engine, "before_cursor_execute", count)
    began, database = int(clock.now), server.parts.database
    for _ in range(5):
        server.client.get("/jobs", headers={"authorization": f"Bearer {first}"})
        clock.now += 10.0
    assert list_last_uses(database) == {old.id: began}
    assert len(written) == 1
    clock.now += 10.0
    for token in (second, first, "skv_unknown"):
        server.client.get("/jobs", headers={"authorization": f"Bearer {token}"})
    assert list_last_uses(database) == {old.id: began + 60, new.id: began + 60}
    KeyUses(database, lambda: clock.now + 59.0).record(new)  # as noted by another control plane
    assert list_last_uses(database)[new.id] == began + 60


def test_no_request_fails_for_a_use_that_cannot_be_stored(tmp_path: Path) -> None:
    create_key(tmp_path / "keys.json", name="ann", tenant="acme", scopes=frozenset({Scope.JOBS_READ}))
    [key] = KeyRing(tmp_path / "keys.json").list_keys()
    database = Database(f"sqlite:///{tmp_path}")  # a directory
    with pytest.raises(DatabaseUnavailableError):
        list_last_uses(database)
    KeyUses(database, lambda: 1000.0).record(key)


def test_the_operator_sees_the_last_use_of_each_key(tmp_path: Path, empty_database: Path) -> None:
    (tmp_path / "swiftkv.db").write_bytes(empty_database.read_bytes())
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})

    def keys(*arguments: str) -> Any:
        done = runner.invoke(cli, ["keys", *arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    made = keys("create", "ann", "--tenant", "acme", "--scope", "jobs:read", "--scope", "deploy")
    key = KeyRing(tmp_path / "keys.json").authenticate(f"Bearer {made['key']}")
    assert (key.name, key.tenant, sorted(key.scopes)) == ("ann", "acme", ["deploy", "jobs:read"])
    new = keys("rotate", "ann", "--overlap", "2d")
    [key, _] = KeyRing(tmp_path / "keys.json").list_keys()
    KeyUses(Database(f"sqlite:///{tmp_path / 'swiftkv.db'}"), lambda: 1000.0).record(key)
    listed = keys("list")["keys"]
    assert [(key["id"], key["last_used_at"]) for key in listed] == [(made["id"], 1000), (new["id"], None)]
    assert listed[0]["expires_at"] is not None
    table = runner.invoke(cli, ["keys", "list"]).stdout
    assert "last used" in table
    assert made["id"] in table
    assert made["key"] not in table
    assert runner.invoke(cli, ["keys", "revoke", made["id"]]).exit_code == 0
    assert [key["id"] for key in keys("list")["keys"]] == [new["id"]]


def test_keys_are_listed_without_a_database_and_make_none(tmp_path: Path) -> None:
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})
    runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin"])
    assert runner.invoke(cli, ["keys", "list"]).exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]
    away = CliRunner(env={"SWIFTKV_HOME": str(tmp_path), "SWIFTKV_DATABASE_URL": f"sqlite:///{tmp_path}"})
    listed = away.invoke(cli, ["keys", "list"])
    assert listed.exit_code == 0
    assert "Cannot read last uses" in listed.stderr
