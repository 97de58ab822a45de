"""Logs of a job's attempts, one after the other: read in pieces from any byte, or followed. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.control_plane.http.turns import Turns
from swiftkv_platform.control_plane.jobs.job import Job
from swiftkv_platform.control_plane.parts import Components
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.logs import SavedLog
from swiftkv_platform.web.places import Places, Share

_POLL_S = 0.5


def read_logs(parts: Components, job: Job, *, offset: int = 0, limit: int | None = None) -> Iterator[bytes]:
    """Yield bytes `offset` to `offset + limit` of all attempts' logs. Skipped bytes are not read from the store."""
    left = limit
    for piece in filter(None, _from(parts, job, offset)):
        if left is None:
            yield piece
        elif left > 0:
            yield piece[:left]
            left = max(left - len(piece), 0)
        else:
            return


def _from(parts: Components, job: Job, offset: int) -> Iterator[bytes]:
    for attempt in job.attempt_id.so_far():
        heading = _heading(attempt.number)
        yield heading[offset:]
        offset = max(offset - len(heading), 0)
        saved = parts.attempts.saved_logs(attempt)
        if saved is not None:
            yield from saved.stream(offset) if offset < saved.size else ()
            offset = max(offset - saved.size, 0)
            continue
        for piece in _live(parts, job, attempt.number):
            yield piece[offset:]
            offset = max(offset - len(piece), 0)


def read_tail(parts: Components, job: Job, lines: int) -> Iterator[bytes]:
    """The last lines of the newest attempt's log."""
    saved = parts.attempts.saved_logs(job.attempt_id)
    return _live(parts, job, job.attempt.number, tail_lines=lines) if saved is None else saved.tail(lines)


def _live(parts: Components, job: Job, number: int, *, tail_lines: int | None = None) -> Iterator[bytes]:
    """Read a log from Ray, if the attempt is there; else yield nothing."""
    if number == job.attempt.number and job.attempt.submission_id is not None and job.status.holds_cluster:
        yield from parts.cluster.logs(job.attempt.submission_id, tail_lines=tail_lines)


class LogFollowers:
    """Followers of logs in this process. Belongs to one event loop."""

    def __init__(self, parts: Components, share: Share, turns: Turns) -> None:
        self._parts = parts
        self._turns = turns
        self.places = Places("followed logs", share)
        """Limit of followers; each holds a connection to Ray."""

    async def follow(self, job_id: str, tenant: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the logs from byte `offset`, as they are written, until the job has ended."""
        async with aclosing(self._pieces(job_id, tenant)) as pieces:
            async for piece in pieces:
                if len(piece) > offset:
                    yield piece[offset:]
                offset = max(offset - len(piece), 0)

    async def _pieces(self, job_id: str, tenant: str) -> AsyncGenerator[bytes, None]:
        number, sent, is_out = 1, 0, False
        while True:
            async with self._turns.turn(tenant, "following"):
                job, saved = await run_in_threadpool(self._look, job_id, tenant, number)
            try:
                pieces = None if is_out else _followed(self._parts, job, number, sent)
                if saved is not None:
                    pieces = _aiter(saved.rest(sent))
                if pieces is not None:
                    async with aclosing(pieces):
                        async for piece in pieces:
                            sent += len(piece)
                            yield piece
                    is_out = saved is None and await run_in_threadpool(_has_ended, self._parts, job)
            except ClusterUnavailableError as error:
                get_logger().debug("log not readable now", job_id=job_id, reason=error.message)
            if job.attempt.number > number:
                number, sent, is_out = number + 1, 0, False
                yield _heading(number)
            elif job.status.is_terminal:
                return
            else:
                await asyncio.sleep(_POLL_S)

    def _look(self, job_id: str, tenant: str, number: int) -> tuple[Job, SavedLog | None]:
        # The job is read first: if its attempt is over, the log is complete.
        job = self._parts.jobs.get(job_id, tenant=tenant)
        return job, self._parts.attempts.saved_logs(AttemptId(job.id, number))


async def _aiter(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in iterate_in_threadpool(pieces):
        yield piece


def _followed(parts: Components, job: Job, number: int, sent: int) -> AsyncGenerator[bytes, None] | None:
    """Stream Ray's log after its first `sent` bytes, until the attempt has ended; None if Ray does not have it."""
    submission_id = job.attempt.submission_id
    if number != job.attempt.number or submission_id is None or not job.status.holds_cluster:
        return None
    return _after(parts.cluster.follow_logs(submission_id), sent)


async def _after(pieces: AsyncGenerator[bytes, None], skipped: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            if len(piece) > skipped:
                yield piece[skipped:]
            skipped = max(skipped - len(piece), 0)


def _has_ended(parts: Components, job: Job) -> bool:
    """Whether Ray has sent the whole log: its stream also ends when its dashboard restarts."""
    assert job.attempt.submission_id is not None
    submission = parts.cluster.status(job.attempt.submission_id)
    return submission is None or submission.status.is_terminal


def _heading(number: int) -> bytes:
    return b"" if number == 1 else f"==== attempt {number} ====\n".encode()
