"""Streams of answers as chunks in OpenAI's formats. Knows no body."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import Response
from sse_starlette import EventSourceResponse

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.serve.answers import Answers
from swiftkv_platform.serve.openai.answers import usage
from swiftkv_platform.serve.openai.schemas import StreamOptions
from swiftkv_platform.web.problems import openai_error, problem_of

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Version

DONE = "[DONE]"

Chunk = Callable[[int, "RequestOutput", "RequestOutput | None"], Awaitable[dict[str, Any]]]
"""(choice, output so far, previous output or None) -> the chunk's entry in `choices`."""


def head_of(prefix: str, kind: str, answers: Answers, version: Version) -> dict[str, Any]:
    """Return the first fields of an answer and of each of its chunks: id, object, created, model."""
    request_id = f"{prefix}-{answers.id.removeprefix('gen_')}"
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": version.card.model}


async def chunks_of(
    answers: Answers, head: dict[str, Any], chunk: Chunk, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield chunks with the additions of each output, and the usage if wanted. Raises as `Answers.as_they_come`."""
    outputs: dict[int, RequestOutput] = {}

    def usage_so_far() -> dict[str, Any]:
        return usage([outputs[choice] for choice in sorted(outputs)])

    async for choice, output in answers.as_they_come():
        fresh = await chunk(choice, output, outputs.get(choice))
        outputs[choice] = output
        event = {**head, "choices": [fresh]}
        if options.continuous_usage_stats:
            event["usage"] = usage_so_far()
        elif options.include_usage:
            event["usage"] = None
        yield event
    if options.include_usage:
        yield {**head, "choices": [], "usage": usage_so_far()}


def event_stream(events: AsyncIterator[dict[str, str]]) -> Response:
    """Return a response that streams server-sent events."""
    stream: Response = EventSourceResponse(events, sep="\n")
    return stream


async def events_of(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    """Yield the events of a completion or chat: its chunks, then `[DONE]`; after a failure an error document."""
    try:
        async for chunk in chunks:
            yield {"data": json.dumps(chunk)}
    except SwiftKVError as error:
        yield {"data": json.dumps(openai_error(problem_of(error, "/v1/")))}
        return
    yield {"data": DONE}
