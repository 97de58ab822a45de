"""Measurements are stored once, and events tell them as they were told: SQLite and PostgreSQL alike."""

from __future__ import annotations

from sqlalchemy import select

from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import EventRow
from swiftkv_platform.orchestration.job import Event, Job, MetricPoint, new_id
from swiftkv_platform.orchestration.ports import Page
from tests.records import make_job, message, store


def told(job: Job, *steps: int) -> Event:
    points = [{"step": step, "loss": 1.0 / step} for step in steps]
    return Event(new_id("evt"), job.id, 100, "metrics", "steps", data={"points": points, "total_steps": 9})


def measured(*steps: int, attempt: int = 1, loss: float | None = None) -> list[MetricPoint]:
    return [MetricPoint(step, attempt, 5.0, {"loss": loss or 1.0 / step}) for step in steps]


def test_points_are_in_the_time_series_alone(database: Database, jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    first, second, said = told(job, 1, 2), told(job, 3), message(job, "hello")
    jobs.update(job, events=[first, said, second], points=measured(1, 2, 3))
    with database.reading() as session:
        rows = session.scalars(select(EventRow).where(EventRow.type == "metrics").order_by(EventRow.sequence)).all()
    assert [row.data for row in rows] == [{"total_steps": 9, "steps": [1, 2]}, {"total_steps": 9, "steps": [3, 3]}]
    assert jobs.events(job.id, Page(order="asc")).items[1:] == [first, said, second]


def test_a_repeated_step_is_told_with_its_newest_values(jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    job = jobs.update(job, events=[told(job, 1, 2)], points=measured(1, 2))
    jobs.update(job, points=measured(2, attempt=2, loss=7.0))
    [event] = jobs.events(job.id, Page(limit=1)).items
    assert event.data["points"] == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 7.0}]


def test_points_that_no_series_holds_stay_in_their_event(database: Database, jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    event = told(job, 1, 2)
    jobs.update(job, events=[event], points=measured(1))
    assert jobs.events(job.id, Page(limit=1)).items == [event]
    with database.reading() as session:
        assert session.scalars(select(EventRow.data).where(EventRow.type == "metrics")).all() == [event.data]
