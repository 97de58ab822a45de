"""Start, check and stop the local platform: Ray head and control plane.

The first deployment starts Ray Serve inside Ray, at the address that `up` chose.

The state of a stack is in `{home}/run`. Every process of a stack has the stack's mark in its environment, and its
children inherit it. `swiftkv down` finds all of them by the mark, whatever their session, group or parent.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from swiftkv_platform.client import Client
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.local.formats import format_size
from swiftkv_platform.local.ray_head import RayHead, create_token, find_free_ports, make_auth_environment, make_temp_dir
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.keys import open_credentials
from swiftkv_platform.settings import Settings, is_loopback

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


_POLL_INTERVAL_S = 0.25
_HEALTH_TIMEOUT_S = 15.0
"""More than the control plane's timeout of 10 s per dependency."""
_REQUIRED_PACKAGES = ("alembic", "fastapi", "obstore", "ray", "sqlalchemy", "uvicorn")
"""Packages that only the platform needs, not the client and the command line."""
_STOP_TIMEOUT_S = 3.0
"""Seconds between SIGTERM and SIGKILL. Ray would take half a minute, and has nothing to save."""
_ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
"""Matches the last line of a traceback."""
OPERATOR_FILES = ("api_keys_file", "oidc_file", "serve_api_keys_file", "serve_oidc_file", "tenants_file", "secrets_dir")
"""Settings of the operator's files and directories."""

Report = Callable[[str], None]


class StartError(SwiftKVError):
    """A part did not start; the message has the cause, load and free memory."""

    code = "start_failed"


@dataclass(frozen=True)
class StackOptions:
    """Options of `up`. Running parts keep their options."""

    port: int | None = None
    """Port of the control plane. None: the last port or the settings' if free; 0: any."""
    num_cpus: int | None = None
    """CPUs that Ray schedules. None: the machine's, min 4, so that a job and a replica fit on small machines."""
    object_store_memory: int = 200 << 20
    """Bytes."""


