"""Contract of a database for webhook deliveries: SQLite and PostgreSQL alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swiftkv_platform.database.outbox import SqlOutbox
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from swiftkv_platform.errors import StaleVersionError
from swiftkv_platform.orchestration.job import start
from tests.records import make_job, store
from tests.threads import at_once

HOOK = {"url": "https://a.example/hook", "secret_ref": "signing"}


@pytest.fixture
def outbox(database: Database) -> SqlOutbox:
    return SqlOutbox(database)


def test_a_change_and_its_delivery_are_stored_together(jobs: SqlJobRepository, outbox: SqlOutbox) -> None:
    job = store(jobs, make_job(webhook=HOOK, metadata={"team": "blue"}))
    started, event = start(job, now=101)
    with pytest.raises(StaleVersionError):
        jobs.update(replace(started, version=7), events=[event])
    [first] = outbox.claim(now=200.0, until=260.0, limit=10)
    assert (first.event.data["status"], first.tenant, first.job_name) == ("queued", "acme", "test")
    assert (first.webhook.url, first.metadata, first.attempts) == (HOOK["url"], {"team": "blue"}, 0)
    outbox.delivered(first.sequence, 201.0)
    assert outbox.claim(now=300.0, until=360.0, limit=10) == []
    jobs.update(started, events=[event])
    [second] = outbox.claim(now=300.0, until=360.0, limit=10)
    assert second.event == event
    assert outbox.count_by_status() == {"pending": 1, "delivered": 1, "failed": 0}


def test_a_jobs_deliveries_to_one_address_wait_for_each_other(jobs: SqlJobRepository, outbox: SqlOutbox) -> None:
    job, other = store(jobs, make_job(webhook=HOOK)), store(jobs, make_job(webhook=HOOK))
    started, event = start(job, now=101)
    jobs.update(started, events=[event])
    first = outbox.claim(now=200.0, until=260.0, limit=10)
    assert [delivery.event.job_id for delivery in first] == [job.id, other.id]
    outbox.put_off(first[0].sequence, "answered with 500", 205.0)
    assert outbox.claim(now=204.0, until=264.0, limit=10) == []
    [again] = outbox.claim(now=205.0, until=265.0, limit=10)
    assert (again.sequence, again.attempts) == (first[0].sequence, 1)
    outbox.give_up(again.sequence, "answered with 500")
    assert [delivery.event for delivery in outbox.claim(now=206.0, until=266.0, limit=10)] == [event]


def test_a_claim_that_nobody_settles_runs_out(jobs: SqlJobRepository, outbox: SqlOutbox) -> None:
    store(jobs, make_job(webhook=HOOK))
    [claimed] = outbox.claim(now=200.0, until=260.0, limit=10)
    assert outbox.claim(now=259.0, until=300.0, limit=10) == []
    assert outbox.claim(now=260.0, until=320.0, limit=10) == [claimed]


def test_of_many_who_claim_at_once_one_gets_each(jobs: SqlJobRepository, outbox: SqlOutbox) -> None:
    for _ in range(20):
        store(jobs, make_job(webhook=HOOK))

    def claim() -> list[int]:
        claimed: list[int] = []
        while found := outbox.claim(now=200.0, until=260.0, limit=3):
            claimed += [delivery.sequence for delivery in found]
        return claimed

    claimed = [sequence for found in at_once([claim] * 4) for sequence in found]
    assert len(claimed) == len(set(claimed)) == 20


def test_deliveries_to_a_receiver_that_is_left_out_wait(jobs: SqlJobRepository, outbox: SqlOutbox) -> None:
    for url in ("https://A.example/hook", "https://a.example", "https://a.example.org/x", "https://a.example:8443/x"):
        store(jobs, make_job(webhook={**HOOK, "url": url}))
    claimed = outbox.claim(now=200.0, until=260.0, limit=10, without=["https://a.example", "https://b_.example"])
    assert [delivery.webhook.url for delivery in claimed] == ["https://a.example.org/x", "https://a.example:8443/x"]
    rest = outbox.claim(now=200.0, until=260.0, limit=10)
    assert [delivery.webhook.url for delivery in rest] == ["https://A.example/hook", "https://a.example"]
