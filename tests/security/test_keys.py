"""Key and tenants files that break while a server runs: their last good version holds, and no answer tells of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import Request
from fastapi.testclient import TestClient
from structlog.testing import capture_logs
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app as cli
from swiftkv_platform.errors import InvalidInputError, UnauthenticatedError
from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.security.keys import KeyRing, Scope, create_key, revoke_key
from swiftkv_platform.serve.access import Gate
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import control_plane, make_parts

ALL = frozenset({Scope.ADMIN})

Break = Callable[[Path], None]


def half_written(path: Path) -> None:
    text = path.read_text()
    path.write_text(text[: len(text) // 2])


def missing(path: Path) -> None:
    path.unlink()


def unreadable(path: Path) -> None:
    """A directory in its place; root reads whatever its mode."""
    path.unlink()
    path.mkdir()


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def other_shape(path: Path) -> None:
    """A hash that is too short: the refusal of the whole names the value."""
    path.write_text(json.dumps({"keys": [{"name": "ann", "scopes": ["admin"], "sha256": "cafebabe" * 7}]}))


BREAKS = (half_written, missing, unreadable, no_text, other_shape)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "private-place" / "keys.json"


@pytest.fixture
def token(path: Path) -> str:
    return create_key(path, name="ann", tenant="acme", scopes=ALL)


@contextmanager
def plane(tmp_path: Path, empty_database: Path, keys: Path) -> Iterator[TestClient]:
    settings = Settings(home=tmp_path, api_keys_file=keys, _env_file=None)
    with control_plane(make_parts(tmp_path, empty_database), settings, "http://swiftkv.example") as client:
        yield client


@pytest.mark.parametrize("broken", BREAKS)
def test_a_key_file_that_breaks_serves_on_as_it_was(
    tmp_path: Path, empty_database: Path, path: Path, token: str, broken: Break
) -> None:
    with plane(tmp_path, empty_database, path) as client:
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
    assert "private-place" in str(warning), "the operator's log says which file"
    assert "cafebabe" not in str(warning)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_replica_serves_on_with_the_keys_it_had(path: Path, token: str, broken: Break) -> None:
    gate = Gate(KeyRing(path), tenant="acme")
    headers = [(b"authorization", f"Bearer {token}".encode())]
    request = Request({"type": "http", "method": "POST", "path": "/generate", "headers": headers, "state": {}})
    broken(path)
    assert gate.admit(request).tenant == "acme"


def test_a_key_file_that_was_mended_holds_again(path: Path, token: str) -> None:
    ring, kept = KeyRing(path), path.with_suffix(".bak")
    shutil.copy(path, kept)
    half_written(path)
    assert ring.authenticate(f"Bearer {token}").name == "ann"
    kept.replace(path)
    revoke_key(path, "ann")
    with pytest.raises(UnauthenticatedError):
        ring.authenticate(f"Bearer {token}")


def test_each_broken_version_is_logged_once(path: Path, token: str) -> None:
    ring = KeyRing(path)
    with capture_logs() as logs:
        for _ in range(2):
            half_written(path)
            for _ in range(5):
                ring.authenticate(f"Bearer {token}")
    assert len(logs) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_whose_mode_was_mended_is_read_again(path: Path, token: str) -> None:
    ring = KeyRing(path)
    create_key(path, name="bob", tenant="acme", scopes=ALL)
    path.chmod(0)
    assert ring.authenticate(f"Bearer {token}").name == "ann"
    path.chmod(0o600)
    assert [key.name for key in ring.read()] == ["ann", "bob"]


@pytest.mark.parametrize("broken", BREAKS)
def test_at_the_start_a_broken_file_is_the_operators_error(path: Path, token: str, broken: Break) -> None:
    broken(path)
    with pytest.raises(InvalidInputError, match="private-place") as caught:
        KeyRing(path)
    assert token not in str(caught.value)
    assert "cafebabe" not in str(caught.value)


@pytest.mark.parametrize("text", ["default: 2020-13-45\n", "{", "[" * 10_000, "default: {weight: -1}\n", "\x00"])
def test_a_tenants_file_that_breaks_serves_on_as_it_was(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("default: {max_running_jobs: 7}\n")
    tenants = Tenants(file)
    file.write_text(text)
    with capture_logs() as logs:
        assert {tenants.policy("acme").max_running_jobs for _ in range(3)} == {7}
    assert len(logs) == 1
    with pytest.raises(InvalidInputError, match=r"tenants\.yaml"):
        Tenants(file)
    file.write_text("default: {max_running_jobs: 8}\n")
    assert tenants.policy("acme").max_running_jobs == 8


def test_a_key_expires(tmp_path: Path, empty_database: Path, path: Path) -> None:
    now = 1000.0
    token = create_key(path, name="ann", tenant="acme", scopes=ALL, expires_at=2000)
    ring = KeyRing(path, clock=lambda: now)
    assert ring.authenticate(f"Bearer {token}").expires_at == 2000
    now = 2000.0
    with pytest.raises(UnauthenticatedError, match=r"key 'ann' expired at 1970-01-01 00:33:20 UTC"):
        ring.authenticate(f"Bearer {token}")
    past = create_key(path, name="bob", tenant="acme", scopes=ALL, expires_at=500)
    with plane(tmp_path, empty_database, path) as client:
        refused = client.get("/jobs", headers={"authorization": f"Bearer {past}"})
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
    assert "expired" in refused.json()["detail"]


@pytest.mark.parametrize(("text", "seconds"), [("90d", 90 * 86400), ("12h", 43200), ("30m", 1800), ("45s", 45)])
def test_the_operator_says_how_long_a_key_is_good(tmp_path: Path, text: str, seconds: int) -> None:
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})
    made = runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin", "--expires-in", text, "--json"])
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)["expires_at"]
    [key] = KeyRing(tmp_path / "keys.json").read()
    assert key.expires_at == told
    assert abs(told - (tmp_path / "keys.json").stat().st_mtime - seconds) < 60
    listed = runner.invoke(cli, ["keys", "list"]).stdout
    assert "expires" in listed
    assert json.loads(runner.invoke(cli, ["keys", "list", "--json"]).stdout)["keys"][0]["expires_at"] == told


@pytest.mark.parametrize("text", ["90", "d", "-1d", "1.5h", "0s", "999999999999d", "1y"])
def test_a_time_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})
    refused = runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin", f"--expires-in={text}"])
    assert refused.exit_code != 0
    assert "90d" in refused.output
    assert not (tmp_path / "keys.json").exists()