class Stack:
    """The platform of one home directory, `settings.home`. Of the addresses in `settings`, only the ports are used; a
    port in use is replaced by a free one."""

    def __init__(self, settings: Settings) -> None:
        self.home = settings.home.expanduser().resolve()
        self._settings = settings.model_copy(update={"home": self.home})
        self.logs = self.home / "logs"
        self._run_directory = RunDirectory(self.home)
        self._mark = str(self.home)

    def load_state(self) -> StackState | None:
        """Load the state of the last `up`; None after `down`."""
        return self._run_directory.load()

    @property
    def token_file(self) -> Path:
        """File with Ray's auth token."""
        return self._run_directory.token_file

    def up(self, options: StackOptions, report: Report) -> StackState:
        """Start stopped parts and wait until all are ready. `report` receives a line per step.

        Raises:
            InvalidInputError: invalid file of API keys or issuers; nothing was changed.
            StartError: packages are missing, the home is not writable, `options.port` is in use, or a part did not
                start; started parts are stopped.
        """
        _check_packages()
        try:
            return self._start(options, report)
        except OSError as error:
            advice = "free disk space, or set" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "set"
            raise StartError(
                f"cannot use the home {self.home} ({error.strerror or error}); {advice} SWIFTKV_HOME to another "
                "writable directory",
                field="home",
                value=str(self.home),
            ) from error

    def _start(self, options: StackOptions, report: Report) -> StackState:
        with self._run_directory.lock():
            create_token(self._run_directory.token_file)
            state = self._run_directory.load()
            self._check_operator_files({} if state is None else state.operator_files)
            if state is None or not state.is_alive("ray"):
                # Without the head, remaining processes only occupy the ports.
                self._stop_all(state)
                state = self._choose_addresses(options, state, report)
            before = state
            try:
                return self._start_control_plane(self._start_ray(state, report), options, report)
            except BaseException:
                self._stop_newly_started(before)
                raise

    def _check_operator_files(self, last: Mapping[str, Path]) -> None:
        """Check the files of API keys and issuers before parts are stopped. Raises `InvalidInputError` for an invalid
        file, and `StartError` if a file of the last start is missing: deleting it must not open the platform.
        """
        files = self._resolve_operator_files()
        for name in last.keys() - files.keys():
            raise StartError(
                f"the last `swiftkv up` used {last[name]}, which is missing or no longer configured; restore it, or "
                "run `swiftkv down` first to start without it",
                field=name,
                value=str(last[name]),
            )
        open_credentials(files.get("api_keys_file"), files.get("oidc_file"))

    def down(self) -> int:
        """Stop all processes of this home. Returns their number."""
        if not self._run_directory.path.is_dir():
            return 0
        with self._run_directory.lock():
            count = self._stop_all(self._run_directory.load())
            self._run_directory.clear()
            return count

    def status(self) -> list[PartStatus]:
        """Return the status of Ray, control plane and Ray Serve."""
        state = self._run_directory.load()
        if state is None:
            return [PartStatus(name, "stopped") for name in (*PARTS, "serve")]
        return [
            self._get_part_status(state, "ray", state.ray_dashboard_url),
            self._get_part_status(state, "control-plane", state.url),
            _get_serve_status(state),
        ]

    def _choose_addresses(self, options: StackOptions, last: StackState | None, report: Report) -> StackState:
        """Choose addresses: the last start's addresses (first start: the settings') if free, else any."""
        if last is None:
            preferred = [
                self._settings.port,
                parse_port(self._settings.serve_url),
                parse_port(self._settings.ray_dashboard_url),
            ]
        else:
            preferred = [parse_port(url) for url in (last.url, last.serve_url, last.ray_dashboard_url)]
        if options.port is not None:
            preferred[0] = options.port
        port, serve_port, dashboard_port, ray_port, agent_port = find_free_ports([*preferred, 0, 0])
        _report_port_change(preferred[0], port, options, report)
        return StackState(
            url=f"http://127.0.0.1:{port}",
            serve_url=f"http://127.0.0.1:{serve_port}",
            ray_dashboard_url=f"http://127.0.0.1:{dashboard_port}",
            ray_port=ray_port,
            ray_agent_port=agent_port,
            ray_temp_dir=make_temp_dir(),
            num_cpus=options.num_cpus or max(4, os.cpu_count() or 1),
            object_store_memory=options.object_store_memory,
        )

    def _start_ray(self, state: StackState, report: Report) -> StackState:
        if state.is_alive("ray"):
            self._wait_ready(state, "ray")
            report(f"Ray is already running (Ray dashboard: {state.ray_dashboard_url})")
            return state
        report("Starting Ray")
        head = self._make_ray_head(state)
        command, environment = head.build_command(), head.build_environment(os.environ)
        state = self._start_and_wait(state, "ray", command, environment, report)
        report(f"Ray is ready (Ray dashboard: {state.ray_dashboard_url})")
        return state

    def _start_control_plane(self, state: StackState, options: StackOptions, report: Report) -> StackState:
        files = self._resolve_operator_files()
        if state.is_alive("control-plane") and files == state.operator_files:
            self._wait_ready(state, "control-plane")
            report(f"The control plane is already running: dashboard and API at {state.url}")
            return state
        if state.is_alive("control-plane"):
            report("Restarting the control plane with changed files (API keys, issuers, tenants or secrets)")
            state.parts["control-plane"].terminate(_STOP_TIMEOUT_S)
        else:
            report("Starting the control plane")
        preferred = options.port or parse_port(state.url)
        [port] = find_free_ports([preferred])
        _report_port_change(preferred, port, options, report)
        if not is_loopback(self._settings.host):
            report(f"Ignoring SWIFTKV_HOST={self._settings.host}: `swiftkv up` listens on 127.0.0.1 only")
        state = state.model_copy(update={"url": f"http://127.0.0.1:{port}", "operator_files": files})
        command = [sys.executable, "-m", "swiftkv_platform.control_plane"]
        state = self._start_and_wait(state, "control-plane", command, self._build_environment(state, port), report)
        report(f"The control plane is ready: dashboard and API at {state.url}")
        if keys := files.get("api_keys_file"):
            report(f"Requests need an API key from {keys}: export SWIFTKV_API_KEY=skv_...")
        return state

    def _build_environment(self, state: StackState, port: int) -> dict[str, str]:
        """Return the control plane's environment: this process's, with the stack's addresses and files."""
        unset = {f"SWIFTKV_{name.upper()}" for name in OPERATOR_FILES}
        return {
            **{name: value for name, value in os.environ.items() if name.upper() not in unset},
            **make_auth_environment(self._run_directory.token_file),
            **{f"SWIFTKV_{name.upper()}": str(path) for name, path in self._resolve_operator_files().items()},
            "SWIFTKV_HOME": str(self.home),
            "SWIFTKV_HOST": "127.0.0.1",
            "SWIFTKV_PORT": str(port),
            "SWIFTKV_RAY_DASHBOARD_URL": state.ray_dashboard_url,
            "SWIFTKV_SERVE_URL": state.serve_url,
            "SWIFTKV_DATABASE_URL": self._settings.resolved_database_url,
            "SWIFTKV_STORAGE_URI": self._settings.resolved_storage_uri,
        }

    def _resolve_operator_files(self) -> dict[str, Path]:
        """Return the operator's files by setting, as absolute paths. Deployments use the control plane's files by
        default, since Ray runs on this machine."""
        given = {name: getattr(self._settings, name) for name in OPERATOR_FILES}
        for name in ("api_keys_file", "oidc_file"):
            given[f"serve_{name}"] = given[f"serve_{name}"] or given[name]
        return {name: path.expanduser().absolute() for name, path in given.items() if path is not None}

    def _start_and_wait(
        self, state: StackState, name: PartName, command: Sequence[str], env: Mapping[str, str], report: Report
    ) -> StackState:
        """Start a part and wait until it is ready. Starts it once more if it fails, e.g. on a busy machine."""
        started = self._start_part(state, name, command, env)
        try:
            self._wait_ready(started, name)
        except StartError as error:
            report(f"{error.message}; starting it once more")
            if name == "ray":
                stop_marked_processes(self._mark, grace_s=_STOP_TIMEOUT_S)  # also what Ray has started
            else:
                started.parts[name].terminate(_STOP_TIMEOUT_S)
            started = self._start_part(state, name, command, env)
            self._wait_ready(started, name)
        return started

    def _start_part(
        self, state: StackState, name: PartName, command: Sequence[str], env: Mapping[str, str]
    ) -> StackState:
        log = self._get_log_path(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        part = start_process(command, mark=self._mark, env=env, log=log, cwd=self.home)
        state = state.model_copy(update={"parts": {**state.parts, name: part}})
        self._run_directory.save(state)
        return state

    def _wait_ready(self, state: StackState, name: PartName) -> None:
        timeout_s = self._settings.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while (problem := self._find_problem(state, name)) is not None:
            if not state.is_alive(name):
                raise self._make_start_error(name, "has exited")
            if time.monotonic() > deadline:
                raise self._make_start_error(
                    name, f"is not ready after {timeout_s:g} s (SWIFTKV_START_TIMEOUT_S): {problem}"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _make_start_error(self, name: PartName, problem: str) -> StartError:
        log = self._get_log_path(name)
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        cause = next((line for line in reversed(lines) if _ERROR_LINE.match(line)), lines[-1] if lines else "no output")
        return StartError(
            f"{name} {problem}. Last error in {log}: {cause}. {describe_system_load()}. `swiftkv doctor` shows more"
        )

    def _stop_newly_started(self, before: StackState) -> None:
        """Stop the parts started since the state `before`."""
        if not before.is_alive("ray"):
            self._stop_all(self._run_directory.load() or before)
            self._run_directory.clear()
            return
        now = self._run_directory.load()
        if now is not None and not before.is_alive("control-plane") and "control-plane" in now.parts:
            now.parts["control-plane"].terminate(_STOP_TIMEOUT_S)

    def _stop_all(self, state: StackState | None) -> int:
        """Stop all processes of this home and clean up after Ray. Returns the number of processes."""
        control_plane = 0
        if state is not None and state.is_alive("control-plane"):
            # Stop it before Ray: it would report Ray's end as job failures.
            state.parts["control-plane"].terminate(_STOP_TIMEOUT_S)
            control_plane = 1
        count = stop_marked_processes(self._mark, grace_s=_STOP_TIMEOUT_S)
        if state is not None:
            self._save_ray_logs(state.ray_temp_dir)
        return count + control_plane

    def _save_ray_logs(self, temp_dir: Path) -> None:
        """Copy the logs of Ray's session to `logs/ray-session`, and delete Ray's directory."""
        session = temp_dir / "session_latest" / "logs"
        if session.is_dir():
            target = self.logs / "ray-session"
            shutil.rmtree(target, ignore_errors=True)
            try:
                shutil.copytree(session, target, ignore_dangling_symlinks=True)
            except OSError as error:  # e.g. a full disk, which must not stop `down`
                get_logger().warning("Ray's logs not copied", directory=str(target), error=str(error))
        shutil.rmtree(temp_dir, ignore_errors=True)

    def _make_ray_head(self, state: StackState) -> RayHead:
        return RayHead(
            port=state.ray_port,
            dashboard_port=parse_port(state.ray_dashboard_url),
            agent_port=state.ray_agent_port,
            temp_dir=state.ray_temp_dir,
            token_file=self._run_directory.token_file,
            num_cpus=state.num_cpus,
            object_store_memory=state.object_store_memory,
            start_timeout_s=self._settings.start_timeout_s,
        )

    def _find_problem(self, state: StackState, name: PartName) -> str | None:
        """Return why a part is not ready; None if it is ready."""
        if name == "ray":
            return None if self._make_ray_head(state).is_ready() else "no response, or no live node"
        try:
            with Client(state.url, max_retries=0, timeout=_HEALTH_TIMEOUT_S) as client:
                client.ready()
        except SwiftKVError as error:
            return error.message.splitlines()[0]
        return None

    def _get_part_status(self, state: StackState, name: PartName, address: str) -> PartStatus:
        if not state.is_alive(name):
            return PartStatus(
                name, "stopped", address, detail=f"restart with `swiftkv up`; log: {self._get_log_path(name)}"
            )
        pid = state.parts[name].pid
        problem = self._find_problem(state, name)
        if problem is None:
            keys = state.operator_files.get("api_keys_file") if name == "control-plane" else None
            return PartStatus(name, "running", address, pid, "" if keys is None else f"requires API keys from {keys}")
        return PartStatus(name, "not ready", address, pid, f"{problem}; log: {self._get_log_path(name)}")

    def _get_log_path(self, name: PartName) -> Path:
        return self.logs / f"{name}.log"


def describe_system_load() -> str:
    """Return e.g. `Load 5.1 on 2 CPUs, 3.4 GiB of memory available`."""
    available = format_size(psutil.virtual_memory().available)
    return f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, {available} of memory available"


def _report_port_change(preferred: int, port: int, options: StackOptions, report: Report) -> None:
    """Report if `port` differs from the preferred port. Raises `StartError` if `options.port` is in use."""
    if preferred in (0, port):
        return
    if options.port:
        raise StartError(
            f"port {preferred} is in use by another program; use another --port, or 0 for a free port",
            field="port",
            value=preferred,
        )
    report(f"Port {preferred} is in use; the control plane uses port {port}")


def _get_serve_status(state: StackState) -> PartStatus:
    try:
        response = httpx.get(f"{state.serve_url}/-/healthz", timeout=_HEALTH_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return PartStatus("serve", "idle", state.serve_url, detail="starts with the first deployment")
    # Without applications, Ray Serve's proxy returns 503.
    detail = "" if response.is_success else "no deployments"
    return PartStatus("serve", "running", state.serve_url, detail=detail)


def _check_packages() -> None:
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise StartError(f"`swiftkv up` needs {', '.join(missing)}; run {make_install_command('train', 'serve')}")
