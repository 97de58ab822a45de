"""Start and health check of a Ray head on this machine. Imports no Ray: uses its command line and HTTP API.

The head listens on loopback only, requires a token, and shares no port or directory with other Ray clusters here.
"""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.errors import ClusterUnavailableError

_MAX_TEMP_ROOT_LENGTH = 40
"""Most characters. Ray adds about 60 for its sockets, and a unix socket's path has at most 107 (104 on macOS)."""
_JOB_STOP_WAIT_S = 20
"""Seconds between SIGTERM and SIGKILL for the entrypoint of a cancelled job; Ray's default of 3 is too short to clean
up."""


@dataclass(frozen=True)
class RayHead:
    """Address, files and resources of a head."""

    port: int
    """Port of the GCS."""
    dashboard_port: int
    agent_port: int
    temp_dir: Path
    token_file: Path
    num_cpus: int
    object_store_memory: int
    """Bytes."""

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Return the `ray start` command; it stays in the foreground until Ray ends."""
        options: dict[str, Any] = {
            "--port": self.port,
            "--dashboard-host": "127.0.0.1",
            "--dashboard-port": self.dashboard_port,
            "--dashboard-agent-listen-port": self.agent_port,
            "--min-worker-port": 0,
            "--max-worker-port": 0,
            "--temp-dir": self.temp_dir,
            "--num-cpus": self.num_cpus,
            "--object-store-memory": self.object_store_memory,
        }
        flags = [f"{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the head's environment variables, based on `base`."""
        return {
            # An address in the environment would make `ray start` and every driver look for another cluster.
            **{name: value for name, value in base.items() if name != "RAY_ADDRESS"},
            **make_auth_environment(self.token_file),
            **HIDE_UNRESERVED_GPUS,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_JOB_STOP_WAIT_TIME_S": str(_JOB_STOP_WAIT_S),
            "RAY_START_HOOK": f"{__name__}.disable_client_server",
            # Disables clusters of several machines: the node's address is then 127.0.0.1, on Linux too.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Keeps Ray from overwriting the environment of processes it renames; they are found by it.
            "SPT_NOENV": "1",
            # With Ray's default niceness of 15, every other process of the machine runs before a replica.
            "RAY_worker_niceness": "0",
            # Serve's own proxy listens on this machine only, and runs the middlewares below.
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            # Serve's proxy tells the router how a prompt begins, for prefix-aware routing.
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "swiftkv_platform.serve.prefixes:proxy_middlewares",
        }

    def is_ready(self) -> bool:
        """Whether the head accepts jobs: its dashboard answers and its node is alive."""
        # Imported here because the command line must start without the extra `platform`.
        from swiftkv_platform.control_plane.ray.dashboard import RayDashboard

        with closing(RayDashboard(self.dashboard_url, timeout_s=5.0, token_file=self.token_file)) as dashboard:
            try:
                dashboard.check_alive()
            except ClusterUnavailableError:
                return False
        return True


def disable_client_server(parameters: Any, head: bool) -> None:  # noqa: ARG001 (Ray's signature)
    """Hook of `ray start` that disables the Ray Client server, a second entrance that nothing here uses."""
    parameters.ray_client_server_port = None


def make_auth_environment(token_file: Path) -> dict[str, str]:
    """Return the environment variables that a process needs to talk to the head."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def create_token(path: Path) -> None:
    """Write a random token that only its owner can read, unless the file exists."""
    if path.exists():
        return
    partial = path.with_name(f"{path.name}.part")  # so that a full disk leaves no empty token
    partial.touch(mode=0o600)
    partial.write_text(secrets.token_hex(32), encoding="ascii")
    partial.replace(path)


def make_temp_dir() -> Path:
    """Create a directory with a path short enough for Ray's sockets."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="skv-", dir=root if len(root) <= _MAX_TEMP_ROOT_LENGTH else "/tmp"))  # noqa: S108


def find_free_ports(wanted: list[int]) -> list[int]:
    """Return distinct free loopback ports: each wanted one if it is free, else any (0: any)."""
    found = []
    with ExitStack() as held:
        # All stay bound until the last is found, so that they differ.
        for port in wanted:
            listener = held.enter_context(_bind(port))
            found.append(int(listener.getsockname()[1]))
    return found


def _bind(port: int) -> socket.socket:
    listener = socket.socket()
    # With this, a port with lingering connections counts as free; one with a listener, such as ours, does not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
