"""Events and logs of jobs, live or by page.

Events are read once for all followers in this process. Logs of a job's attempts are concatenated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from functools import partial
from typing import Annotated

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.base import Clock, Page, PageQuery, is_due
from swiftkv_platform.control_plane.components import Components, make_state_dependency
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.errors import ClusterUnavailableError, DatabaseUnavailableError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.attempt_store import SavedLog
from swiftkv_platform.web.limiters import ConcurrencyLimiter, ConcurrencyLimits, TenantConcurrencyLimiter

ReadEvents = Callable[[str, PageQuery], Page[Event]]
"""Function: (job id, page) -> events of the job."""
AcquireReadSlot = Callable[[], AbstractAsyncContextManager[None]]
_LOG_POLL_INTERVAL_S = 0.5
_EVENTS_PER_READ = 100
_MAX_CACHED_EVENTS = 1000
"""Max events of a job that are cached for slow followers."""


class RecentEvents:
    """Cache of the newest events of one job, for as long as it has followers.

    Args:
        acquire_read_slot: opens a context in which a read counts against its tenant's concurrent reads.
        after: id of the event after which reading starts.
    """

    def __init__(self, read: ReadEvents, acquire_read_slot: AcquireReadSlot, job_id: str, after: str | None) -> None:
        self._read = read
        self._acquire_read_slot = acquire_read_slot
        self._job_id = job_id
        self._newest = after
        self._next: dict[str | None, Event] = {}
        """Events by the id of the preceding one, in order."""
        self._error: Exception | None = None
        self._has_read = asyncio.Event()
        self.followers = 0

    async def get_events_after(self, last: str | None) -> Sequence[Event] | None:
        """Return the events after the event `last`, possibly none; None if `last` is not cached any more, so that the
        database must be read. Waits for the next read if there is no new event. Raises what reading has raised."""
        if self._error is None and not self._get_cached_after(last):
            await self._has_read.wait()
        if self._error is not None:
            raise self._error
        return self._get_cached_after(last)

    def _get_cached_after(self, last: str | None) -> Sequence[Event] | None:
        if last != self._newest and last not in self._next:
            return None
        found = []
        while (event := self._next.get(last)) is not None:
            found.append(event)
            last = event.id
        return found

    async def run(self) -> None:
        """Read until a read fails; all followers then get the error."""
        while self._error is None:
            await asyncio.sleep(_LOG_POLL_INTERVAL_S)
            page = PageQuery(self._newest, _EVENTS_PER_READ, order="asc")
            try:
                async with self._acquire_read_slot():
                    found = await run_in_threadpool(self._read, self._job_id, page)
            except Exception as error:
                self._error = error
            else:
                self._append(found.items)
            has_read, self._has_read = self._has_read, asyncio.Event()
            has_read.set()

    def _append(self, events: Sequence[Event]) -> None:
        for event in events:
            self._next[self._newest] = event
            self._newest = event.id
        while len(self._next) > _MAX_CACHED_EVENTS:
            del self._next[next(iter(self._next))]


class EventFollowers:
    """Followers of jobs in this process. Belongs to one event loop."""

    def __init__(self, read: ReadEvents, limiter: TenantConcurrencyLimiter) -> None:
        self._read = read
        self._read_limiter = limiter
        self._events_by_job: dict[str, tuple[RecentEvents, asyncio.Task[None]]] = {}

    async def follow(
        self, job_id: str, tenant: str, after: str | None, *, has_ended: bool
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a tenant's job after the event `after`, up to the one that ends the job. Raises what
        reading raises. `has_ended`: whether the job has already ended, and its last event is stored."""
        acquire_read_slot = partial(self._read_limiter.acquire, tenant, "following")
        while True:
            async with acquire_read_slot():
                found = await run_in_threadpool(self._read, job_id, PageQuery(after, _EVENTS_PER_READ, order="asc"))
            for event in found.items:
                yield event
                after, has_ended = event.id, has_ended or _is_last_event(event)
            if found.has_more:
                continue
            if has_ended:
                return
            with self._open_events(job_id, acquire_read_slot, after) as recent:
                while not has_ended and (events := await recent.get_events_after(after)) is not None:
                    for event in events:
                        yield event
                        after, has_ended = event.id, has_ended or _is_last_event(event)

    @contextmanager
    def _open_events(
        self, job_id: str, acquire_read_slot: AcquireReadSlot, after: str | None
    ) -> Iterator[RecentEvents]:
        """Open the job's recent events, which live from its first follower to its last."""
        if job_id not in self._events_by_job:
            recent = RecentEvents(self._read, acquire_read_slot, job_id, after)
            self._events_by_job[job_id] = recent, asyncio.create_task(recent.run())
        recent, task = self._events_by_job[job_id]
        recent.followers += 1
        try:
            yield recent
        finally:
            recent.followers -= 1
            if recent.followers == 0:
                task.cancel()
                del self._events_by_job[job_id]


