"""A local stack: ports and directories, and background processes that are found by their mark and stopped."""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray._private import services

from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.local import stack
from swiftkv_platform.local.ray_head import RayHead, create_token, find_free_ports, make_temp_dir
from swiftkv_platform.local.stack import (
    MARK_VARIABLE,
    ProcessRef,
    RunDirectory,
    Stack,
    StackOptions,
    StackState,
    StartError,
    find_marked_processes,
    start_process,
    stop_marked_processes,
)
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
    monkeypatch.setattr(stack, "_REQUIRED_PACKAGES", ("json", "no_such_service"))
    home = tmp_path / "home"
    with pytest.raises(StartError, match=r"needs no_such_service; run pip install -e .*\[train,serve\]'"):
        Stack(Settings(home=home, _env_file=None)).up(StackOptions(), print)
    assert not home.exists()


def test_a_home_or_a_port_that_cannot_be_had_is_said_before_anything_starts(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(
        StartError, match=r"cannot use the home .*file/home .*; set SWIFTKV_HOME to another writable directory"
    ):
        Stack(Settings(home=blocked / "home", _env_file=None)).up(StackOptions(), print)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"port {port} is in use by another program; use another --port"):
            Stack(Settings(home=tmp_path / "home", _env_file=None)).up(StackOptions(port=port), print)
    assert RunDirectory(tmp_path / "home").load() is None


def test_a_full_disk_is_said_and_leaves_nothing_running_and_no_empty_token(tmp_path: Path) -> None:
    """A write to `/dev/full` fails with the kernel's own error for a full disk."""
    run, stack = RunDirectory(tmp_path), Stack(Settings(home=tmp_path, _env_file=None))
    run.path.mkdir()
    for name in ("ray-token.part", "state.json.part"):  # the second is written after Ray's head has started
        (run.path / name).symlink_to("/dev/full")
        said = r"cannot use the home .* \(No space left on device\); free disk space, or set SWIFTKV_HOME"
        with pytest.raises(StartError, match=said):
            stack.up(StackOptions(port=0), print)
        (run.path / name).unlink()
        assert find_marked_processes(str(tmp_path)) == []
        assert run.token_file.exists() == (name == "state.json.part")
    assert stack.down() == 0


