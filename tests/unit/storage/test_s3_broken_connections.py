"""Connections that break in the middle, through a proxy that really cuts them: nothing is lost, doubled or mixed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from swiftkv_platform.errors import ConflictError, StorageError
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.object_store import ObjectStore
from tests.s3_servers import client_environment, run_moto, run_rclone

pytestmark = pytest.mark.integration

CONTINUE = len(b"HTTP/1.1 100 Continue\r\n\r\n")

Rule = Callable[[bytes], int | None]
"""From the beginning of a request to the bytes of its answer that may pass; None lets everything pass."""


class CuttingProxy:
    """Forwards bytes to a local port and closes a connection once the answer exceeds what the rule grants it."""

    def __init__(self, target: int, rule: Rule) -> None:
        self._target = target
        self._rule = rule
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                _Connection(client, socket.create_connection(("127.0.0.1", self._target)), self._rule)


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket, rule: Rule) -> None:
        self._rule = rule
        self._granted: int | None = None
        threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
        threading.Thread(target=self._answers, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if data.startswith((b"GET", b"PUT", b"HEAD")):
                    self._granted = self._rule(data)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                part = data if self._granted is None else data[: self._granted]
                client.sendall(part)
                if self._granted is not None:
                    self._granted -= len(part)
                if len(part) < len(data):
                    break
        for side in (client, server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()


class FirstRequests:
    """Grants the first `count` requests of a method `granted` bytes, and everything to the rest."""

    def __init__(self, method: bytes, count: int, granted: int) -> None:
        self._method = method
        self._count = count
        self._granted = granted
        self.seen = 0

    def __call__(self, request: bytes) -> int | None:
        if not request.startswith(self._method):
            return None
        self.seen += 1
        return self._granted if self.seen <= self._count else None


@contextmanager
def through_proxy(port: int, bucket: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    proxy = CuttingProxy(port, rule)
    for name, value in client_environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    try:
        yield open_store(f"s3://{bucket}")
    finally:
        proxy.close()


def test_a_download_goes_on_at_the_next_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(number.to_bytes(4, "big") for number in range(400_000))
    rule = FirstRequests(b"GET", 3, 300_000)
    with run_rclone(tmp_path / "rclone") as rclone:
        server = rclone.server
        (rclone.directory / server.bucket / "big").write_bytes(data)
        with through_proxy(server.port, server.bucket, rule, monkeypatch) as store:
            assert b"".join(store.stream("big", chunk_size=50_000)) == data
    assert rule.seen == 4


def test_an_object_replaced_meanwhile_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = FirstRequests(b"GET", 1, 300_000)
    with run_rclone(tmp_path / "rclone") as rclone:
        server = rclone.server
        with through_proxy(server.port, server.bucket, rule, monkeypatch) as store:
            store.put_bytes("big", b"a" * 1_000_000)
            stream = store.stream("big", chunk_size=50_000)
            first = next(stream)
            store.put_bytes("big", b"b" * 1_000_000)
            with pytest.raises(StorageError, match="replaced while"):
                list(stream)
    assert first == b"a" * 50_000


def test_a_download_that_never_gets_on_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers_only = 600
    rule = FirstRequests(b"GET", 1000, headers_only)
    with run_rclone(tmp_path / "rclone") as rclone:
        server = rclone.server
        with through_proxy(server.port, server.bucket, rule, monkeypatch) as store:
            store.put_bytes("big", b"a" * 5_000_000)
            with pytest.raises(StorageError, match="cannot read 'big'"):
                list(store.stream("big", chunk_size=50_000))
    assert rule.seen < 100


def test_a_conditional_write_knows_its_own_object_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = FirstRequests(b"PUT", 1, CONTINUE)
    with run_moto() as server, through_proxy(server.port, server.bucket, rule, monkeypatch) as store:
        store.put_bytes("event", b"mine", if_absent=True)
        assert rule.seen == 2
        assert store.get_bytes("event") == b"mine"
        with pytest.raises(ConflictError):
            store.put_bytes("event", b"mine", if_absent=True)
