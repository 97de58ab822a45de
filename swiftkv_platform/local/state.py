"""Background processes of a stack, and its state in `{home}/run`.

Every process of a stack has the stack's mark in its environment, and its children inherit it. `swiftkv down` finds all
of them by the mark, whatever their session, group or parent.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

MARK_VARIABLE = "SWIFTKV_STACK"
"""Environment variable of the mark."""

_KILL_WAIT_S = 10.0


class ProcessRef(BaseModel):
    """A process, identified by pid and creation time, since pids are reused."""

    model_config = ConfigDict(frozen=True)

    pid: int
    created_at: float
    """Unix seconds, as the kernel reports them."""

    @property
    def is_alive(self) -> bool:
        return self._find_process() is not None

    def terminate(self, grace_s: float) -> None:
        """Stop this process: SIGTERM, then SIGKILL after `grace_s` seconds."""
        process = self._find_process()
        if process is not None:
            _stop_processes([process], grace_s)

    def _find_process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            is_same = process.create_time() == self.created_at and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if is_same else None


def start_process(command: Sequence[str], *, mark: str, env: Mapping[str, str], log: Path, cwd: Path) -> ProcessRef:
    """Start a background command in its own session. Its output is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env={**env, MARK_VARIABLE: mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    ref = ProcessRef(pid=child.pid, created_at=psutil.Process(child.pid).create_time())
    # Keeps Popen from warning about a running process.
    child.returncode = 0
    return ref


def find_marked_processes(mark: str) -> list[psutil.Process]:
    """Return all running processes with this mark, except this process and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(MARK_VARIABLE) == mark and process.is_running():
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            # Another user's process, a kernel thread or an ended process.
            continue
    return found


def stop_marked_processes(mark: str, *, grace_s: float) -> int:
    """Stop all processes with this mark: SIGTERM, then SIGKILL after `grace_s` seconds. Returns their number."""
    deadline = time.monotonic() + _KILL_WAIT_S + grace_s
    seen: set[int] = set()
    # Repeat until none is left: processes may start others meanwhile.
    while (processes := find_marked_processes(mark)) and time.monotonic() < deadline:
        seen.update(process.pid for process in processes)
        _stop_processes(processes, grace_s)
        grace_s = 0.0
    return len(seen)


def _stop_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    processes = list(processes)
    _send_signal(processes, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    _send_signal(alive, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=_KILL_WAIT_S)


def _send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


PartName = Literal["ray", "control-plane"]
PARTS: tuple[PartName, ...] = ("ray", "control-plane")


class StackState(BaseModel):
    """Addresses, resources and processes of a stack."""

    model_config = ConfigDict(frozen=True)

    url: str
    """Address of the control plane."""
    serve_url: str
    ray_dashboard_url: str
    ray_port: int
    ray_agent_port: int
    ray_temp_dir: Path
    num_cpus: int
    object_store_memory: int
    """Bytes."""
    operator_files: dict[str, Path] = {}
    """Files that the control plane was started with, e.g. API keys, by setting."""
    parts: dict[PartName, ProcessRef] = {}

    def is_alive(self, name: PartName) -> bool:
        return name in self.parts and self.parts[name].is_alive


@dataclass(frozen=True)
class PartStatus:
    """One row of `swiftkv status`."""

    name: str
    state: Literal["running", "not ready", "idle", "stopped"]
    address: str = ""
    pid: int | None = None
    detail: str = ""


class RunDirectory:
    """`{home}/run`: `state.json`, one pid file per part, Ray's token and a lock."""

    def __init__(self, home: Path) -> None:
        self.path = home / "run"
        self.token_file = self.path / "ray-token"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of `up` and `down` within the context."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def load(self) -> StackState | None:
        """Load the state; None without a stack, or if another version wrote an incompatible state."""
        try:
            return StackState.model_validate_json((self.path / "state.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None

    def save(self, state: StackState) -> None:
        partial = self.path / "state.json.part"
        partial.write_text(state.model_dump_json(indent=2), encoding="utf-8")
        partial.replace(self.path / "state.json")
        for name, part in state.parts.items():
            (self.path / f"{name}.pid").write_text(f"{part.pid}\n", encoding="ascii")

    def clear(self) -> None:
        (self.path / "state.json").unlink(missing_ok=True)
        for name in PARTS:
            (self.path / f"{name}.pid").unlink(missing_ok=True)


def parse_port(url: str) -> int:
    """Return the port in a URL; 0 if it has none."""
    return urlsplit(url).port or 0