@pytest.mark.integration("starts Ray's head, and stops it before it answers")
def test_up_that_is_told_to_end_says_so_and_stops_what_it_began(tmp_path: Path) -> None:
    """SIGTERM, as from `timeout 10 swiftkv up`, makes it stop what it started and say so."""
    command = [sys.executable, "-m", "swiftkv_platform.cli", "up", "--port", "0"]
    environment = {**os.environ, "SWIFTKV_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as up:
        until((tmp_path / "run" / "ray.pid").exists, "Ray's head was not started")
        up.terminate()
        _, said = up.communicate(timeout=120)
    assert (up.returncode, "Traceback" in said) == (143, False), said
    assert "Terminated by SIGTERM" in said.splitlines()[-1]
    assert find_marked_processes(str(tmp_path)) == []
    assert {part.state for part in Stack(Settings(home=tmp_path, _env_file=None)).status()} == {"stopped"}


def until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


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
    create_token(first)
    create_token(second)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    token = first.read_text()
    assert len(token) == 64
    assert token != second.read_text()
    create_token(first)
    assert first.read_text() == token


def test_the_head_is_told_of_no_other_cluster_and_its_token_stays_in_a_file(tmp_path: Path) -> None:
    create_token(tmp_path / "token")
    environment = head(tmp_path).build_environment({"RAY_ADDRESS": "10.0.0.1:6379", "PATH": "/bin"})
    assert "RAY_ADDRESS" not in environment
    assert environment["PATH"] == "/bin"
    assert environment.items() >= HIDE_UNRESERVED_GPUS.items()
    token = (tmp_path / "token").read_text()
    assert token not in "".join(environment.values())
    assert token not in " ".join(head(tmp_path).build_command())


def test_wanted_ports_are_taken_where_they_are_free_and_differ_from_each_other() -> None:
    [port] = find_free_ports([0])
    assert find_free_ports([port]) == [port]
    assert len(set(find_free_ports([port, port, 0, 0, 0]))) == 5
    with socket.create_server(("127.0.0.1", 0)) as listener:
        used = listener.getsockname()[1]
        assert find_free_ports([used]) != [used]


def test_state_survives_the_process_and_knows_the_living(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    me = psutil.Process()
    living = ProcessRef(pid=me.pid, created_at=me.create_time())
    dead = ProcessRef(pid=me.pid, created_at=me.create_time() - 1.0)
    with run.lock():
        run.save(state(parts={"ray": living, "control-plane": dead}))
    loaded = run.load()
    assert loaded is not None
    assert loaded.is_alive("ray")
    assert not loaded.is_alive("control-plane"), "its pid belongs to another process now"
    loaded.parts["control-plane"].terminate(grace_s=0.0)  # if it were taken for ours, this would end the test run
    assert (tmp_path / "run" / "ray.pid").read_text() == f"{os.getpid()}\n"
    run.clear()
    assert run.load() is None
    for text in ("", "{}", "not json"):  # unreadable
        with run.lock():
            (run.path / "state.json").write_text(text)
        assert run.load() is None


def test_a_home_that_never_saw_up_is_stopped(tmp_path: Path) -> None:
    stack = Stack(Settings(home=tmp_path / "home"))
    assert stack.load_state() is None
    assert {part.state for part in stack.status()} == {"stopped"}
    assert stack.down() == 0
    assert not (tmp_path / "home").exists()


def test_a_port_that_is_taken_is_refused_or_told_when_the_control_plane_alone_is_started_again(tmp_path: Path) -> None:
    stack, told = Stack(Settings(home=tmp_path, _env_file=None)), list[str]()
    (tmp_path / "logs").touch()  # so that nothing is started
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = state(url=f"http://127.0.0.1:{port}")
        with pytest.raises(StartError, match=f"port {port} is in use by another program"):
            stack._start_control_plane(taken, StackOptions(port=port), told.append)
        with pytest.raises(FileExistsError):
            stack._start_control_plane(taken, StackOptions(), told.append)
    assert f"Port {port} is in use; the control plane uses port " in told[-1]


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

SPAWN = """
import os, subprocess, sys, time
# A grandchild in a session of its own, whose parent is gone: no tree and no process group leads to it.
if os.fork() == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    os._exit(0)
os.wait()
print("spawned", flush=True)
time.sleep(600)
"""

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    stop_marked_processes(str(tmp_path), grace_s=0.0)


@pytest.fixture
def start(mark: str, tmp_path: Path) -> Callable[[list[str]], ProcessRef]:
    def start(command: list[str]) -> ProcessRef:
        return start_process(command, mark=mark, env=dict(os.environ), log=tmp_path / "log", cwd=tmp_path)

    return start


def until_logged(tmp_path: Path, text: str) -> None:
    until(lambda: text in (tmp_path / "log").read_text(), "the process did not start")


def test_a_started_process_is_alive_until_it_is_terminated(
    start: Callable[[list[str]], ProcessRef], mark: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("before\n")
    ref = start(SLEEP)
    assert ref.is_alive
    ref.terminate(grace_s=10.0)
    assert not ref.is_alive
    deaf = start([sys.executable, "-c", STUBBORN])
    until_logged(tmp_path, "deaf")
    assert (tmp_path / "log").read_text() == "before\ndeaf\n", "output is appended to the log"
    stop_marked_processes(mark, grace_s=0.2)
    assert not deaf.is_alive, "it ignores SIGTERM, so it is killed"


def test_stopping_reaches_orphans_in_other_sessions_and_no_process_of_another_mark(
    start: Callable[[list[str]], ProcessRef], mark: str, tmp_path: Path
) -> None:
    start([sys.executable, "-c", SPAWN])
    until_logged(tmp_path, "spawned")
    family = find_marked_processes(mark)
    assert len(family) == 2
    with subprocess.Popen(SLEEP, env={**os.environ, MARK_VARIABLE: f"{mark}-other"}) as foreign:
        try:
            assert stop_marked_processes(mark, grace_s=10.0) == 2
            assert foreign.poll() is None
        finally:
            foreign.kill()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_a_part_that_fails_is_started_once_more_and_the_error_is_one_line(tmp_path: Path) -> None:
    own, told = Stack(Settings(home=tmp_path, _env_file=None)), list[str]()
    (tmp_path / "run").mkdir()
    count = tmp_path / "starts"
    program = f"open({str(count)!r}, 'a').write('x'); raise TimeoutError('the node did not answer')"
    with pytest.raises(StartError) as refused:
        own._start_and_wait(state(), "ray", [sys.executable, "-c", program], {}, told.append)
    assert count.read_text() == "xx"
    assert told[0].endswith("; starting it once more")
    assert "\n" not in refused.value.message
    assert "Traceback" not in refused.value.message
    assert "TimeoutError: the node did not answer" in refused.value.message
    assert "of memory available" in refused.value.message
    assert f"on {os.cpu_count()} CPUs" in refused.value.message


def test_rays_wait_for_its_node_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = replace(head(tmp_path), start_timeout_s=12.0).build_environment({})
    assert environment["RAY_NUM_REDIS_GET_RETRIES"] == "12"
    module, _, name = environment["RAY_START_HOOK"].rpartition(".")
    monkeypatch.setenv("SWIFTKV_START_TIMEOUT_S", environment["SWIFTKV_START_TIMEOUT_S"])
    calls: list[int] = []

    def get_node(*_: object) -> str:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("not registered")
        return "node"

    monkeypatch.setattr(services, "get_node", get_node)
    getattr(import_module(module), name)(SimpleNamespace(), head=True)
    assert services.get_node("address", "id") == "node"
    assert len(calls) == 3
