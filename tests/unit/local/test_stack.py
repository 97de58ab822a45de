"""Choosing ports and directories for a local stack, and knowing what is dead; nothing is started here."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import psutil
import pytest

from swiftkv_platform.local import stack
from swiftkv_platform.local.processes import ProcessRef
from swiftkv_platform.local.ray_head import RayHead, ensure_token, free_ports, make_temp_dir
from swiftkv_platform.local.stack import Stack, StackOptions, StartError
from swiftkv_platform.local.state import RunDirectory, StackState
from swiftkv_platform.settings import Settings


def state(**changes: object) -> StackState:
    addresses = {name: f"http://127.0.0.1:{n}" for n, name in enumerate(("url", "serve_url", "ray_dashboard_url"), 1)}
    head = {"ray_port": 4, "ray_agent_port": 5, "ray_temp_dir": Path("/nonexistent"), "num_cpus": 4}
    return StackState.model_validate({**addresses, **head, "object_store_memory": 1, **changes})


def head(tmp_path: Path) -> RayHead:
    ports, limits = {"port": 4, "dashboard_port": 3, "agent_port": 5}, {"num_cpus": 4, "object_store_memory": 1}
    return RayHead(**ports, **limits, temp_dir=tmp_path, token_file=tmp_path / "token")


def test_packages_that_are_missing_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_SERVICES", ("json", "no_such_service"))
    home = tmp_path / "home"
    with pytest.raises(StartError, match=r"needs no_such_service; pip install 'swiftkv-platform\[train,serve\]'"):
        Stack(Settings(home=home, _env_file=None)).up(StackOptions(), print)
    assert not home.exists()


def test_the_temp_dir_is_short_enough_for_rays_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    directory = make_temp_dir()
    socket_path = directory / "session_2026-01-01_00-00-00_000000_4194304" / "sockets" / "plasma_store"
    try:
        assert len(str(socket_path)) <= 103
    finally:
        directory.rmdir()


def test_the_token_is_random_private_and_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    ensure_token(first)
    ensure_token(second)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    token = first.read_text()
    assert len(token) == 64
    assert token != second.read_text()
    ensure_token(first)
    assert first.read_text() == token


def test_the_head_is_told_of_no_other_cluster_and_its_token_stays_in_a_file(tmp_path: Path) -> None:
    ensure_token(tmp_path / "token")
    environment = head(tmp_path).environment({"RAY_ADDRESS": "10.0.0.1:6379", "PATH": "/bin"})
    assert "RAY_ADDRESS" not in environment
    assert environment["PATH"] == "/bin"
    token = (tmp_path / "token").read_text()
    assert token not in "".join(environment.values())
    assert token not in " ".join(head(tmp_path).command())


def test_wanted_ports_are_taken_where_they_are_free_and_differ_from_each_other() -> None:
    [port] = free_ports([0])
    assert free_ports([port]) == [port]
    assert len(set(free_ports([port, port, 0, 0, 0]))) == 5
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used = listener.getsockname()[1]
        assert free_ports([used]) != [used]


def test_state_survives_the_process_and_knows_the_living(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    me = psutil.Process()
    living = ProcessRef(pid=me.pid, created_at=me.create_time())
    dead = ProcessRef(pid=me.pid, created_at=me.create_time() - 1.0)
    with run.locked():
        run.save(state(parts={"ray": living, "control-plane": dead}))
    loaded = run.load()
    assert loaded is not None
    assert loaded.alive("ray")
    assert not loaded.alive("control-plane")
    assert (tmp_path / "run" / "ray.pid").read_text() == f"{os.getpid()}\n"
    run.clear()
    assert run.load() is None
    for text in ("", "{}", "not json"):  # nobody can read it
        with run.locked():
            (run.path / "state.json").write_text(text)
        assert run.load() is None


def test_a_home_that_never_saw_up_is_stopped(tmp_path: Path) -> None:
    stack = Stack(Settings(home=tmp_path / "home"))
    assert stack.state() is None
    assert {part.state for part in stack.status()} == {"stopped"}
    assert stack.down() == 0
    assert not (tmp_path / "home").exists()
