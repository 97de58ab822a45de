"""Background processes are found by their mark alone, and stopped to the last child."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from swiftkv_platform.local import processes
from swiftkv_platform.local.processes import ProcessRef

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
    processes.stop_marked(str(tmp_path), grace_s=0.0)


@pytest.fixture
def start(mark: str, tmp_path: Path) -> Callable[[list[str]], ProcessRef]:
    def start(command: list[str]) -> ProcessRef:
        return processes.start(command, mark=mark, env=dict(os.environ), log=tmp_path / "log", cwd=tmp_path)

    return start


def until_logged(tmp_path: Path, text: str) -> None:
    deadline = time.monotonic() + 30.0
    while text not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline, "the process did not start"
        time.sleep(0.02)


def test_a_started_process_is_alive_until_it_is_terminated(
    start: Callable[[list[str]], ProcessRef], mark: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("before\n")
    ref = start(SLEEP)
    assert ref.alive
    ref.terminate(grace_s=10.0)
    assert not ref.alive
    deaf = start([sys.executable, "-c", STUBBORN])
    until_logged(tmp_path, "deaf")
    assert (tmp_path / "log").read_text() == "before\ndeaf\n", "output is appended"
    processes.stop_marked(mark, grace_s=0.2)
    assert not deaf.alive, "it has ignored SIGTERM"


def test_a_pid_given_to_another_process_is_not_ours() -> None:
    own = psutil.Process()
    assert ProcessRef(pid=own.pid, created_at=own.create_time()).alive
    stale = ProcessRef(pid=own.pid, created_at=own.create_time() - 1.0)
    assert not stale.alive
    stale.terminate(grace_s=0.0)  # would end this test run


def test_stopping_reaches_orphans_in_other_sessions_and_no_process_of_another_mark(
    start: Callable[[list[str]], ProcessRef], mark: str, tmp_path: Path
) -> None:
    start([sys.executable, "-c", SPAWN])
    until_logged(tmp_path, "spawned")
    family = processes.marked(mark)
    assert len(family) == 2
    with subprocess.Popen(SLEEP, env={**os.environ, processes.MARK: f"{mark}-other"}) as foreign:
        try:
            assert processes.stop_marked(mark, grace_s=10.0) == 2
            assert foreign.poll() is None
        finally:
            foreign.kill()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
