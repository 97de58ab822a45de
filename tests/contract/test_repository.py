"""Contract of a database for jobs, events and metrics: SQLite and PostgreSQL alike."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

from swiftkv_platform.contract.events import Pace
from swiftkv_platform.control_plane.base import PageQuery, new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import EventRow
from swiftkv_platform.control_plane.jobs.job import (
    Attempt,
    Event,
    Failure,
    Job,
    JobStatus,
    MetricPoint,
    Reason,
    start_attempt,
    transition,
)
from swiftkv_platform.control_plane.jobs.repository import JobFilter, JobRepository
from swiftkv_platform.errors import (
    IdempotencyConflictError,
    InvalidInputError,
    NotFoundError,
    StaleVersionError,
)
from tests.support.records import TENANT, make_job, make_model, message, store
from tests.support.threads import at_once


def test_a_job_comes_back_as_it_was_stored_to_its_tenant_alone(jobs: JobRepository) -> None:
    job = replace(
        make_job(metadata={"team": "blue"}),
        attempt=Attempt(
            number=2,
            submission_id="job-2",
            submitted_at=1.5,
            resume_from="jobs/x/checkpoints/1",
            cursor={"driver": 3},
            pace=Pace(4, 5.25),
            failure=Failure(Reason("worker_lost", "gone", "a.b"), retryable=True),
        ),
        tracking={"url": None},
        retries=1,
        not_before=7.5,
    )
    store(jobs, job)
    assert jobs.get(job.id, tenant=TENANT) == job
    with pytest.raises(NotFoundError, match=job.id):
        jobs.get(job.id, tenant="other")
    assert jobs.list(PageQuery(), tenant="other").items == []


def test_an_update_of_an_old_version_changes_nothing(jobs: JobRepository) -> None:
    read = store(jobs, make_job())
    started, event = start_attempt(read, now=101)
    stored = jobs.update(started, events=[event])
    cancelled, late = transition(read, JobStatus.CANCELLING, now=102)
    with pytest.raises(StaleVersionError):
        jobs.update(cancelled, events=[late], points=[MetricPoint(1, 1, 0.0, {})], model=make_model(read))
    assert jobs.get(read.id, tenant=TENANT) == stored
    statuses = [item.data["status"] for item in jobs.list_events(read.id, PageQuery(order="asc")).items]
    assert (statuses, jobs.list_points(read.id, PageQuery()).items) == (["queued", "starting"], [])


def test_of_updates_at_the_same_time_one_wins(jobs: JobRepository) -> None:
    job = store(jobs, make_job())
    outcomes = at_once(partial(jobs.update, job, events=[message(job, str(number))]) for number in range(4))
    assert sum(isinstance(outcome, StaleVersionError) for outcome in outcomes) == 3
    assert len(jobs.list_events(job.id, PageQuery()).items) == 2


def test_a_key_stands_for_one_job_of_its_tenant(jobs: JobRepository) -> None:
    first = store(jobs, make_job(), key="k")
    assert store(jobs, make_job(), key="k") == first
    other = store(jobs, make_job(tenant="other"), key="k")
    assert other.id != first.id
    with pytest.raises(IdempotencyConflictError, match=first.id):
        store(jobs, make_job(), key="k", body="b")
    assert [job.id for job in jobs.list(PageQuery(), tenant=TENANT).items] == [first.id]


def test_one_key_from_many_requests_at_once_gives_one_job(jobs: JobRepository) -> None:
    found = at_once(lambda: store(jobs, make_job(), key="k").id for _ in range(6))
    assert set(found) == {job.id for job in jobs.list(PageQuery(), tenant=TENANT).items}
    assert len(set(found)) == 1


def test_lists_are_filtered(jobs: JobRepository) -> None:
    blue = store(jobs, make_job(metadata={"team": "blue", "a.b": "1"}))
    red = store(jobs, make_job(name="red-one", metadata={"team": "red"}, model={"name_or_path": "org/big"}))
    started, _ = start_attempt(red, now=101)
    jobs.update(started)

    def ids(**where: Any) -> list[str]:
        return [job.id for job in jobs.list(PageQuery(), tenant=TENANT, where=JobFilter(**where)).items]

    assert ids(metadata={"team": "blue"}) == [blue.id]
    assert ids(metadata={"team": "blue", "a.b": "1"}) == [blue.id]
    assert ids(metadata={"team": "blue", "a.b": "2"}) == []
    assert ids(model="org/big") == [red.id]
    assert ids(name="red-one") == ids(name="red-one", model="org/big") == [red.id]
    assert ids(name="red") == []
    assert ids(status=JobStatus.QUEUED) == [blue.id]
    assert ids(status=JobStatus.STARTING, model="org/big") == [red.id]


def test_events_keep_the_order_in_which_they_were_stored(jobs: JobRepository) -> None:
    job = store(jobs, make_job())
    for start_number in range(0, 60, 20):
        job = jobs.update(job, events=[message(job, str(n)) for n in range(start_number, start_number + 20)])
    everything = jobs.list_events(job.id, PageQuery(limit=100, order="asc")).items
    assert [event.message for event in everything[1:]] == [str(number) for number in range(60)]
    page = jobs.list_events(job.id, PageQuery(after=everything[10].id, limit=5, order="asc"))
    assert page.items == everything[11:16]
    assert page.has_more
    with pytest.raises(InvalidInputError, match="after"):
        jobs.list_events(job.id, PageQuery(after=new_id("evt")))


def test_a_repeated_step_replaces_the_earlier_one(jobs: JobRepository) -> None:
    job = store(jobs, make_job())
    job = jobs.update(job, points=[MetricPoint(step, 1, 10.5 + step, {"loss": 1.0}) for step in range(1, 1200)])
    job = jobs.update(job, points=[MetricPoint(2, 2, 99.0, {"loss": None}), MetricPoint(2, 2, 99.5, {"loss": 0.25})])
    first = jobs.list_points(job.id, PageQuery(limit=3, order="asc"))
    assert first.items == [
        MetricPoint(1, 1, 11.5, {"loss": 1.0}),
        MetricPoint(2, 2, 99.5, {"loss": 0.25}),
        MetricPoint(3, 1, 13.5, {"loss": 1.0}),
    ]
    assert first.has_more
    assert [point.step for point in jobs.list_points(job.id, PageQuery(after="1198", order="asc")).items] == [1199]
    with pytest.raises(InvalidInputError, match="after"):
        jobs.list_points(job.id, PageQuery(after="x"))


def test_a_page_of_events_counts_the_points_that_are_stored_apart(
    jobs: JobRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.control_plane.database.session.PAGE_BYTES", 20_000)
    job = store(jobs, make_job())
    events = [told(job, *range(number * 10, number * 10 + 10)) for number in range(1, 9)]
    odd = [replace(told(job), data={"points": [], "steps": ["a", "b"]}), message(job, "steps")]
    odd[1] = replace(odd[1], data={"steps": {"a": "b"}})
    points = [MetricPoint(step, 1, 5.0, {"loss": 1.0 / step, "note": "x" * 500}) for step in range(10, 90)]
    jobs.update(job, events=[*events, *odd], points=points)
    found: list[Event] = []
    while True:
        page = jobs.list_events(job.id, PageQuery(found[-1].id if found else None, 100, "asc"))
        assert sum(len(str(event.data)) for event in page.items) < 30_000
        found += page.items
        if not page.has_more:
            break
    assert [event.id for event in found[1:]] == [event.id for event in (*events, *odd)]
    assert [len(event.data["points"]) for event in found[1:9]] == [10] * 8
    assert [event.data["steps"] for event in found[9:]] == [["a", "b"], {"a": "b"}]


def told(job: Job, *steps: int) -> Event:
    points = [{"step": step, "loss": 1.0 / step} for step in steps]
    return Event(new_id("evt"), job.id, 100, "metrics", "steps", data={"points": points, "total_steps": 9})


def measured(*steps: int, attempt: int = 1, loss: float | None = None) -> list[MetricPoint]:
    return [MetricPoint(step, attempt, 5.0, {"loss": loss or 1.0 / step}) for step in steps]


def test_points_are_stored_once_and_events_tell_them(database: Database, jobs: JobRepository) -> None:
    """Points that are in no series stay in their event."""
    job = store(jobs, make_job())
    first, second, said, kept = told(job, 1, 2), told(job, 3), message(job, "hello"), told(job, 4, 5)
    jobs.update(job, events=[first, said, second, kept], points=measured(1, 2, 3, 4))
    with database.begin_read() as session:
        rows = session.scalars(select(EventRow).where(EventRow.type == "metrics").order_by(EventRow.sequence)).all()
    steps = [{"total_steps": 9, "steps": [1, 2]}, {"total_steps": 9, "steps": [3, 3]}]
    assert [row.data for row in rows] == [*steps, kept.data]
    assert jobs.list_events(job.id, PageQuery(order="asc")).items[1:] == [first, said, second, kept]


def test_a_repeated_step_is_told_with_its_newest_values(jobs: JobRepository) -> None:
    job = store(jobs, make_job())
    job = jobs.update(job, events=[told(job, 1, 2)], points=measured(1, 2))
    jobs.update(job, points=measured(2, attempt=2, loss=7.0))
    [event] = jobs.list_events(job.id, PageQuery(limit=1)).items
    assert event.data["points"] == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 7.0}]