def _is_last_event(event: Event) -> bool:
    return event.type == "status" and JobStatus(event.data["status"]).is_terminal


_WATCH_DURATION_S = 60.0
"""Seconds for which a job counts as followed after a client's request for its events or log."""
_WATCH_RENEWAL_S = 20.0
_MAX_REMEMBERED_JOBS = 1000
"""Max jobs that are remembered; beyond that, some are marked more often than needed."""


class WatchedJobs:
    """Marks jobs that clients follow, so that the reconciler polls them often; at most once every 20 s per job."""

    def __init__(self, jobs: JobRepository, clock: Clock) -> None:
        self._jobs = jobs
        self._clock = clock
        self._marked_at: dict[str, float] = {}
        """When each job was last marked, the latest one last."""

    def mark_watched(self, job_id: str) -> None:
        """Mark a job as followed for a minute. If the database is unavailable, this only logs the failure, since the
        caller's own query fails as well."""
        now = self._clock()
        if job_id in self._marked_at and not is_due(
            self._marked_at[job_id] + _WATCH_RENEWAL_S, now, within=_WATCH_RENEWAL_S
        ):
            return
        try:
            self._jobs.mark_watched(job_id, now + _WATCH_DURATION_S)
        except DatabaseUnavailableError as error:
            get_logger().info("job not marked as followed by a client", job_id=job_id, reason=error.message)
            return
        self._marked_at.pop(job_id, None)
        self._marked_at[job_id] = now
        for oldest in list(self._marked_at)[:-_MAX_REMEMBERED_JOBS]:
            self._marked_at.pop(oldest, None)

    def list_events(self, job_id: str, page: PageQuery) -> Page[Event]:
        """Return a job's events, as `JobRepository.list_events` does, and mark the job as watched."""
        self.mark_watched(job_id)
        return self._jobs.list_events(job_id, page)


WatchedJobsDep = Annotated[WatchedJobs, make_state_dependency("watches")]


def read_logs(parts: Components, job: Job, *, offset: int = 0, limit: int | None = None) -> Iterator[bytes]:
    """Yield bytes `offset` to `offset + limit` of all attempts' logs. Skipped bytes are not read from the store."""
    left = limit
    for piece in filter(None, _read_logs_from(parts, job, offset)):
        if left is None:
            yield piece
        elif left > 0:
            yield piece[:left]
            left = max(left - len(piece), 0)
        else:
            return


def _read_logs_from(parts: Components, job: Job, offset: int) -> Iterator[bytes]:
    for attempt in job.attempt_id.list_attempts_so_far():
        heading = _format_heading(attempt.number)
        yield heading[offset:]
        offset = max(offset - len(heading), 0)
        saved = parts.attempts.open_saved_logs(attempt)
        if saved is not None:
            yield from saved.stream(offset) if offset < saved.size else ()
            offset = max(offset - saved.size, 0)
            continue
        for piece in _read_live_log(parts, job, attempt.number):
            yield piece[offset:]
            offset = max(offset - len(piece), 0)


