"""Keys that were created are required: by a control plane, by deployments and by `swiftkv up`, without a setting."""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app as cli
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.demo import make_demo_settings
from swiftkv_platform.local.stack import ProcessRef, RunDirectory, Stack, StackOptions, StartError
from swiftkv_platform.security.keys import Scope, create_key, revoke_key
from swiftkv_platform.serve.args import ReplicaArgs, ServedConfig
from swiftkv_platform.settings import Settings
from tests.unit.local.test_stack import state

OPERATORS = re.compile("SWIFTKV_.*_FILE$")
ADMIN = frozenset({Scope.ADMIN})


def status(client: TestClient, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return client.get("/jobs", headers=headers).status_code


def test_a_control_plane_requires_the_keys_of_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTKV_HOME", str(tmp_path))  # as for `python -m swiftkv_platform.control_plane`
    with TestClient(create_app(Settings(_env_file=None)), "http://127.0.0.1:8000") as client:
        assert [status(client, key) for key in (None, "wrong")] == [200, 200], "there is no key yet"
    key = create_key(tmp_path / "keys.json", name="ann", tenant="default", scopes=ADMIN)
    with TestClient(create_app(Settings(_env_file=None)), "http://127.0.0.1:8000") as client:
        assert [status(client, each) for each in (None, "wrong", key)] == [401, 401, 200]
        revoke_key(tmp_path / "keys.json", "ann")
        assert [status(client, each) for each in (None, key)] == [401, 401], "without a key left it stays closed"
        (tmp_path / "keys.json").unlink()
        assert status(client, None) == 401, "a deleted file does not open it"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"keys": [{}]}', "directory", "dangling link"])
def test_a_file_of_keys_that_cannot_be_used_keeps_it_from_starting(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    if content == "directory":
        file.mkdir()
    elif content == "dangling link":
        file.symlink_to(tmp_path / "nowhere")
    else:
        file.write_text(content)
    settings = Settings(home=tmp_path, _env_file=None)
    with pytest.raises(InvalidInputError, match=r"keys\.json' cannot be used"):
        create_app(settings)
    with pytest.raises(InvalidInputError, match=r"keys\.json' cannot be used"):
        Stack(settings).up(StackOptions(), print)
    assert RunDirectory(tmp_path).load() is None


def test_a_home_that_cannot_be_looked_into_counts_as_one_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: object) -> os.stat_result:
        raise PermissionError

    monkeypatch.setattr("swiftkv_platform.settings.os.lstat", denied)
    assert Settings(home=tmp_path, _env_file=None).api_keys_file == tmp_path / "keys.json"


def test_deployments_require_the_same_keys_where_ray_is_on_this_machine(tmp_path: Path) -> None:
    keys, issuers, other = tmp_path / "keys.json", tmp_path / "issuers.yaml", tmp_path / "other.json"
    create_key(keys, name="ann", tenant="default", scopes=ADMIN)

    def files(**given: object) -> tuple[Path | None, Path | None]:
        chosen = Settings.model_validate({"home": tmp_path, "oidc_file": issuers, **given})
        return chosen.serve_api_keys_file, chosen.serve_oidc_file

    assert files() == files(ray_dashboard_url="http://[::1]:8265") == (keys, issuers)
    assert files(ray_dashboard_url="http://head:8265") == files(serve_dashboard_url="http://10.0.0.7:1") == (None, None)
    assert files(serve_api_keys_file=other) == (other, issuers)


def test_an_empty_variable_does_not_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTKV_API_KEYS_FILE", "")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        create_app(Settings(home=tmp_path, _env_file=None))


