"""Misbehaving receivers of webhooks: none delays deliveries to another, and each delivery has a deadline."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swiftkv_platform.control_plane import webhooks
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.jobs.job import Job, make_status_event
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.loops import ControlLoop
from swiftkv_platform.control_plane.webhooks import Outbox, WebhookDeliverer, WebhookRules, send_webhook
from swiftkv_platform.specs import JobSpec

PATIENCE_S = 30.0
"""Longest wait for what happens at once unless something is wrong."""

GOOD = b"HTTP/1.1 204 No Content\r\n\r\n"

Answer = Callable[[socket.socket, threading.Event], None]


@dataclass
class Receiver:
    """A server of raw connections: `answer` handles each one, and ends when `over` is set."""

    answer: Answer
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)
    asked: list[bytes] = field(default_factory=list)
    """First bytes of each request, in order."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    open: int = 0
    most_open: int = 0
    """Most connections that were open at one time."""

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.asked) >= count, PATIENCE_S)

    def handle(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            first = connection.recv(65536)
            with self.changed:
                self.asked.append(first)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                self.changed.notify_all()
            try:
                self.answer(connection, self.over)
            finally:
                with self.changed:
                    self.open -= 1
                    self.changed.notify_all()


@contextmanager
def receiving(answer: Answer) -> Iterator[Receiver]:
    receiver, threads = Receiver(answer), []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        receiver.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def accept() -> None:
            with suppress(OSError):
                while True:
                    thread = threading.Thread(target=receiver.handle, args=[listener.accept()[0]], daemon=True)
                    thread.start()
                    threads.append(thread)

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield receiver
        finally:
            receiver.over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in [acceptor, *threads]:
                thread.join(PATIENCE_S)


def good(connection: socket.socket, _over: threading.Event) -> None:
    connection.sendall(GOOD)


def silent(_connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def dripping(connection: socket.socket, over: threading.Event) -> None:
    """Send a header that never ends, a byte at a time, so that no single read waits long."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Drip: ")
    while not over.wait(0.05):
        connection.sendall(b"a")


@dataclass
class Post:
    """Jobs with a webhook, and the loop that delivers their changes."""

    jobs: JobRepository
    outbox: Outbox

    def tell(self, receiver: Receiver, path: str = "/hook") -> Job:
        hook = {"url": f"{receiver.url}{path}", "secret_ref": "signing"}
        spec = JobSpec.model_validate({"name": "test", "webhook": hook})
        job = Job(new_id("job"), "default", "ann", spec, 1000)
        return self.jobs.create(job, make_status_event(job, now=1000))

    @contextmanager
    def delivering(self, *receivers: Receiver, secrets: Path) -> Iterator[None]:
        origins = tuple(receiver.url for receiver in receivers)
        deliverer = WebhookDeliverer(self.outbox, WebhookRules(origins, secrets), send_webhook, clock=lambda: 2000.0)
        loop = ControlLoop("webhooks", deliverer.tick, interval_s=0.01, clock=lambda: 2000.0)
        loop.start()
        try:
            yield
        finally:
            for receiver in receivers:
                receiver.over.set()
            loop.stop(PATIENCE_S)
            deliverer.close()


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    (tmp_path / "secrets" / "default").mkdir(parents=True)
    (tmp_path / "secrets" / "default" / "signing").write_text("a secret that signs webhooks")
    return tmp_path / "secrets"


@pytest.fixture
def post(sqlite_database: Database) -> Post:
    return Post(JobRepository(sqlite_database, TenantPolicies()), Outbox(sqlite_database))


def test_an_endless_answer_is_not_read(post: Post, secrets: Path) -> None:
    sent = []

    def endless(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not over.is_set():
            connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent.append(65536)

    with receiving(endless) as receiver:
        assert send_webhook(receiver.url, {}, b"{}") == 200
    assert sum(sent) < 64 << 20


@pytest.mark.parametrize("hanging", [silent, dripping])
def test_a_receiver_that_hangs_delays_no_other_and_takes_a_few_connections(
    post: Post, secrets: Path, hanging: Answer
) -> None:
    with receiving(hanging) as slow, receiving(good) as other, post.delivering(slow, other, secrets=secrets):
        for number in range(40):
            post.tell(slow, f"/{number}")
        assert slow.wait_for(1)
        for _ in range(3):
            post.tell(other)
        assert other.wait_for(3), "delivered although forty older deliveries hang"
        assert 1 <= slow.most_open <= 8


@pytest.mark.parametrize("body", [b"{}", b"x" * (64 << 20)])
def test_a_delivery_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """The deadline holds for an answer that drips, and for a body larger than the buffers, whose write blocks."""
    monkeypatch.setattr(webhooks, "_TOTAL_TIMEOUT_S", 0.5)
    with receiving(dripping if len(body) == 2 else silent) as slow:
        with pytest.raises(ConnectionError):
            send_webhook(slow.url, {}, body)
        assert not slow.over.is_set(), "the sender gave up, before the receiver ended"


def test_an_unexpected_failure_is_told_again_later(post: Post, secrets: Path) -> None:
    """A defect in one delivery neither ends the loop nor forgets the delivery."""

    def broken(*_: object) -> int:
        raise RuntimeError("a defect")

    with receiving(good) as receiver:
        post.tell(receiver)
        rules = WebhookRules((receiver.url,), secrets)
        # The second time is after the pause of a failed delivery, long before the claim runs out.
        for send, now, status in ((broken, 2000.0, "pending"), (send_webhook, 2006.0, "delivered")):
            deliverer = WebhookDeliverer(post.outbox, rules, send, clock=lambda now=now: now)  # type: ignore[misc]
            deliverer.tick()
            deliverer.close()
            assert post.outbox.count_by_status()[status] == 1
        assert receiver.wait_for(1)