def read_tail(parts: Components, job: Job, lines: int) -> Iterator[bytes]:
    """The last lines of the newest attempt's log."""
    saved = parts.attempts.open_saved_logs(job.attempt_id)
    return (
        _read_live_log(parts, job, job.attempt.number, tail_lines=lines) if saved is None else saved.stream_tail(lines)
    )


def _read_live_log(parts: Components, job: Job, number: int, *, tail_lines: int | None = None) -> Iterator[bytes]:
    """Read a log from Ray, if the attempt is there; else yield nothing."""
    if number == job.attempt.number and job.attempt.submission_id is not None and job.status.is_on_cluster:
        yield from parts.cluster.read_logs(job.attempt.submission_id, tail_lines=tail_lines)


class LogFollowers:
    """Followers of logs in this process. Belongs to one event loop."""

    def __init__(self, parts: Components, limits: ConcurrencyLimits, limiter: TenantConcurrencyLimiter) -> None:
        self._parts = parts
        self._read_limiter = limiter
        self.limiter = ConcurrencyLimiter("followed logs", limits)
        """Limit of followers; each holds a connection to Ray."""

    def follow(self, job_id: str, tenant: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the logs from byte `offset`, as they are written, until the job has ended."""
        return _skip_bytes(self._follow_attempts(job_id, tenant), offset)

    async def _follow_attempts(self, job_id: str, tenant: str) -> AsyncGenerator[bytes, None]:
        number, sent, is_out = 1, 0, False
        while True:
            async with self._read_limiter.acquire(tenant, "following"):
                job, saved = await run_in_threadpool(self._load_job_and_log, job_id, tenant, number)
            try:
                pieces = None if is_out else _follow_live_log(self._parts, job, number, sent)
                if saved is not None:
                    pieces = _iterate_in_thread(saved.stream_after(sent))
                if pieces is not None:
                    async with aclosing(pieces):
                        async for piece in pieces:
                            sent += len(piece)
                            yield piece
                    is_out = saved is None and await run_in_threadpool(_is_log_complete, self._parts, job)
            except ClusterUnavailableError as error:
                get_logger().debug("log unavailable", job_id=job_id, reason=error.message)
            if job.attempt.number > number:
                number, sent, is_out = number + 1, 0, False
                yield _format_heading(number)
            elif job.status.is_terminal:
                return
            else:
                await asyncio.sleep(_LOG_POLL_INTERVAL_S)

    def _load_job_and_log(self, job_id: str, tenant: str, number: int) -> tuple[Job, SavedLog | None]:
        # The job is read first: if its attempt is over, the log is complete.
        job = self._parts.jobs.get(job_id, tenant=tenant)
        return job, self._parts.attempts.open_saved_logs(AttemptId(job.id, number))


async def _iterate_in_thread(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in iterate_in_threadpool(pieces):
        yield piece


def _follow_live_log(parts: Components, job: Job, number: int, sent: int) -> AsyncGenerator[bytes, None] | None:
    """Stream Ray's log after its first `sent` bytes, until the attempt has ended; None if Ray does not have it."""
    submission_id = job.attempt.submission_id
    if number != job.attempt.number or submission_id is None or not job.status.is_on_cluster:
        return None
    return _skip_bytes(parts.cluster.follow_logs(submission_id), sent)


async def _skip_bytes(pieces: AsyncGenerator[bytes, None], skipped: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            if len(piece) > skipped:
                yield piece[skipped:]
            skipped = max(skipped - len(piece), 0)


def _is_log_complete(parts: Components, job: Job) -> bool:
    """Whether Ray has sent the whole log: its stream also ends when its dashboard restarts."""
    assert job.attempt.submission_id is not None
    submission = parts.cluster.get_submission(job.attempt.submission_id)
    return submission is None or submission.status.is_terminal


def _format_heading(number: int) -> bytes:
    return b"" if number == 1 else f"==== attempt {number} ====\n".encode()
