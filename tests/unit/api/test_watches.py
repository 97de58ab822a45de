"""Jobs that callers follow are marked for the control plane that reads their events, each now and then."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftkv_platform.api.following import Watches
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.orchestration.job import start
from swiftkv_platform.orchestration.ports import Page
from tests.records import make_job, store
from tests.unit.api.conftest import StillClock


@dataclass
class Noted:
    """Jobs whose watches are counted."""

    until: list[tuple[str, float]] = field(default_factory=list)
    away: bool = False

    def watch(self, job_id: str, until: float) -> None:
        if self.away:
            raise DatabaseUnavailableError("away")
        self.until.append((job_id, until))


def test_a_job_that_is_asked_for_again_and_again_is_marked_now_and_then() -> None:
    jobs, clock = Noted(), StillClock()
    watches = Watches(jobs, clock)  # type: ignore[arg-type]
    for _ in range(100):
        watches.note("a")
        watches.note("b")
        clock.now += 0.5
    assert [job_id for job_id, _ in jobs.until] == ["a", "b"] * 3
    gaps = [later - 60.0 for job_id, later in jobs.until if job_id == "a"]
    assert gaps == [1000.0, 1020.0, 1040.0], "each mark is renewed long before it runs out"


def test_a_database_that_is_away_keeps_no_reader_waiting_and_is_told_later() -> None:
    jobs = Noted(away=True)
    watches = Watches(jobs, StillClock())  # type: ignore[arg-type]
    watches.note("a")
    jobs.away = False
    watches.note("a")
    assert [job_id for job_id, _ in jobs.until] == ["a"]


def test_of_very_many_jobs_the_newest_are_remembered() -> None:
    jobs = Noted()
    watches = Watches(jobs, StillClock())  # type: ignore[arg-type]
    for number in range(1500):
        watches.note(str(number))
    watches.note("1499")
    assert len(jobs.until) == 1500
    watches.note("0")
    assert len(jobs.until) == 1501


def test_reading_events_marks_the_job(sqlite_database: Database) -> None:
    jobs = SqlJobRepository(sqlite_database)
    started, event = start(store(jobs, make_job()), now=100)
    job = jobs.update(started, events=[event])
    found = Watches(jobs, StillClock()).events(job.id, Page(limit=5, order="asc"))
    assert [item.data["status"] for item in found.items] == ["queued", "starting"]
    assert jobs.on_cluster()[0].watched_until == 1060.0
