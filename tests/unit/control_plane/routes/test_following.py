"""Followers of a job's events share one tail, whose reads are counted; followed jobs are marked as watched."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Page, PageQuery, new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.jobs import logs
from swiftkv_platform.control_plane.jobs.job import Event, JobStatus, start_attempt, transition
from swiftkv_platform.control_plane.jobs.logs import EventFollowers, WatchedJobs
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.settings import Settings
from swiftkv_platform.web.limiters import TenantConcurrencyLimiter
from tests.support.records import make_job, store
from tests.unit.control_plane.routes.conftest import SPEC, StillClock, make_parts, served_control_plane

FOLLOWERS = 50


class Events:
    """Events of one job, read as from a repository."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reads = 0
        self.error: Exception | None = None

    def add(self, count: int) -> None:
        for _ in range(count):
            number = len(self.events)
            self.events.append(Event(f"evt_{number}", "job_1", 0, "message", str(number)))

    def end(self) -> None:
        data = {"status": "succeeded"}
        self.events.append(Event(f"evt_{len(self.events)}", "job_1", 0, "status", "succeeded", data=data))

    def read(self, job_id: str, page: PageQuery) -> Page[Event]:
        assert (job_id, page.order) == ("job_1", "asc")
        self.reads += 1
        if self.error is not None:
            raise self.error
        start = 0 if page.after is None else int(page.after.removeprefix("evt_")) + 1
        found = self.events[start : start + page.limit + 1]
        return Page(found[: page.limit], has_more=len(found) > page.limit)


@pytest.fixture(autouse=True)
def _reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_LOG_POLL_INTERVAL_S", 0.01)


@pytest.fixture
def events() -> Events:
    events = Events()
    events.add(250)
    return events


async def take(stream: AsyncIterator[Event], count: int) -> list[str]:
    return [(await anext(stream)).message for _ in range(count)]


async def test_many_followers_cost_the_reads_of_one(events: Events) -> None:
    followers = EventFollowers(events.read, TenantConcurrencyLimiter())
    streams = [followers.follow("job_1", "a", None, has_ended=False) for _ in range(FOLLOWERS)]
    for stream in streams:
        assert await take(stream, 250) == [str(number) for number in range(250)]
    caught_up = events.reads
    assert caught_up == 3 * FOLLOWERS
    for number in range(250, 260):
        events.add(1)
        heard = await asyncio.gather(*(take(stream, 1) for stream in streams))
        assert heard == [[str(number)]] * FOLLOWERS
    assert events.reads - caught_up < FOLLOWERS, "followers share the reads of a tail"
    events.end()
    assert await asyncio.gather(*(take(stream, 1) for stream in streams)) == [["succeeded"]] * FOLLOWERS
    for stream in streams:
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert not followers._events_by_job, "events are dropped with their last follower"


async def test_a_follower_of_a_job_that_has_ended_hears_its_events_and_ends(events: Events) -> None:
    stream = EventFollowers(events.read, TenantConcurrencyLimiter()).follow("job_1", "a", "evt_200", has_ended=True)
    assert [event.message async for event in stream] == [str(number) for number in range(201, 250)]


async def test_of_a_tenants_followed_jobs_one_is_read_at_a_time() -> None:
    reading, most, lock = Counter[str](), Counter[str](), threading.Lock()

    def read(job_id: str, page: PageQuery) -> Page[Event]:
        tenant = job_id[0]
        with lock:
            reading[tenant] += 1
            most[tenant] = max(most[tenant], reading[tenant])
        time.sleep(0.002)
        with lock:
            reading[tenant] -= 1
        return Page([Event(new_id("evt"), job_id, 0, "message", job_id)], has_more=False)

    followers = EventFollowers(read, TenantConcurrencyLimiter())
    streams = [followers.follow(f"{tenant}{n}", tenant, None, has_ended=False) for tenant in "ab" for n in range(8)]
    heard = await asyncio.gather(*(take(stream, 3) for stream in streams))
    assert heard == [[f"{tenant}{n}"] * 3 for tenant in "ab" for n in range(8)]
    assert most == {"a": 1, "b": 1}
    for stream in streams:
        await stream.aclose()


