"""`/jobs/{id}/events`, `/metrics` and `/logs`: what a job says, as a list or followed live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from swiftkv_platform.api.dependencies import Components, OldestFirst, Parts, Reader
from swiftkv_platform.api.following import Followers
from swiftkv_platform.api.schemas import EventAnswer, ListAnswer, MetricPointAnswer, list_answer
from swiftkv_platform.errors import ClusterUnavailableError, DatabaseUnavailableError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.job import Job
from swiftkv_platform.orchestration.ports import Page
from swiftkv_platform.orchestration.service import Caller

router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"])

_POLL_S = 0.5


@router.get("/events", response_model=ListAnswer[EventAnswer])
def list_events(
    request: Request,
    job_id: str,
    parts: Parts,
    caller: Reader,
    page: OldestFirst,
    last_event_id: Annotated[str | None, Header()] = None,
) -> ListAnswer[EventAnswer] | Response:
    """A job's events. With `Accept: text/event-stream` they are followed live, from after `Last-Event-ID` on."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    if "text/event-stream" not in request.headers.get("accept", ""):
        return list_answer(parts.jobs.events(job_id, page), EventAnswer.of, lambda event: event.id)
    after = last_event_id or page.after
    parts.jobs.events(job_id, Page(after, limit=1, order="asc"))  # an unknown `after` is told before the stream begins
    stream: Response = EventSourceResponse(_follow_events(parts, request.app.state.followers, caller, job_id, after))
    return stream


async def _follow_events(
    parts: Components, followers: Followers, caller: Caller, job_id: str, after: str | None
) -> AsyncIterator[dict[str, str]]:
    """Server-sent events until the job has ended and its last event is out; clients ask again for what is missing."""
    try:
        # The job is read before its events: when it has ended, its last event is there.
        job = await run_in_threadpool(parts.jobs.get, job_id, tenant=caller.tenant)
        following = followers.follow(job_id, after, has_ended=job.status.is_terminal)
        async with aclosing(following) as events:
            async for event in events:
                yield {"id": event.id, "event": event.type, "data": EventAnswer.of(event).model_dump_json()}
    except DatabaseUnavailableError as error:
        get_logger().warning("event stream ended early", job_id=job_id, reason=error.message)


@router.get("/metrics")
def list_metrics(job_id: str, parts: Parts, caller: Reader, page: OldestFirst) -> ListAnswer[MetricPointAnswer]:
    """The time series, by ascending step; `after` is a step."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    return list_answer(parts.jobs.points(job_id, page), MetricPointAnswer.of, lambda point: str(point.step))


@router.get("/logs", response_class=PlainTextResponse)
def get_logs(
    job_id: str,
    parts: Parts,
    caller: Reader,
    follow: Annotated[bool, Query(description="stream until the job has ended")] = False,
) -> Response:
    """Output of the attempts, one after the other."""
    job = parts.jobs.get(job_id, tenant=caller.tenant)
    if follow:
        return StreamingResponse(_follow_logs(parts, caller, job_id), media_type="text/plain; charset=utf-8")
    pieces = [_heading(number) + _read_log(parts, job, number) for number in range(1, job.attempt.number + 1)]
    return PlainTextResponse("".join(pieces))


async def _follow_logs(parts: Components, caller: Caller, job_id: str) -> AsyncIterator[str]:
    number, sent = 1, 0
    while True:
        # The job is read first: when an attempt is over, its log is complete.
        job = await run_in_threadpool(parts.jobs.get, job_id, tenant=caller.tenant)
        try:
            text = await run_in_threadpool(_read_log, parts, job, number)
        except ClusterUnavailableError as error:
            get_logger().debug("log not readable now", job_id=job_id, reason=error.message)
            text = ""
        if len(text) > sent:
            yield text[sent:]
            sent = len(text)
        if job.attempt.number > number:
            number, sent = number + 1, 0
            yield _heading(number)
        elif job.status.is_terminal:
            return
        else:
            await asyncio.sleep(_POLL_S)


def _heading(number: int) -> str:
    return "" if number == 1 else f"==== attempt {number} ====\n"


def _read_log(parts: Components, job: Job, number: int) -> str:
    """Read the log from the store once the attempt is over, from Ray before; empty where there is none."""
    kept = parts.attempts.read_logs(job.id, number)
    if kept is not None:
        return kept
    if number == job.attempt.number and job.attempt.submission_id is not None and job.status.holds_cluster:
        return parts.cluster.logs(job.attempt.submission_id)
    return ""
