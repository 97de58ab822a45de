"""Start, check and stop a whole platform on this machine: Ray head and control plane.

Ray Serve is not started here: the first deployment starts it inside Ray, at the address that `up` chose.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from swiftkv_platform.client import Client
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.local.ray_head import RayHead, create_token, find_free_ports, make_auth_environment, make_temp_dir
from swiftkv_platform.local.state import (
    PARTS,
    PartName,
    PartStatus,
    RunDirectory,
    StackState,
    parse_port,
    start_process,
    stop_marked_processes,
)
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.credentials import open_credentials
from swiftkv_platform.settings import Settings, is_loopback

_START_TIMEOUT_S: Mapping[PartName, float] = {"ray": 120.0, "control-plane": 90.0}
_POLL_INTERVAL_S = 0.25
_HEALTH_TIMEOUT_S = 15.0
"""Above the 10 s that the control plane allows each of its dependencies to answer."""
_REQUIRED_PACKAGES = ("alembic", "fastapi", "obstore", "ray", "sqlalchemy", "uvicorn")
"""Packages of the extra `platform`; the client and the command line do not need them."""
_STOP_TIMEOUT_S = 3.0
"""Seconds between SIGTERM and SIGKILL. Ray takes half a minute to stop by itself, and has nothing to save."""
_LOG_TAIL_LINES = 20
OPERATOR_FILES = ("api_keys_file", "oidc_file", "serve_api_keys_file", "serve_oidc_file", "tenants_file", "secrets_dir")
"""Settings that name files or directories of the operator."""

Report = Callable[[str], None]


class StartError(SwiftKVError):
    """A part did not come up; the message ends with the tail of its log."""

    code = "start_failed"


@dataclass(frozen=True)
class StackOptions:
    """Options of `up`; a part that runs already keeps the options it was started with."""

    port: int | None = None
    """Port of the control plane; None: the last one or the settings' if free, 0: any."""
    num_cpus: int | None = None
    """CPUs that Ray schedules; None: those of the machine, but at least 4, so that a job's driver, its workers and a
    replica fit on a small one."""
    object_store_memory: int = 200 << 20
    """Bytes."""


