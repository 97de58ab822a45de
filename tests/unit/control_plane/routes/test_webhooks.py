"""Webhooks of job changes to a real receiver: signed, retried until they arrive, in order, once each."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook
from structlog.testing import capture_logs

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from tests.support.fakes.scripted_server import Answer, Request, Script, serve
from tests.support.rays import free_port
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal

pytestmark = pytest.mark.slow("starts an application for each test")

SECRET = "a secret that signs webhooks"


class Receiver(Script):
    """A tenant's HTTP server; every path takes webhooks."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[int] = []
        """Statuses of the next answers; 200 afterwards."""

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        return Answer(self.answers.pop(0) if self.answers else 200, headers={"Location": f"{self.url}/elsewhere"})

    def told(self) -> list[str]:
        return [request.body["type"].removeprefix("distillation.job.") for request in self.requests]


@pytest.fixture
def gone() -> str:
    """An address at which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    with serve(receiver) as receiver.url:
        yield receiver


@pytest.fixture
def server(receiver: Receiver, gone: str, tmp_path: Path, start: Start) -> Server:
    secrets = tmp_path / "secrets" / "default"
    secrets.mkdir(parents=True)
    (secrets / "signing").write_text(f"{SECRET}\n")
    origins = (receiver.url, gone, "https://*.example.com")
    return start(webhook_origins=origins, secrets_dir=secrets.parent)


def hook(receiver: Receiver, path: str = "/hook", **more: Any) -> dict[str, Any]:
    return {"url": f"{receiver.url}{path}", "secret_ref": "signing", **more}


def test_every_change_is_told_signed_and_in_order(server: Server, receiver: Receiver) -> None:
    job = server.succeed(webhook=hook(receiver), metadata={"team": "blue"})
    for _ in range(5):
        server.tick()
    assert receiver.told() == ["queued", "starting", "running", "succeeded"]
    events = [event for event in server.get(f"/jobs/{job['id']}/events")["data"] if event["type"] == "status"]
    for request, event in zip(receiver.requests, events, strict=True):
        sent_at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
        signature = Webhook(SECRET.encode()).sign(request.headers["webhook-id"], sent_at, request.raw.decode())
        assert request.headers["webhook-signature"] == signature
        assert abs(sent_at.timestamp() - server.parts.clock()) < 300
        sent = (request.path, request.headers["webhook-id"], request.headers["content-type"])
        assert sent == ("/hook", event["id"], "application/json")
        assert request.body["timestamp"] == event["created_at"]
        assert request.body["data"] == {
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


def test_what_fails_is_sent_again_later_and_keeps_its_order(server: Server, receiver: Receiver) -> None:
    receiver.answers = [500, 301]
    server.succeed(webhook=hook(receiver))
    with capture_logs() as logs:
        for _ in range(6):
            server.tick()
            server.parts.clock.now += 20
    assert receiver.told() == ["queued", "queued", "queued", "starting", "running", "succeeded"]
    assert {request.path for request in receiver.requests} == {"/hook"}, "a redirect is not followed"
    first, again = (request.headers["webhook-id"] for request in receiver.requests[:2])
    assert first == again, "a repetition has the same id"
    assert SECRET not in str(logs)


def test_a_receiver_that_is_away_for_a_day_is_given_up(server: Server, receiver: Receiver) -> None:
    job = server.submit(webhook=hook(receiver, on=["queued"]), fault_tolerance={"max_retries": 0})
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
    assert error is None or error["code"] == "worker_lost", "the job may end for its silence, not for the receiver"


def test_a_receiver_is_told_what_it_chooses_whatever_another_does(
    server: Server, receiver: Receiver, gone: str
) -> None:
    server.submit(webhook={"url": gone, "secret_ref": "signing"})
    server.submit(webhook=hook(receiver, on=["queued"]))
    server.tick()
    assert receiver.told() == ["queued"]
    server.tick()
    assert receiver.told() == ["queued"]


def test_a_tenants_own_webhook_is_told_of_all_its_jobs(
    receiver: Receiver, server: Server, start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": {"default": {"webhook": hook(receiver, "/tenant", on=["queued"])}}}))
    jobs = JobRepository(server.parts.database, TenantPolicies(file))
    settings = {name: getattr(server.settings, name) for name in ("webhook_origins", "secrets_dir")}
    both = start(changed={"jobs": jobs}, **settings)
    both.submit()
    both.submit(webhook=hook(receiver, on=["queued"]))
    both.submit(webhook=hook(receiver, "/tenant", on=["queued"]))
    both.tick()
    assert sorted(request.path for request in receiver.requests) == ["/hook", "/tenant", "/tenant", "/tenant"]


def test_a_host_that_is_no_longer_allowed_is_told_nothing(server: Server, receiver: Receiver) -> None:
    server.submit(webhook=hook(receiver))
    closed = server.settings.model_copy(update={"webhook_origins": ()})
    Server(server.client, server.parts, closed).tick()
    assert receiver.requests == []


def test_addresses_and_secrets_that_are_not_the_tenants_are_refused(
    server: Server, receiver: Receiver, start: Start
) -> None:
    for changed, field, message in (
        ({"url": "https://evil.example/hook"}, "webhook.url", "allowed origins are: http://127.0.0.1"),
        ({"url": "https://example.com.evil.example/"}, "webhook.url", "does not allow"),
        ({"url": "http://a.example.com/"}, "webhook.url", "does not allow"),
        ({"url": "https://a.example.com:8443/"}, "webhook.url", "does not allow"),
        ({"url": "https://user:hunter2@a.example.com/"}, "webhook.url", "remove credentials"),
        *(
            ({"url": f"https://a.example.com/{each}"}, "webhook.url", "which is not valid in URLs")
            for each in ("hook\n", "\thook", "a\rb", "a b", "h\u00f6\u00f6k", "\x7f")
        ),
        ({"url": "https://a.exam\nple.com/"}, "webhook.url", "which is not valid in URLs"),
        ({"secret_ref": "missing"}, "webhook.secret_ref", "no secret 'missing'"),
        ({"secret_ref": "../other/signing"}, "webhook.secret_ref", "pattern"),
        ({"on": ["done"]}, "webhook.on[0]", "succeeded"),
    ):
        for path in ("/jobs", "/jobs/validate"):
            error = refusal(server.client.post(path, json={**SPEC, "webhook": {**hook(receiver), **changed}}))
            assert (error["field"], message in error["message"]) == (field, True)
    closed = start().client.post("/jobs", json={**SPEC, "webhook": {"url": "https://a.example/", "secret_ref": "s"}})
    assert "SWIFTKV_WEBHOOK_ORIGINS" in refusal(closed)["message"], "without an allow list"
