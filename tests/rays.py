"""A real Ray in processes of its own: ports, home, token and temporary directory shared with nobody."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from swiftkv_platform.local.ray_head import RayHead, auth_environment, ensure_token, free_ports, make_temp_dir

_START_S = 180.0
"""A machine that does other work takes its time to start Ray."""


def become_a_driver() -> None:
    """Let this process and those it starts find the tests' heads: on the loopback interface, with one token for all.

    Ray reads this once, when it is imported.
    """
    directory = Path(tempfile.mkdtemp(prefix="ray-token-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    ensure_token(directory / "token")
    os.environ.update(auth_environment(directory / "token"))
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    return free_ports([0])[0]


@contextmanager
def ray_head(environment: Mapping[str, str] | None = None, *, num_cpus: int) -> Iterator[RayHead]:
    """A head that answers, as `swiftkv up` starts one; killed with its process group in the end.

    Args:
        environment: What its processes have beyond this one's environment.
        num_cpus: CPUs it believes to have.
    """
    directory = make_temp_dir()
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    head = RayHead(*free_ports([0, 0, 0]), directory, token, num_cpus, object_store_memory=200 << 20)
    own = {"HOME": str(directory), "OMP_NUM_THREADS": "1", **(environment or {})}
    with (directory / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            head.command(),
            env=head.environment({**os.environ, **own}),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not head.answers():
            assert process.poll() is None, (directory / "ray.log").read_text(errors="replace")
            assert time.monotonic() < deadline, (directory / "ray.log").read_text(errors="replace")
            time.sleep(0.1)
        yield head
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)
