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


class HeadProcess:
    """A head that can be killed with its process group, and started again at the same addresses.

    Args:
        environment: What its processes have beyond this one's environment.
        num_cpus: CPUs it believes to have.
    """

    def __init__(self, environment: Mapping[str, str], *, num_cpus: int) -> None:
        directory = make_temp_dir()
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        self.head = RayHead(*free_ports([0, 0, 0]), directory, token, num_cpus, object_store_memory=200 << 20)
        own = {"HOME": str(directory), "OMP_NUM_THREADS": "1", **environment}
        self._environment = self.head.environment({**os.environ, **own})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        path = self.head.temp_dir / "ray.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                self.head.command(), env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self._process = process
        deadline = time.monotonic() + _START_S
        while not self.head.answers():
            assert process.poll() is None, path.read_text(errors="replace")
            assert time.monotonic() < deadline, path.read_text(errors="replace")
            time.sleep(0.1)

    def kill(self) -> None:
        """Harmless for one that is not running."""
        if self._process is not None:
            process, self._process = self._process, None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.head.temp_dir, ignore_errors=True)


@contextmanager
def ray_head(environment: Mapping[str, str] | None = None, *, num_cpus: int) -> Iterator[RayHead]:
    """A head that answers, as `swiftkv up` starts one; killed with its process group in the end.

    Args:
        environment: What its processes have beyond this one's environment.
        num_cpus: CPUs it believes to have.
    """
    process = HeadProcess(environment or {}, num_cpus=num_cpus)
    try:
        process.start()
        yield process.head
    finally:
        process.remove()
