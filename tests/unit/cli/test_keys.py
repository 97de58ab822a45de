"""`swiftkv keys` on a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.security.keys import KeyRing


def test_a_key_is_created_listed_and_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTKV_HOME", str(tmp_path))
    runner = CliRunner()
    arguments = ["keys", "create", "ann", "--tenant", "acme", "--scope", "jobs:read", "--scope", "deploy", "--json"]
    made = json.loads(runner.invoke(app, arguments).stdout)
    key = KeyRing(tmp_path / "keys.json").authenticate(f"Bearer {made['key']}")
    assert (key.name, key.tenant, sorted(key.scopes)) == ("ann", "acme", ["deploy", "jobs:read"])

    listed = runner.invoke(app, ["keys", "list"]).stdout
    assert "acme" in listed
    assert made["key"] not in listed
    assert runner.invoke(app, ["keys", "revoke", "ann"]).exit_code == 0
    assert json.loads(runner.invoke(app, ["keys", "list", "--json"]).stdout) == {"keys": []}
