"""Webhooks from a job's change to a receiver that really listens: signed, again until they arrive, in order, once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.orchestration.webhooks import recipients
from swiftkv_platform.security.webhooks import verify
from swiftkv_platform.settings import Settings
from tests.rays import free_port
from tests.unit.api.conftest import SPEC, Server, control_plane, make_parts

SECRET = "a secret that signs webhooks"


@dataclass
class Receiver:
    """Received requests, and the answers to give."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    """Statuses of the next answers; 200 afterwards."""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def told(self) -> list[str]:
        return [json.loads(body)["type"].removeprefix("distillation.job.") for _, _, body in self.requests]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
            self.send_header("Location", f"{receiver.url}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def gone() -> str:
    """An address without a listener."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def server(receiver: Receiver, gone: str, tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    secrets = tmp_path / "secrets" / "default"
    secrets.mkdir(parents=True)
    (secrets / "signing").write_text(f"{SECRET}\n")
    parts = make_parts(tmp_path, empty_database)
    origins = (receiver.url, gone, "https://*.example.com")
    settings = Settings(home=tmp_path, webhook_origins=origins, secrets_dir=secrets.parent, _env_file=None)
    with control_plane(parts, settings) as client:
        yield Server(client, parts, settings)


def hook(receiver: Receiver, path: str = "/hook", **more: Any) -> dict[str, Any]:
    return {"url": f"{receiver.url}{path}", "secret_ref": "signing", **more}


def test_every_change_is_told_signed_and_in_order(server: Server, receiver: Receiver) -> None:
    job = server.succeed(webhook=hook(receiver), metadata={"team": "blue"})
    for _ in range(5):
        server.tick()
    assert receiver.told() == ["queued", "starting", "running", "succeeded"]
    events = [event for event in server.get(f"/jobs/{job['id']}/events")["data"] if event["type"] == "status"]
    for (path, headers, body), event in zip(receiver.requests, events, strict=True):
        verify(headers, body, SECRET, now=server.parts.clock())
        with pytest.raises(UnauthenticatedError):
            verify(headers, body, SECRET + "!", now=server.parts.clock())
        assert (path, headers["webhook-id"], headers["content-type"]) == ("/hook", event["id"], "application/json")
        document = json.loads(body)
        assert document["timestamp"] == event["created_at"]
        assert document["data"] == {
            **event["data"],
            "id": event["id"],
            "job_id": job["id"],
            "name": "test",
            "tenant": "default",
            "metadata": {"team": "blue"},
            "message": event["message"],
        }
    server.wait(20)
    text = server.client.get("/metrics").text
    assert 'swiftkv_webhook_deliveries{status="delivered"} 4.0' in text


def test_a_receiver_chooses_what_it_is_told(server: Server, receiver: Receiver) -> None:
    server.succeed(webhook=hook(receiver, on=["succeeded", "failed"]))
    server.tick()
    assert receiver.told() == ["succeeded"]


def test_what_fails_is_sent_again_later_and_keeps_its_order(server: Server, receiver: Receiver) -> None:
    receiver.answers = [500, 301]
    server.succeed(webhook=hook(receiver))
    with capture_logs() as logs:
        for _ in range(6):
            server.tick()
            server.parts.clock.now += 20
    assert receiver.told() == ["queued", "queued", "queued", "starting", "running", "succeeded"]
    assert {path for path, _, _ in receiver.requests} == {"/hook"}, "a redirect is not followed"
    first, again = (headers["webhook-id"] for _, headers, _ in receiver.requests[:2])
    assert first == again, "a receiver can tell a repetition"
    assert SECRET not in str(logs)


def test_a_receiver_that_is_away_for_a_day_is_given_up(server: Server, receiver: Receiver) -> None:
    job = server.submit(webhook=hook(receiver, on=["queued"]))
    receiver.answers = [503] * 50
    tries = 0
    while len(receiver.requests) > tries or not tries:
        tries = len(receiver.requests)
        server.tick()
        server.parts.clock.now += 3601
    assert 24 <= tries <= 36
    server.wait(20)
    assert 'swiftkv_webhook_deliveries{status="failed"} 1.0' in server.client.get("/metrics").text
    error = server.get(f"/jobs/{job['id']}")["error"]
    assert error is None or error["code"] == "not_placed", "a day without a word ends the job; the receiver does not"


def test_one_receivers_silence_is_not_anothers(server: Server, receiver: Receiver, gone: str) -> None:
    server.submit(webhook={"url": gone, "secret_ref": "signing"})
    server.submit(webhook=hook(receiver, on=["queued"]))
    server.tick()
    assert receiver.told() == ["queued"]


def test_a_tenants_own_webhook_is_told_of_all_its_jobs(receiver: Receiver, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": {"default": {"webhook": hook(receiver, "/tenant", on=["queued"])}}}))
    jobs = SqlJobRepository(server.parts.database, recipients(Tenants(file)))
    with control_plane(replace(server.parts, jobs=jobs), server.settings) as client:
        both = Server(client, server.parts, server.settings)
        both.submit()
        both.submit(webhook=hook(receiver, on=["queued"]))
        both.submit(webhook=hook(receiver, "/tenant", on=["queued"]))
        both.tick()
    assert sorted(path for path, _, _ in receiver.requests) == ["/hook", "/tenant", "/tenant", "/tenant"]


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"url": "https://evil.example/hook"}, "webhook.url", "allowed are: http://127.0.0.1"),
        ({"url": "https://example.com.evil.example/"}, "webhook.url", "not allowed"),
        ({"url": "http://a.example.com/"}, "webhook.url", "not allowed"),
        ({"url": "https://a.example.com:8443/"}, "webhook.url", "not allowed"),
        ({"url": "https://user:hunter2@a.example.com/"}, "webhook.url", "signature"),
        ({"secret_ref": "missing"}, "webhook.secret_ref", "no secret 'missing'"),
        ({"secret_ref": "../other/signing"}, "webhook.secret_ref", "pattern"),
        ({"on": ["done"]}, "webhook.on[0]", "succeeded"),
    ],
)
@pytest.mark.parametrize("path", ["/jobs", "/jobs/validate"])
def test_addresses_and_secrets_that_are_not_the_tenants_are_refused(
    server: Server, receiver: Receiver, path: str, changed: dict[str, Any], field: str, message: str
) -> None:
    refused = server.client.post(path, json={**SPEC, "webhook": {**hook(receiver), **changed}})
    [error] = refused.json()["errors"]
    assert (refused.status_code, error["field"]) == (422, field)
    assert message in error["message"]


def test_without_an_allow_list_webhooks_are_refused(tmp_path: Path, empty_database: Path) -> None:
    with control_plane(make_parts(tmp_path, empty_database), Settings(home=tmp_path, _env_file=None)) as client:
        refused = client.post("/jobs", json={**SPEC, "webhook": {"url": "https://a.example/", "secret_ref": "s"}})
    assert "SWIFTKV_WEBHOOK_ORIGINS" in refused.json()["detail"]


def test_a_host_that_is_no_longer_allowed_is_told_nothing(server: Server, receiver: Receiver) -> None:
    server.submit(webhook=hook(receiver))
    closed = server.settings.model_copy(update={"webhook_origins": ()})
    Server(server.client, server.parts, closed).tick()
    assert receiver.requests == []
