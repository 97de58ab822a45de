"""A Ray of a test module's own, and patience with it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import ClusterUnavailableError

DEADLINE_S = 240.0

_SERVE = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
"""Serve tells its autoscaler of loads as often as a test can wait for."""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(what: Callable[[], Any]) -> Any:
    """The first true value of `what`; a cluster that is not there yet is waited for."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            value = what()
        except ClusterUnavailableError:
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def dashboard_url() -> Iterator[str]:
    """A Ray of its own: ports, token, home and temporary directory shared with nobody; ended by its process group."""
    home = Path(tempfile.mkdtemp(prefix="r-", dir="/tmp"))  # short: Ray's socket paths have a limit
    token = home / "token"
    token.write_text(secrets.token_hex(32))
    port = free_port()
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    ports = [f"--dashboard-port={port}", f"--ray-client-server-port={free_port()}", "--port=0"]
    ports += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    limits = ["--num-cpus=4", f"--object-store-memory={200 << 20}", f"--temp-dir={home}"]
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with (home / "ray.log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        for name, value in auth.items():
            patch.setenv(name, value)
        ray = subprocess.Popen(
            [*ray_start, *ports, *limits],
            env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", **_SERVE},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(ray.pid, signal.SIGKILL)
            ray.wait()
            shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def serve_port() -> int:
    return free_port()
