"""`/jobs/{id}/events`, `/metrics` and `/logs`: what a job reports, as a list or followed live."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, nullcontext
from itertools import chain
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from swiftkv_platform.control_plane.access.callers import Fetcher, Reader, Streamed, wants_events
from swiftkv_platform.control_plane.base import Caller, Page
from swiftkv_platform.control_plane.http.answers import ListAnswer, OldestFirst, list_answer
from swiftkv_platform.control_plane.jobs.answers import EventAnswer, MetricPointAnswer
from swiftkv_platform.control_plane.jobs.following import Followers
from swiftkv_platform.control_plane.jobs.logs import LogFollowers, read_logs, read_tail
from swiftkv_platform.control_plane.parts import Components, Parts, TheWatches
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.logs import get_logger

router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"])

_TEXT = "text/plain; charset=utf-8"
_LARGEST = (1 << 63) - 1


@router.get("/events", response_model=ListAnswer[EventAnswer])
def list_events(
    request: Request,
    job_id: str,
    parts: Parts,
    _stream: Streamed,
    caller: Reader,
    watches: TheWatches,
    page: OldestFirst,
    last_event_id: Annotated[str | None, Header()] = None,
) -> ListAnswer[EventAnswer] | Response:
    """List a job's events. With `Accept: text/event-stream` they are streamed live, starting after `Last-Event-ID`."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    watches.note(job_id)
    if not wants_events(request):
        return list_answer(parts.jobs.events(job_id, page), EventAnswer.model_validate)
    after = last_event_id or page.after
    parts.jobs.events(job_id, Page(after, limit=1, order="asc"))  # refuse an unknown `after` before the stream begins
    stream: Response = EventSourceResponse(_follow_events(parts, request.app.state.followers, caller, job_id, after))
    return stream


async def _follow_events(
    parts: Components, followers: Followers, caller: Caller, job_id: str, after: str | None
) -> AsyncIterator[dict[str, str]]:
    """Yield server-sent events until the job's last one; if the database fails, the stream ends and clients
    reconnect."""
    try:
        # The job is read before its events: if it has ended, its last event is stored.
        job = await run_in_threadpool(parts.jobs.get, job_id, tenant=caller.tenant)
        following = followers.follow(job_id, caller.tenant, after, has_ended=job.status.is_terminal)
        async with aclosing(following) as events:
            async for event in events:
                yield {"id": event.id, "event": event.type, "data": EventAnswer.model_validate(event).model_dump_json()}
    except DatabaseUnavailableError as error:
        get_logger().warning("event stream ended early", job_id=job_id, reason=error.message)


@router.get("/metrics")
def list_metrics(
    job_id: str, parts: Parts, caller: Reader, watches: TheWatches, page: OldestFirst
) -> ListAnswer[MetricPointAnswer]:
    """The time series, by ascending step; `after` is a step."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    watches.note(job_id)
    return list_answer(parts.jobs.points(job_id, page), MetricPointAnswer.of, lambda point: str(point.step))


async def _hold_follower(
    request: Request,
    _stream: Streamed,
    follow: Annotated[bool, Query(description="stream until the job has ended")] = False,
) -> AsyncIterator[bool]:
    """Return whether the logs are followed; if so, hold one of the caller's places for followers until the answer is
    sent. Raises `OverloadedError` if none is free."""
    followers: LogFollowers = request.app.state.log_followers
    caller: Caller = request.state.caller
    with followers.places.place(caller.tenant, caller.name) if follow else nullcontext():
        yield follow


@router.get("/logs", response_class=PlainTextResponse)
async def get_logs(
    request: Request,
    job_id: str,
    parts: Parts,
    follow: Annotated[bool, Depends(_hold_follower)],
    caller: Fetcher,
    tail_lines: Annotated[
        int | None, Query(ge=1, le=100_000, description="only the last lines of the newest attempt")
    ] = None,
    offset: Annotated[int, Query(ge=0, le=_LARGEST, description="first byte to send")] = 0,
    limit: Annotated[int | None, Query(ge=1, le=_LARGEST, description="maximum number of bytes to send")] = None,
) -> Response:
    """Return the output of the attempts, one after the other, streamed as it is read; the middle of a long log is left
    out."""
    job = await run_in_threadpool(parts.jobs.get, job_id, tenant=caller.tenant)
    if tail_lines is not None and (follow or offset or limit is not None):
        message = "tail_lines cannot be combined with follow, offset or limit"
        raise InvalidInputError(message, field="tail_lines", value=tail_lines)
    if follow and limit is not None:
        raise InvalidInputError("limit cannot be combined with follow", field="limit", value=limit)
    if follow:
        followers: LogFollowers = request.app.state.log_followers
        return StreamingResponse(followers.follow(job_id, caller.tenant, offset=offset), media_type=_TEXT)
    if tail_lines is not None:
        read = read_tail(parts, job, tail_lines)
    else:
        read = read_logs(parts, job, offset=offset, limit=limit)
    # The first piece is read before the answer begins, so that a failure still gets its own status.
    first = await run_in_threadpool(next, read, b"")
    return StreamingResponse(chain([first], read), media_type=_TEXT)
