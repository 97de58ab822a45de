"""Lines and server-sent events of a response whose body is read as it comes. Knows nothing about jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import httpx
from httpx_sse import EventSource, ServerSentEvent

# `str.splitlines` and httpx would also break at U+2028 and its like, which a log may hold. A final \r is held back: it
# may be the first half of \r\n.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def iter_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 byte stream without their ends; an unfinished last line counts as one."""
    buffer = b""
    for chunk in chunks:
        *lines, buffer = _LINE_END.split(buffer + chunk)
        for line in lines:
            yield line.decode(errors="replace")
    if buffer:
        yield buffer.rstrip(b"\r").decode(errors="replace")


def iter_events(response: httpx.Response) -> Iterator[ServerSentEvent]:
    """Yield the events that carry data, without one that is cut off; keep-alive comments end in events without data.

    Raises:
        httpx_sse.SSEError: the response is no event stream. It is an `httpx.TransportError`.
    """
    return (event for event in EventSource(response).iter_sse() if event.data)