class Stack:
    """The platform of one home directory. `settings`: `home` is that directory; of the addresses only the ports are
    used, and a port in use is replaced by a free one."""

    def __init__(self, settings: Settings) -> None:
        self.home = settings.home.expanduser().resolve()
        self._settings = settings.model_copy(update={"home": self.home})
        self.logs = self.home / "logs"
        self._run_directory = RunDirectory(self.home)
        self._mark = str(self.home)

    def state(self) -> StackState | None:
        """Return the state that the last `up` wrote; None after `down`."""
        return self._run_directory.load()

    @property
    def token_file(self) -> Path:
        """File with the token that its Ray requires."""
        return self._run_directory.token_file

    def up(self, options: StackOptions, report: Report) -> StackState:
        """Start the parts that do not run, and return when everything answers. `report`: called with a line for each
        step. Raises `InvalidInputError` for a file of keys or issuers that cannot be used, before anything is stopped,
        and `StartError`, after stopping what it started, if packages are missing, the home cannot be written, the port
        asked for is taken, or a part did not come up."""
        _check_packages()
        try:
            return self._up(options, report)
        except OSError as error:
            advice = "free some space, or use" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "use"
            raise StartError(
                f"the home {self.home} cannot be used ({error.strerror or error}); {advice} another SWIFTKV_HOME, a "
                "directory that can be written",
                field="home",
                value=str(self.home),
            ) from error

    def _up(self, options: StackOptions, report: Report) -> StackState:
        with self._run_directory.lock():
            create_token(self._run_directory.token_file)
            state = self._run_directory.load()
            self._check_operator_files({} if state is None else state.operator_files)
            if state is None or not state.alive("ray"):
                # Without the head, processes that still run are useless and occupy the ports.
                self._stop_all(state)
                state = self._choose_addresses(options, state, report)
            before = state
            try:
                return self._start_control_plane(self._start_ray(state, report), options, report)
            except BaseException:
                self._stop_started(before)
                raise

    def _check_operator_files(self, last: Mapping[str, Path]) -> None:
        """Check the files of keys and issuers before anything is stopped. Raises `InvalidInputError` for one that
        cannot be used, and `StartError` if one of the last start is gone: deleting it must not open the platform.
        """
        files = self._resolve_operator_files()
        for name in last.keys() - files.keys():
            raise StartError(
                f"the last `swiftkv up` used {last[name]}, which is gone or no longer set; put it back, or run "
                "`swiftkv down` first to start without it",
                field=name,
                value=str(last[name]),
            )
        open_credentials(files.get("api_keys_file"), files.get("oidc_file"))

    def down(self) -> int:
        """Stop every process of this home, and no others. Returns their number."""
        if not self._run_directory.path.is_dir():
            return 0
        with self._run_directory.lock():
            count = self._stop_all(self._run_directory.load())
            self._run_directory.clear()
            return count

    def status(self) -> list[PartStatus]:
        """Return the status of each part."""
        state = self._run_directory.load()
        if state is None:
            return [PartStatus(name, "stopped") for name in (*PARTS, "serve")]
        return [
            self._get_part_status(state, "ray", state.ray_dashboard_url),
            self._get_part_status(state, "control-plane", state.url),
            _get_serve_status(state),
        ]

    def _choose_addresses(self, options: StackOptions, last: StackState | None, report: Report) -> StackState:
        """Choose addresses: those of the last start (the settings' on the first) where free, else any."""
        if last is None:
            wanted = [
                self._settings.port,
                parse_port(self._settings.serve_url),
                parse_port(self._settings.ray_dashboard_url),
            ]
        else:
            wanted = [parse_port(url) for url in (last.url, last.serve_url, last.ray_dashboard_url)]
        if options.port is not None:
            wanted[0] = options.port
        port, serve_port, dashboard_port, ray_port, agent_port = find_free_ports([*wanted, 0, 0])
        _report_port_change(wanted[0], port, options, report)
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
        if state.alive("ray"):
            self._wait_ready(state, "ray")
            report(f"Ray is already running (its own pages: {state.ray_dashboard_url})")
            return state
        report("Starting Ray")
        head = self._make_ray_head(state)
        state = self._start_part(state, "ray", head.command(), head.environment(os.environ))
        self._wait_ready(state, "ray")
        report(f"Ray is up (its own pages: {state.ray_dashboard_url})")
        return state

    def _start_control_plane(self, state: StackState, options: StackOptions, report: Report) -> StackState:
        files = self._resolve_operator_files()
        if state.alive("control-plane") and files == state.operator_files:
            self._wait_ready(state, "control-plane")
            report(f"The control plane is already running: dashboard and API at {state.url}")
            return state
        if state.alive("control-plane"):
            report("Restarting the control plane with the files that it has now: API keys, issuers, tenants, secrets")
            state.parts["control-plane"].terminate(_STOP_TIMEOUT_S)
        else:
            report("Starting the control plane")
        wanted = options.port or parse_port(state.url)
        [port] = find_free_ports([wanted])
        _report_port_change(wanted, port, options, report)
        if not is_loopback(self._settings.host):
            report(f"SWIFTKV_HOST={self._settings.host} is not used here: `swiftkv up` listens on 127.0.0.1 only")
        state = state.model_copy(update={"url": f"http://127.0.0.1:{port}", "operator_files": files})
        command = [sys.executable, "-m", "swiftkv_platform.control_plane"]
        state = self._start_part(state, "control-plane", command, self._build_environment(state, port))
        self._wait_ready(state, "control-plane")
        report(f"The control plane is up: dashboard and API at {state.url}")
        if keys := files.get("api_keys_file"):
            report(f"Callers need an API key of {keys}: export SWIFTKV_API_KEY=skv_...")
        return state

    def _build_environment(self, state: StackState, port: int) -> dict[str, str]:
        """Return the control plane's variables: the process's own, with this stack's addresses and files."""
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
        """Return the operator's files by setting. Absolute, since the control plane runs in the home; those of
        deployments are by default the control plane's, since Ray is on this machine."""
        given = {name: getattr(self._settings, name) for name in OPERATOR_FILES}
        for name in ("api_keys_file", "oidc_file"):
            given[f"serve_{name}"] = given[f"serve_{name}"] or given[name]
        return {name: path.expanduser().absolute() for name, path in given.items() if path is not None}

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
        deadline = time.monotonic() + _START_TIMEOUT_S[name]
        while (complaint := self._find_problem(state, name)) is not None:
            if not state.alive(name):
                raise self._make_start_error(name, "has ended")
            if time.monotonic() > deadline:
                raise self._make_start_error(name, f"is not ready after {_START_TIMEOUT_S[name]:g} s: {complaint}")
            time.sleep(_POLL_INTERVAL_S)

    def _make_start_error(self, name: PartName, what: str) -> StartError:
        log = self._get_log_path(name)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        tail = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        return StartError(f"{name} {what}; `swiftkv doctor` looks for the cause. The end of {log}:\n{tail}")

    def _stop_started(self, before: StackState) -> None:
        """Stop what was started since `before`."""
        if not before.alive("ray"):
            self._stop_all(self._run_directory.load() or before)
            self._run_directory.clear()
            return
        now = self._run_directory.load()
        if now is not None and not before.alive("control-plane") and "control-plane" in now.parts:
            now.parts["control-plane"].terminate(_STOP_TIMEOUT_S)

    def _stop_all(self, state: StackState | None) -> int:
        """Stop all processes of this home and clean up after Ray. Returns the number of processes."""
        control_plane = 0
        if state is not None and state.alive("control-plane"):
            # Stop it first: it would take Ray's end for a failure of its jobs.
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
            kept = self.logs / "ray-session"
            shutil.rmtree(kept, ignore_errors=True)
            try:
                shutil.copytree(session, kept, ignore_dangling_symlinks=True)
            except OSError as error:  # such as a full disk; must not keep `down` from finishing
                get_logger().warning("ray_logs_not_kept", directory=str(kept), error=str(error))
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
        )

    def _find_problem(self, state: StackState, name: PartName) -> str | None:
        """Return why a part is not ready; None if it is."""
        if name == "ray":
            return None if self._make_ray_head(state).is_ready() else "it does not answer, or has no live node"
        try:
            with Client(state.url, max_retries=0, timeout=_HEALTH_TIMEOUT_S) as client:
                client.ready()
        except SwiftKVError as error:
            return error.message.splitlines()[0]
        return None

    def _get_part_status(self, state: StackState, name: PartName, address: str) -> PartStatus:
        if not state.alive(name):
            return PartStatus(
                name, "stopped", address, detail=f"`swiftkv up` restarts it; log: {self._get_log_path(name)}"
            )
        pid = state.parts[name].pid
        complaint = self._find_problem(state, name)
        if complaint is None:
            keys = state.operator_files.get("api_keys_file") if name == "control-plane" else None
            return PartStatus(name, "running", address, pid, "" if keys is None else f"callers need a key of {keys}")
        return PartStatus(name, "not ready", address, pid, f"{complaint}; log: {self._get_log_path(name)}")

    def _get_log_path(self, name: PartName) -> Path:
        return self.logs / f"{name}.log"


def _report_port_change(wanted: int, port: int, options: StackOptions, report: Report) -> None:
    """Report that the control plane gets another port. Raises `StartError` if that port was asked for explicitly."""
    if wanted in (0, port):
        return
    if options.port:
        raise StartError(
            f"port {wanted} is taken by another program; use another --port, or 0 for any free one",
            field="port",
            value=wanted,
        )
    report(f"Port {wanted} is taken; the control plane uses {port}")


def _get_serve_status(state: StackState) -> PartStatus:
    try:
        answer = httpx.get(f"{state.serve_url}/-/healthz", timeout=_HEALTH_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return PartStatus("serve", "idle", state.serve_url, detail="the first deployment starts it")
    # Without any application Ray Serve's proxy answers 503, having nothing to route to.
    detail = "" if answer.is_success else "nothing deployed"
    return PartStatus("serve", "running", state.serve_url, detail=detail)


def _check_packages() -> None:
    lacking = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if lacking:
        raise StartError(f"The platform here needs {', '.join(lacking)}; {make_install_command('train', 'serve')}")
