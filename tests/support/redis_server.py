"""A Redis server for a test, from Debian's package `redis-server`."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.rays import free_port
from tests.support.requirements import missing
from tests.support.waiting import wait_until_up


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
        wait_until_up(lambda: _answers(port), process, directory / "redis.log")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except ConnectionError:
        return False