def test_up_passes_all_files_on_and_the_demo_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWIFTKV_API_KEYS_FILE", "mine.json")
    monkeypatch.setenv("SWIFTKV_TENANTS_FILE", "tenants.yaml")
    passed = Stack(Settings(home=tmp_path / "home", _env_file=None))._build_environment(state(), 1)
    assert {name: value for name, value in passed.items() if OPERATORS.match(name)} == {
        "SWIFTKV_API_KEYS_FILE": str(tmp_path / "mine.json"),
        "SWIFTKV_SERVE_API_KEYS_FILE": str(tmp_path / "mine.json"),
        "SWIFTKV_TENANTS_FILE": str(tmp_path / "tenants.yaml"),
    }, "absolute, since the control plane runs in the home"
    passed = Stack(make_demo_settings(tmp_path / "demo"))._build_environment(state(), 1)
    assert [name for name in passed if OPERATORS.match(name)] == []


def test_up_does_not_start_without_keys_that_it_had(tmp_path: Path) -> None:
    run, keys = RunDirectory(tmp_path), tmp_path / "keys.json"
    with run.lock():
        run.save(state(operator_files={"api_keys_file": keys}))
    stack = Stack(Settings(home=tmp_path, _env_file=None))
    with pytest.raises(
        StartError,
        match=r"the last `swiftkv up` used .*keys\.json, which is missing or no longer configured; .*swiftkv down",
    ):
        stack.up(StackOptions(), print)
    stack.down()
    assert stack.load_state() is None, "from here on it starts without"


def create(home: Path, *options: str) -> tuple[bool, str]:
    """Create a key by the command; return whether it is required now, and what the command says."""
    runner = CliRunner(env={"SWIFTKV_HOME": str(home)})
    said = runner.invoke(cli, ["keys", "create", "ann", "--scope", "admin", *options])
    assert said.exit_code == 0, said.output
    token = said.stdout.strip()
    assert token not in said.stderr, "scripts keep stderr in logs"
    assert "export SWIFTKV_API_KEY=skv_..." in said.stderr
    made = json.loads(runner.invoke(cli, ["keys", "create", "bob", "--scope", "admin", *options, "--json"]).stdout)
    assert made["advice"] in said.stderr
    return made["keys_required"], made["advice"]


def test_a_new_key_says_whether_it_is_in_force(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other.json"
    assert create(home) == (
        False,
        "Requests need a key after the next `swiftkv up`. If the control plane runs on another machine, copy the file "
        "there.",
    )
    required, advice = create(home, "--file", str(other))
    assert (required, f"set SWIFTKV_API_KEYS_FILE={other}" in advice) == (False, True)

    me, run = psutil.Process(), RunDirectory(home)
    parts = {"control-plane": ProcessRef(pid=me.pid, created_at=me.create_time())}
    (home / "keys.json").unlink()
    with run.lock():
        run.save(state(parts=parts))
    required, advice = create(home)
    assert (required, "run `swiftkv up` to restart it with this file" in advice) == (False, True)
    (home / "keys.json").unlink()
    with run.lock():
        run.save(state(parts=parts, operator_files={"api_keys_file": home / "keys.json"}))
    assert create(home) == (True, "The running control plane reads the file at the next request.")
    assert stat.S_IMODE((home / "keys.json").stat().st_mode) == 0o600


def test_a_model_served_alone_requires_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []

    def answer(
        served: ServedConfig, args: ReplicaArgs, *, host: str, port: int, on_ready: Callable[[str], None]
    ) -> None:
        given.append(args.api_keys_file)
        on_ready("http://127.0.0.1:1")

    monkeypatch.setattr("swiftkv_platform.serve.standalone.serve_model", answer)
    runner = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)})
    said = runner.invoke(cli, ["serve", "builtin:python-5m", "--host", "0.0.0.0"])
    assert "Other machines need no API key" in said.output
    create_key(tmp_path / "keys.json", name="ann", tenant="default", scopes=ADMIN)
    said = runner.invoke(cli, ["serve", "builtin:python-5m"])
    assert f"Requests need an API key from {tmp_path / 'keys.json'}" in said.output.replace("\n", " ")
    assert given == [None, str(tmp_path / "keys.json")]
