"""A real Ray in separate processes, with its own ports, home, token and temporary directory."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from swiftkv_platform.local.ray_head import RayHead, create_token, find_free_ports, make_auth_environment, make_temp_dir
from tests.support.waiting import wait_until_up


def become_a_driver() -> None:
    """Let this process and its children connect to the tests' heads: on the loopback interface, with one token for all.

    Ray reads this once, when it is imported. Idle workers are kept, so that a job's next task finds one that has
    imported everything; by default Ray ends them after a second if no CPU is free.
    """
    directory = Path(tempfile.mkdtemp(prefix="ray-token-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    create_token(directory / "token")
    os.environ.update(make_auth_environment(directory / "token"))
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.update({"RAY_idle_worker_killing_time_threshold_ms": "600000"})


def free_port() -> int:
    """Return a free port of the loopback interface."""
    return find_free_ports([0])[0]


class HeadProcess:
    """A head that can be killed with its process group, and restarted at the same addresses.

    Args:
        environment: Extra environment variables of its processes.
        num_cpus: Number of CPUs that it reports.
    """

    def __init__(self, environment: Mapping[str, str], *, num_cpus: int) -> None:
        directory = make_temp_dir()
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        self.head = RayHead(*find_free_ports([0, 0, 0]), directory, token, num_cpus, object_store_memory=200 << 20)
        own = {"HOME": str(directory), "OMP_NUM_THREADS": "1", **environment}
        self._environment = self.head.build_environment({**os.environ, **own})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the head, and return when it answers."""
        log = self.head.temp_dir / "ray.log"
        self._process = _spawn(self.head.build_command(), self._environment, log)
        wait_until_up(self.head.is_ready, self._process, log)

    def kill(self) -> None:
        """Kill the head's process group; do nothing if it is not running."""
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # With this file, `ray start` takes another node's processes for those of a running head.
            (self.head.temp_dir / "ray_current_cluster").unlink(missing_ok=True)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.head.temp_dir, ignore_errors=True)


@contextmanager
def ray_head(environment: Mapping[str, str] | None = None, *, num_cpus: int) -> Iterator[RayHead]:
    """Run a head as `swiftkv up` starts it, yield it when it answers, and kill its process group at the end.

    Args:
        environment: Extra environment variables of its processes.
        num_cpus: Number of CPUs that it reports.
    """
    process = HeadProcess(environment or {}, num_cpus=num_cpus)
    try:
        process.start()
        yield process.head
    finally:
        process.remove()


_NODE = """
import sys, threading
from pathlib import Path
from ray._private.node import Node
from ray._private.parameter import RayParams
address, directory, num_cpus, memory, drains = sys.argv[1:]
parameters = RayParams(
    gcs_address=address, node_ip_address="127.0.0.1", temp_dir=directory, num_cpus=int(num_cpus), num_gpus=0,
    object_store_memory=int(memory), min_worker_port=0, max_worker_port=0,
)
node = Node(parameters, head=False, shutdown_at_exit=drains == "drains", spawn_reaper=False)
Path(directory, "writing").write_text(node.node_id)
Path(directory, "writing").rename(Path(directory, "node-id"))
threading.Event().wait()
"""
"""Script that adds a node like `ray.cluster_utils.Cluster`; `ray start --address` cannot join a head on loopback."""


class NodeProcess:
    """A node other than the head, with a separate directory, so that it shares no socket or object with other nodes."""

    def __init__(self, process: subprocess.Popen[bytes], node_id: str) -> None:
        self._process = process
        self.id = node_id

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def has_accepted(self, client: tuple[str, int]) -> bool:
        """Whether one of its processes holds a connection from this client address."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # workers come and go
                if any(connection.raddr == client for connection in process.net_connections("tcp")):
                    return True
        return False

    def terminate(self) -> None:
        """Send SIGTERM to its first process, as Kubernetes does to a pod."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill all of its processes at once, as when a machine loses power; do nothing if they are gone."""
        _kill_tree(self._process)


@contextmanager
def ray_node(
    head: RayHead, *, num_cpus: int, environment: Mapping[str, str] | None = None, drains: bool = False
) -> Iterator[NodeProcess]:
    """Run another node of the head's cluster with this process's environment; yield it once registered, kill it at the
    end.

    Args:
        environment: Extra environment variables of its processes.
        drains: Whether SIGTERM drains it first, as with `ray start --block`.
    """
    directory = make_temp_dir()
    log = directory / "ray.log"
    own = {"HOME": str(directory), "OMP_NUM_THREADS": "1", **(environment or {})}
    arguments = [head.address, directory, num_cpus, head.object_store_memory, "drains" if drains else ""]
    command = [sys.executable, "-c", _NODE, *map(str, arguments)]
    process = _spawn(command, head.build_environment({**os.environ, **own}), log)
    try:
        wait_until_up((directory / "node-id").exists, process, log)
        yield NodeProcess(process, (directory / "node-id").read_text())
    finally:
        _kill_tree(process)
        shutil.rmtree(directory, ignore_errors=True)


def _spawn(command: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        root = psutil.Process(process.pid)
        for each in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
