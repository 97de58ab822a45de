"""A job's events as they happen, read once for all its followers in this process. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial

from starlette.concurrency import run_in_threadpool

from swiftkv_platform.control_plane.base import Clock, Page, Slice, is_due
from swiftkv_platform.control_plane.http.turns import Turns
from swiftkv_platform.control_plane.jobs.job import Event, JobStatus
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.logs import get_logger

ReadEvents = Callable[[str, Page], Slice[Event]]
"""(job id, page) -> its events."""
Turn = Callable[[], AbstractAsyncContextManager[None]]

_POLL_S = 0.5
_EVENTS_PER_READ = 100
_KEPT = 1000
"""Most events of a job that are kept for slow followers."""


class EventTail:
    """The newest events of one job, for as long as it has followers. `turn`: a turn of its tenant, in which it reads.
    `after`: id of the event after which it starts to read."""

    def __init__(self, read: ReadEvents, turn: Turn, job_id: str, after: str | None) -> None:
        self._read = read
        self._turn = turn
        self._job_id = job_id
        self._newest = after
        self._next: dict[str | None, Event] = {}
        """Events by the id of the preceding one, in order."""
        self._error: Exception | None = None
        self._has_read = asyncio.Event()
        self.followers = 0

    async def after(self, last: str | None) -> Sequence[Event] | None:
        """Return the events after the event `last`, possibly none; None if `last` is no longer kept, so that the
        database must be read. Waits for the next read if there is nothing new. Raises what reading has raised."""
        if self._error is None and not self._since(last):
            await self._has_read.wait()
        if self._error is not None:
            raise self._error
        return self._since(last)

    def _since(self, last: str | None) -> Sequence[Event] | None:
        if last != self._newest and last not in self._next:
            return None
        found = []
        while (event := self._next.get(last)) is not None:
            found.append(event)
            last = event.id
        return found

    async def run(self) -> None:
        """Read until that fails; every follower then gets the error."""
        while self._error is None:
            await asyncio.sleep(_POLL_S)
            page = Page(self._newest, _EVENTS_PER_READ, order="asc")
            try:
                async with self._turn():
                    found = await run_in_threadpool(self._read, self._job_id, page)
            except Exception as error:
                self._error = error
            else:
                self._take(found.items)
            has_read, self._has_read = self._has_read, asyncio.Event()
            has_read.set()

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._next[self._newest] = event
            self._newest = event.id
        while len(self._next) > _KEPT:
            del self._next[next(iter(self._next))]


class Followers:
    """Followers of jobs in this process. Belongs to one event loop."""

    def __init__(self, read: ReadEvents, turns: Turns) -> None:
        self._read = read
        self._turns = turns
        self._tails: dict[str, tuple[EventTail, asyncio.Task[None]]] = {}

    async def follow(
        self, job_id: str, tenant: str, after: str | None, *, has_ended: bool
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a tenant's job after the event `after`, up to the one that ends the job. Raises what
        reading raises. `has_ended`: whether the job has already ended, and its last event is stored."""
        turn = partial(self._turns.turn, tenant, "following")
        while True:
            async with turn():
                found = await run_in_threadpool(self._read, job_id, Page(after, _EVENTS_PER_READ, order="asc"))
            for event in found.items:
                yield event
                after, has_ended = event.id, has_ended or _ends(event)
            if found.has_more:
                continue
            if has_ended:
                return
            with self._tail(job_id, turn, after) as tail:
                while not has_ended and (events := await tail.after(after)) is not None:
                    for event in events:
                        yield event
                        after, has_ended = event.id, has_ended or _ends(event)

    @contextmanager
    def _tail(self, job_id: str, turn: Turn, after: str | None) -> Iterator[EventTail]:
        """Open the job's tail, which lives from its first follower to its last."""
        if job_id not in self._tails:
            tail = EventTail(self._read, turn, job_id, after)
            self._tails[job_id] = tail, asyncio.create_task(tail.run())
        tail, task = self._tails[job_id]
        tail.followers += 1
        try:
            yield tail
        finally:
            tail.followers -= 1
            if tail.followers == 0:
                task.cancel()
                del self._tails[job_id]


def _ends(event: Event) -> bool:
    return event.type == "status" and JobStatus(event.data["status"]).is_terminal


_WATCHED_S = 60.0
"""Seconds for which a job counts as followed after a caller has asked for it."""
_AGAIN_S = 20.0
_MOST = 1000
"""Most jobs remembered; beyond that, some are marked more often than needed."""


class Watches:
    """Marks jobs as followed, each at most once every 20 s, however often callers ask."""

    def __init__(self, jobs: JobRepository, clock: Clock) -> None:
        self._jobs = jobs
        self._clock = clock
        self._told: dict[str, float] = {}
        """When each job was last marked, the latest one last."""

    def note(self, job_id: str) -> None:
        """Have the job's events read often for a minute. If the database is away, only logs it: the caller's own query
        fails as well."""
        now = self._clock()
        if job_id in self._told and not is_due(self._told[job_id] + _AGAIN_S, now, within=_AGAIN_S):
            return
        try:
            self._jobs.watch(job_id, now + _WATCHED_S)
        except DatabaseUnavailableError as error:
            get_logger().info("job not marked as followed", job_id=job_id, reason=error.message)
            return
        self._told.pop(job_id, None)
        self._told[job_id] = now
        for oldest in list(self._told)[:-_MOST]:
            self._told.pop(oldest, None)

    def events(self, job_id: str, page: Page) -> Slice[Event]:
        """Return a job's events, as `JobRepository.events` does, and mark the job as followed."""
        self.note(job_id)
        return self._jobs.events(job_id, page)
