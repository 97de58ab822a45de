"""Last uses of keys: kept to the minute, written once a minute, shown to the operator, and never in a request's way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event
from typer.testing import CliRunner

from swiftkv_platform.api.sessions import KeyUses
from swiftkv_platform.cli.app import app as cli
from swiftkv_platform.database.access import SqlKeyUses
from swiftkv_platform.database.session import Database
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.security.keys import KeyRing, Scope, create_key, rotate_key
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import control_plane, make_parts
from tests.unit.orchestration.conftest import Clock

READ = frozenset({Scope.JOBS_READ})


def test_a_use_is_written_once_a_minute(tmp_path: Path, empty_database: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    first = create_key(path, name="ann", tenant="acme", scopes=READ)
    second, _ = rotate_key(path, "ann", now=1000, overlap_s=10**6)
    old, new = KeyRing(path).read()
    parts = replace(make_parts(tmp_path, empty_database), clock=clock)
    written = []

    def count(*args: object) -> None:
        if "key_uses" in str(args[2]) and not str(args[2]).startswith("SELECT"):
            written.append(args[2])

    event.listen(parts.database._engine, "before_cursor_execute", count)
    settings = Settings(home=tmp_path, api_keys_file=path, _env_file=None)
    began = int(clock.now)
    with control_plane(parts, settings, "http://swiftkv.example") as client:
        for _ in range(5):
            client.get("/jobs", headers={"authorization": f"Bearer {first}"})
            clock.now += 10.0
        assert SqlKeyUses(parts.database).all() == {old.id: began}
        assert len(written) == 1
        clock.now += 10.0
        client.get("/jobs", headers={"authorization": f"Bearer {second}"})
        client.get("/jobs", headers={"authorization": f"Bearer {first}"})
        client.get("/jobs", headers={"authorization": "Bearer skv_unknown"})
        assert SqlKeyUses(parts.database).all() == {old.id: began + 60, new.id: began + 60}


def test_two_control_planes_write_one_use_a_minute(database: Database, tmp_path: Path) -> None:
    create_key(tmp_path / "keys.json", name="ann", tenant="acme", scopes=READ)
    [key] = KeyRing(tmp_path / "keys.json").read()
    store = SqlKeyUses(database)
    KeyUses(store, lambda: 1000.0).note(key)
    KeyUses(store, lambda: 1059.0).note(key)
    assert store.all() == {key.id: 1000}
    KeyUses(store, lambda: 1060.0).note(key)
    assert store.all() == {key.id: 1060}


def test_no_request_fails_for_a_use_that_cannot_be_stored(tmp_path: Path) -> None:
    create_key(tmp_path / "keys.json", name="ann", tenant="acme", scopes=READ)
    [key] = KeyRing(tmp_path / "keys.json").read()
    store = SqlKeyUses(Database(f"sqlite:///{tmp_path}"))  # a directory
    with pytest.raises(DatabaseUnavailableError):
        store.all()
    KeyUses(store, lambda: 1000.0).note(key)


def test_the_operator_sees_the_last_use_of_each_key(tmp_path: Path, empty_database: Path) -> None:
    (tmp_path / "swiftkv.db").write_bytes(empty_database.read_bytes())
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})
    made = json.loads(runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin", "--json"]).stdout)
    rotated = runner.invoke(cli, ["keys", "rotate", "ann", "--overlap", "2d", "--json"])
    assert rotated.exit_code == 0, rotated.output
    new = json.loads(rotated.stdout)
    SqlKeyUses(Database(f"sqlite:///{tmp_path / 'swiftkv.db'}")).note(made["id"], 1000.0, at_least_s=60.0)
    listed = json.loads(runner.invoke(cli, ["keys", "list", "--json"]).stdout)["keys"]
    assert [(key["id"], key["last_used_at"]) for key in listed] == [(made["id"], 1000), (new["id"], None)]
    assert listed[0]["expires_at"] is not None
    table = runner.invoke(cli, ["keys", "list"]).stdout
    assert "last used" in table
    assert made["id"] in table
    assert runner.invoke(cli, ["keys", "revoke", made["id"]]).exit_code == 0
    assert [key["id"] for key in json.loads(runner.invoke(cli, ["keys", "list", "--json"]).stdout)["keys"]] == [
        new["id"]
    ]


def test_keys_are_listed_without_a_database_and_make_none(tmp_path: Path) -> None:
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})
    runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin"])
    assert runner.invoke(cli, ["keys", "list"]).exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]
    away = CliRunner(env={"SWIFTKV_HOME": str(tmp_path), "SWIFTKV_DATABASE_URL": f"sqlite:///{tmp_path}"})
    listed = away.invoke(cli, ["keys", "list"])
    assert listed.exit_code == 0
    assert "Last uses are unknown" in listed.stderr
