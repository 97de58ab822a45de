"""Command, environment and health check of a local Ray head, through Ray's command line and HTTP API.

The head listens on loopback, requires a token, and shares no port or directory with other Ray clusters.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.errors import ClusterUnavailableError

_MAX_TEMP_ROOT_LENGTH = 40
"""In characters. Ray adds about 60 for its sockets; Unix socket paths have max 107 characters (104 on macOS)."""
_START_TIMEOUT_VARIABLE = "SWIFTKV_START_TIMEOUT_S"
_RETRY_INTERVAL_S = 0.5
_JOB_STOP_WAIT_S = 20
"""Seconds between SIGTERM and SIGKILL of a canceled job's entrypoint. Ray's default of 3 is too short for cleanup."""


@dataclass(frozen=True)
class RayHead:
    """Address, files and resources of a Ray head."""

    port: int
    """Port of the GCS."""
    dashboard_port: int
    agent_port: int
    temp_dir: Path
    token_file: Path
    num_cpus: int
    object_store_memory: int
    """Bytes."""
    start_timeout_s: float = 180.0
    """Max seconds that Ray's own processes wait for each other."""

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def build_command(self) -> list[str]:
        """Return the `ray start` command, which runs in the foreground."""
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

    def build_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the head's environment variables: `base` plus settings for Ray."""
        return {
            # RAY_ADDRESS would send `ray start` and drivers to another cluster.
            **{name: value for name, value in base.items() if name != "RAY_ADDRESS"},
            **make_auth_environment(self.token_file),
            **HIDE_UNRESERVED_GPUS,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_JOB_STOP_WAIT_TIME_S": str(_JOB_STOP_WAIT_S),
            "RAY_START_HOOK": f"{__name__}.patch_ray_start",
            _START_TIMEOUT_VARIABLE: f"{self.start_timeout_s:g}",
            # Attempts of a second each to reach the GCS; Ray's default of 20 is too few on a busy machine.
            "RAY_NUM_REDIS_GET_RETRIES": f"{self.start_timeout_s:.0f}",
            "RAY_gcs_server_request_timeout_seconds": f"{self.start_timeout_s:.0f}",
            # Disables multi-node clusters, so that the node's address is 127.0.0.1, also on Linux.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Keeps the environment of renamed processes readable: `swiftkv down` finds processes by it.
            "SPT_NOENV": "1",
            # With Ray's default niceness of 15, all other processes would run before replicas.
            "RAY_worker_niceness": "0",
            # Serve's own proxy listens on loopback only, and runs the middlewares below.
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            # The proxy passes the beginning of a prompt to the router, for prefix-aware routing.
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "swiftkv_platform.serve.prefixes:proxy_middlewares",
        }

    def is_ready(self) -> bool:
        """Return whether the head accepts jobs: its dashboard responds and its node is alive."""
        # Imported here: the command line starts without the extra `serve`.
        from swiftkv_platform.control_plane.ray import RayDashboard

        with closing(RayDashboard(self.dashboard_url, timeout_s=5.0, token_file=self.token_file)) as dashboard:
            try:
                dashboard.check_alive()
            except ClusterUnavailableError:
                return False
        return True


def patch_ray_start(parameters: Any, head: bool) -> None:  # noqa: ARG001 (Ray's signature)
    """Disable the unused Ray Client server, and extend Ray's wait for its node; a hook of `ray start`."""
    from ray._private import services

    parameters.ray_client_server_port = None
    # `ray start` waits 30 s for `get_node`, whatever its settings, and a busy machine takes longer. The function is
    # private: a version of Ray without it keeps its own wait.
    if hasattr(services, "get_node"):
        services.get_node = _make_retrying_call(services.get_node, float(os.environ[_START_TIMEOUT_VARIABLE]))


def _make_retrying_call(call: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """Return `call`, repeated while it raises `RuntimeError`, for at most `timeout_s` seconds."""

    def call_with_retries(*arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return call(*arguments, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_INTERVAL_S)

    return call_with_retries


def make_auth_environment(token_file: Path) -> dict[str, str]:
    """Return the environment variables that authenticate a process with the head."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def create_token(path: Path) -> None:
    """Write a random token, readable only by its owner, unless the file exists."""
    if path.exists():
        return
    partial = path.with_name(f"{path.name}.part")  # a full disk must not leave an empty token
    partial.touch(mode=0o600)
    partial.write_text(secrets.token_hex(32), encoding="ascii")
    partial.replace(path)


def make_temp_dir() -> Path:
    """Create a directory with a path short enough for Ray's sockets."""
    root = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="skv-", dir=root if len(root) <= _MAX_TEMP_ROOT_LENGTH else "/tmp"))  # noqa: S108


def find_free_ports(preferred: list[int]) -> list[int]:
    """Return distinct free loopback ports: each preferred port if free, else any. 0 means any."""
    found = []
    with ExitStack() as stack:
        # Ports stay bound until all are found, so that they differ.
        for port in preferred:
            listener = stack.enter_context(_bind_port(port))
            found.append(int(listener.getsockname()[1]))
    return found


def _bind_port(port: int) -> socket.socket:
    listener = socket.socket()
    # A port with lingering connections then counts as free; a port with a listener does not.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
