"""The tail of a job's events, whose reads a test counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from swiftkv_platform.api import following
from swiftkv_platform.api.following import Followers
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.orchestration.job import Event
from swiftkv_platform.orchestration.ports import Page, Slice

FOLLOWERS = 50


class Events:
    """Those of one job, as a repository gives them."""

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

    def read(self, job_id: str, page: Page) -> Slice[Event]:
        assert (job_id, page.order) == ("job_1", "asc")
        self.reads += 1
        if self.error is not None:
            raise self.error
        start = 0 if page.after is None else int(page.after.removeprefix("evt_")) + 1
        found = self.events[start : start + page.limit + 1]
        return Slice(found[: page.limit], has_more=len(found) > page.limit)


@pytest.fixture(autouse=True)
def _reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_POLL_S", 0.01)


@pytest.fixture
def events() -> Events:
    events = Events()
    events.add(250)
    return events


async def take(stream: AsyncIterator[Event], count: int) -> list[str]:
    return [(await anext(stream)).message for _ in range(count)]


async def test_many_followers_cost_the_reads_of_one(events: Events) -> None:
    followers = Followers(events.read)
    streams = [followers.follow("job_1", None, has_ended=False) for _ in range(FOLLOWERS)]
    for stream in streams:
        assert await take(stream, 250) == [str(number) for number in range(250)]
    caught_up = events.reads
    assert caught_up == 3 * FOLLOWERS
    for number in range(250, 260):
        events.add(1)
        heard = await asyncio.gather(*(take(stream, 1) for stream in streams))
        assert heard == [[str(number)]] * FOLLOWERS
    assert events.reads - caught_up < FOLLOWERS, "the tail's, not everybody's own"
    events.end()
    assert await asyncio.gather(*(take(stream, 1) for stream in streams)) == [["succeeded"]] * FOLLOWERS
    for stream in streams:
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert not followers._tails, "nobody follows any more"


async def test_a_follower_too_slow_for_the_tail_misses_nothing(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_KEPT", 10)
    followers = Followers(events.read)
    async with (
        aclosing(followers.follow("job_1", "evt_248", has_ended=False)) as slow,
        aclosing(followers.follow("job_1", "evt_248", has_ended=False)) as fast,
    ):
        assert await take(slow, 1) == await take(fast, 1) == ["249"]
        events.add(1)
        assert await take(slow, 1) == await take(fast, 1) == ["250"]
        events.add(100)
        assert await take(fast, 100) == [str(number) for number in range(251, 351)]
        assert await take(slow, 100) == [str(number) for number in range(251, 351)]


async def test_of_a_job_that_has_ended_the_events_are_told_and_no_more(events: Events) -> None:
    stream = Followers(events.read).follow("job_1", "evt_200", has_ended=True)
    assert [event.message async for event in stream] == [str(number) for number in range(201, 250)]


async def test_every_follower_is_told_that_the_database_is_away(events: Events) -> None:
    followers = Followers(events.read)
    streams = [followers.follow("job_1", "evt_248", has_ended=False) for _ in range(3)]
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
    async with aclosing(followers.follow("job_1", "evt_249", has_ended=False)) as stream:
        assert await take(stream, 1) == ["250"]
