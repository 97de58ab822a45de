"""Server-sent events (WHATWG HTML, section 9.2) out of a byte stream. Knows the line format, nothing about jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# `str.splitlines` would also break at U+2028 and its like, which JSON may carry unescaped. A final \r is held back: it
# may be the first half of \r\n.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")


@dataclass(frozen=True)
class ServerSentEvent:
    """One event."""

    data: str
    event: str = "message"
    id: str | None = None
    """The last id seen in the stream, this event's own included."""


def iter_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a UTF-8 byte stream without their ends; an unfinished last line counts as one."""
    buffer = b""
    for chunk in chunks:
        *lines, buffer = _LINE_END.split(buffer + chunk)
        for line in lines:
            yield line.decode(errors="replace")
    if buffer:
        yield buffer.rstrip(b"\r").decode(errors="replace")


def iter_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """Yield the complete events of a stream; comments are skipped, and so is an event cut off before its blank line."""
    data: list[str] = []
    event = "message"
    last_id: str | None = None
    for line in iter_lines(chunks):
        if not line:
            if data:
                yield ServerSentEvent(data="\n".join(data), event=event, id=last_id)
            data, event = [], "message"
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            event = value
        elif name == "id":
            last_id = value
