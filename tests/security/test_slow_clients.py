"""Silent, slow and endless clients of the control plane and of `swiftkv serve`, as processes: both close the connection
and keep answering others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.rays import free_port
from tests.support.waiting import eventually
from tests.unit.engine.tiny_models import save_swiftkv

pytestmark = pytest.mark.slow("starts a control plane and a replica, and waits for timeouts")

PATIENCE_S = 40.0
"""Less than the seconds of keep-alive, which would also end a connection."""
MAX_CONNECTIONS = 64
TOO_MUCH = 64 << 20
"""Bytes that no server may take of one request."""
POSTS = {"control plane": "/jobs", "swiftkv serve": "/generate"}
HEALTHS = {"control plane": "/healthz", "swiftkv serve": "/health"}
SERVERS = list(POSTS)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of both servers by name."""
    home = tmp_path_factory.mktemp("home")
    model = save_swiftkv(tmp_path_factory.mktemp("model"))
    ports = [free_port(), free_port()]
    environment = {
        **os.environ,
        "SWIFTKV_HOME": str(home),
        "SWIFTKV_PORT": str(ports[0]),
        "SWIFTKV_RAY_DASHBOARD_URL": "http://127.0.0.1:1",
        "SWIFTKV_MAX_CONNECTIONS": str(MAX_CONNECTIONS),
        "SWIFTKV_REQUEST_HEAD_TIMEOUT_S": "1",
        "HF_HUB_OFFLINE": "1",
    }
    commands = {
        "control plane": ["-m", "swiftkv_platform.control_plane"],
        "swiftkv serve": ["-m", "swiftkv_platform.cli", "serve", str(model), "--port", str(ports[1])],
    }
    with ExitStack() as stack:
        for arguments in commands.values():
            process = stack.enter_context(
                subprocess.Popen([sys.executable, *arguments], env=environment, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
        found = {name: f"http://127.0.0.1:{port}" for name, port in zip(commands, ports, strict=True)}
        for name, url in found.items():
            eventually(partial(is_healthy, url + HEALTHS[name]), f"{name} is healthy", seconds=180.0)
        yield found


def is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).is_success
    return False


def connect(url: str, sent: bytes = b"") -> socket.socket:
    address = urlsplit(url)
    made = socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)
    made.sendall(sent)
    return made


def wait_for_end(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection; raises `TimeoutError` if it does not."""
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def send_until_closed(connection: socket.socket, piece: bytes) -> None:
    """Send a piece again and again, without reading, until the server closes the connection."""
    many = piece * max((1 << 16) // len(piece), 1)
    with suppress(ConnectionError):
        for _ in range(TOO_MUCH // len(many)):
            connection.sendall(many)
        pytest.fail(f"{TOO_MUCH} bytes were read")


def post(path: str, *fields: bytes) -> bytes:
    head = [b"POST %s HTTP/1.1" % path.encode(), b"Host: 127.0.0.1", b"Content-Type: application/json", *fields]
    return b"\r\n".join(head) + b"\r\n\r\n"


GET = b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked"
TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(200)

SILENT: dict[str, Callable[[bytes, str], bytes]] = {
    "silent": lambda _get, _path: b"",
    "half a head": lambda get, _path: get[:-2],
    "half of a second head": lambda get, _path: get + get[:9],
    "HTTP/1.0": lambda get, _path: get.replace(b"HTTP/1.1", b"HTTP/1.0\r\nConnection: keep-alive"),
    "TLS": lambda _get, _path: TLS_HELLO,
    "HTTP/2": lambda _get, _path: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "CONNECT": lambda _get, _path: b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n" + TLS_HELLO,
    "half a late body": lambda _get, _path: post("/nothing", b"Content-Length: 100") + b"{",
}
"""Bytes after which the client falls silent, from a request for health and the path of a POST."""
ENDLESS: dict[str, Callable[[bytes, str], tuple[bytes, bytes]]] = {
    "target": lambda _get, _path: (b"GET /", b"x"),
    "header": lambda _get, _path: (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA: ", b"x"),
    "headers": lambda _get, _path: (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"a: b\r\n"),
    "second header": lambda get, _path: (get + b"GET / HTTP/1.1\r\nA: ", b"x"),
    "empty lines": lambda get, _path: (get, b"\r\n"),
    "pipelined requests": lambda get, _path: (b"", get),
    "upgrade": lambda get, _path: (get[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"x"),
    "chunk extension": lambda _get, path: (post(path, CHUNKED) + b"1;", b"x"),
    "chunk extensions": lambda _get, path: (post(path, CHUNKED), b"1;" + b"x" * 999 + b"\r\na\r\n"),
    "chunk size": lambda _get, path: (post(path, CHUNKED), b"0"),
    "trailer": lambda _get, path: (post(path, CHUNKED) + b"2\r\n{}\r\n0\r\nA: ", b"x"),
    "trailers": lambda _get, path: (post(path, CHUNKED) + b"2\r\n{}\r\n0\r\n", b"a: b\r\n"),
    "late body": lambda _get, _path: (post("/nothing", b"Content-Length: 1000000000"), b"x"),
    "late chunks": lambda _get, _path: (post("/nothing", CHUNKED), b"1\r\na\r\n"),
}
"""Bytes that are sent first, and those that are then sent without end."""


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("case", SILENT)
def test_silent_clients_are_disconnected(urls: dict[str, str], server: str, case: str) -> None:
    get = GET % HEALTHS[server].encode()
    with connect(urls[server], SILENT[case](get, POSTS[server])) as waiting:
        wait_for_end(waiting)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("case", ENDLESS)
def test_endless_requests_are_cut_off(urls: dict[str, str], server: str, case: str) -> None:
    first, then = ENDLESS[case](GET % HEALTHS[server].encode(), POSTS[server])
    with connect(urls[server], first) as sending:
        send_until_closed(sending, then)


@pytest.mark.parametrize("server", SERVERS)
def test_many_header_fields_are_refused(urls: dict[str, str], server: str) -> None:
    with connect(urls[server], b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n") as asking:
        assert wait_for_end(asking).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("server", SERVERS)
def test_silent_connections_leave_room(urls: dict[str, str], server: str) -> None:
    with ExitStack() as opened:
        silent = [opened.enter_context(connect(urls[server])) for _ in range(3 * MAX_CONNECTIONS)]
        for _ in range(10):
            assert httpx.get(urls[server] + HEALTHS[server], trust_env=False).is_success
        wait_for_end(silent[0])


@pytest.mark.parametrize("server", SERVERS)
def test_a_connection_may_rest_between_requests(urls: dict[str, str], server: str) -> None:
    """Clients and proxies keep connections for longer than uvicorn's 5 s, and the head's time."""
    address = urlsplit(urls[server])
    with closing(HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)) as resting:
        for wait_s in (0.0, 7.0):
            time.sleep(wait_s)
            resting.request("GET", HEALTHS[server])
            answer = resting.getresponse()
            answer.read()
            assert answer.status == 200
