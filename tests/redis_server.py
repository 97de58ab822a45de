"""A Redis server for a test, from Debian's package `redis-server`."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rays import free_port
from tests.requirements import missing

_START_S = 60.0


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Run a server that keeps everything in memory, and yield its address; its log is in `directory`."""
    program = shutil.which("redis-server") or missing(
        "no redis-server on this machine (Debian: apt-get install redis-server)"
    )
    port = free_port()
    options = {"bind": "127.0.0.1", "port": port, "dir": directory, "save": ""}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
    try:
        _wait_until_ready(port, process, directory / "redis.log")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers(port):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except ConnectionError:
        return False