async def test_a_follower_too_slow_for_the_tail_misses_nothing(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_CACHED_EVENTS", 10)
    followers = EventFollowers(events.read, TenantConcurrencyLimiter())
    async with (
        aclosing(followers.follow("job_1", "a", "evt_248", has_ended=False)) as slow,
        aclosing(followers.follow("job_1", "a", "evt_248", has_ended=False)) as fast,
    ):
        assert await take(slow, 1) == await take(fast, 1) == ["249"]
        events.add(1)
        assert await take(slow, 1) == await take(fast, 1) == ["250"]
        events.add(100)
        assert await take(fast, 100) == [str(number) for number in range(251, 351)]
        assert await take(slow, 100) == [str(number) for number in range(251, 351)]


async def test_every_follower_is_told_that_the_database_is_away(events: Events) -> None:
    followers = EventFollowers(events.read, TenantConcurrencyLimiter())
    streams = [followers.follow("job_1", "a", "evt_248", has_ended=False) for _ in range(3)]
    for stream in streams:
        assert await take(stream, 1) == ["249"]
    waiting = [asyncio.create_task(take(stream, 1)) for stream in streams]
    await asyncio.sleep(0)
    events.error = DatabaseUnavailableError("away")
    for task in waiting:
        with pytest.raises(DatabaseUnavailableError):
            await task
    events.error = None
    events.add(1)
    async with aclosing(followers.follow("job_1", "a", "evt_249", has_ended=False)) as stream:
        assert await take(stream, 1) == ["250"]


EVENTS = 40


@pytest.mark.parametrize("number", [3, pytest.param(200, marks=pytest.mark.soak("200 connections"))])
async def test_every_follower_hears_everything_in_order_and_others_are_still_answered(
    tmp_path: Path, empty_database: Path, number: int
) -> None:
    parts = make_parts(tmp_path, empty_database)
    settings = Settings(home=tmp_path, max_streams_of_key=number, max_streams_of_tenant=number, _env_file=None)
    with served_control_plane(replace(parts, clock=lambda: 1000.0), settings) as url:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
            job_id = (await client.post("/jobs", json=SPEC)).json()["id"]
            connected = asyncio.Semaphore(0)
            followers = []
            for _ in range(number):  # one after the other: a tenant's many requests at once are refused
                followers.append(asyncio.create_task(follow(client, job_id, connected)))
                await asyncio.wait_for(connected.acquire(), 60)
            job = parts.jobs.get(job_id, tenant="default")
            sent = [Event(new_id("evt"), job_id, 1000, "message", f"number {each}") for each in range(EVENTS)]
            for event in sent:
                job = parts.jobs.update(job, events=[event])
                assert (await client.get(f"/jobs/{job_id}")).status_code == 200
            cancelling, first = transition(job, JobStatus.CANCELLING, now=1000)
            cancelled, second = transition(cancelling, JobStatus.CANCELLED, now=1000)
            parts.jobs.update(cancelled, events=[first, second])
            heard = await asyncio.gather(*followers)
    expected = [*(event.message for event in sent), first.message, second.message]
    for each in heard:
        assert each[1:] == expected


async def follow(client: httpx.AsyncClient, job_id: str, connected: asyncio.Semaphore) -> list[str]:
    heard: list[str] = []
    async with client.stream("GET", f"/jobs/{job_id}/events", headers={"Accept": "text/event-stream"}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                heard.append(json.loads(line.removeprefix("data: "))["message"])
                if len(heard) == 1:
                    connected.release()
    return heard


@dataclass
class Noted:
    """A repository that records when jobs are marked as watched."""

    until: list[tuple[str, float]] = field(default_factory=list)
    away: bool = False

    def mark_watched(self, job_id: str, until: float) -> None:
        if self.away:
            raise DatabaseUnavailableError("away")
        self.until.append((job_id, until))


def test_a_job_that_is_asked_for_again_and_again_is_marked_now_and_then() -> None:
    jobs, clock = Noted(), StillClock()
    watches = WatchedJobs(jobs, clock)  # type: ignore[arg-type]
    for _ in range(100):
        watches.mark_watched("a")
        watches.mark_watched("b")
        clock.now += 0.5
    assert [job_id for job_id, _ in jobs.until] == ["a", "b"] * 3
    gaps = [later - 60.0 for job_id, later in jobs.until if job_id == "a"]
    assert gaps == [1000.0, 1020.0, 1040.0], "each mark is renewed long before it runs out"


def test_only_the_newest_of_very_many_jobs_are_remembered() -> None:
    jobs = Noted()
    watches = WatchedJobs(jobs, StillClock())  # type: ignore[arg-type]
    for number in (*range(1500), 1499, 0):
        watches.mark_watched(str(number))
    assert [job_id for job_id, _ in jobs.until[1499:]] == ["1499", "0"], "0 was forgotten, so it is marked again"


def test_a_database_that_is_away_keeps_no_reader_waiting_and_is_told_later() -> None:
    jobs = Noted(away=True)
    watches = WatchedJobs(jobs, StillClock())  # type: ignore[arg-type]
    watches.mark_watched("a")
    jobs.away = False
    watches.mark_watched("a")
    assert [job_id for job_id, _ in jobs.until] == ["a"]


def test_reading_events_marks_the_job(sqlite_database: Database) -> None:
    jobs = JobRepository(sqlite_database, TenantPolicies())
    started, event = start_attempt(store(jobs, make_job()), now=100)
    job = jobs.update(started, events=[event])
    found = WatchedJobs(jobs, StillClock()).list_events(job.id, PageQuery(limit=5, order="asc"))
    assert [item.data["status"] for item in found.items] == ["queued", "starting"]
    assert jobs.list_cluster_jobs()[0].watched_until == 1060.0
