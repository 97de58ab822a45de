"""The HTTP server of the control plane and of `swiftkv serve`: uvicorn with limits for idle, slow and greedy clients.
Knows no route.

uvicorn closes connections that are idle between requests. It waits forever for a first request, for the end of a
request's head of any length, and for a client that does not read. This module closes such connections. Above the max
number of connections it closes the one that is idle for longest. It also tunes the interpreter, so that the process
responds while other threads compute.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from fastapi import FastAPI, routing
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from swiftkv_platform.limits import (
    CONNECTIONS,
    DRAINED_BODY_BYTES,
    KEEP_ALIVE_SECONDS,
    PIPELINED_REQUESTS,
    REQUEST_HEAD_BYTES,
    REQUEST_HEAD_FIELDS,
    REQUEST_HEAD_SECONDS,
    STALLED_CLIENT_SECONDS,
)
from swiftkv_platform.settings import Settings

_SHUTDOWN_TIMEOUT_S = 10
_PIECE_BYTES = 16 << 10
"""Bytes parsed at a time; limits are checked after each piece."""
_MAX_WIRE_BYTES_PER_BODY_BYTE = 8
"""Max bytes on the wire per byte of a chunked body; chunks of one byte take six."""
_MIN_READ_BYTES = 1 << 20
"""Min bytes of a response that a client must read per `unread_s` seconds."""
_MAX_OPEN_FILES = 1 << 16
_CONNECTIONS_PER_FILE = 0.5
"""Max connections per open file; requests, databases and stores need the other files."""


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = CONNECTIONS.default
    """Max open connections of all clients; one address may have half of them."""
    head_s: float = REQUEST_HEAD_SECONDS.default
    """Max seconds for receiving a request's head."""
    keep_alive_s: float = KEEP_ALIVE_SECONDS.default
    unread_s: float = STALLED_CLIENT_SECONDS.default
    """Max seconds without a client reading its response."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(settings.max_connections, settings.request_head_timeout_s)


def make_server_options(limits: ConnectionLimits, *, shutdown_timeout_s: int = _SHUTDOWN_TIMEOUT_S) -> dict[str, Any]:
    """Return options for uvicorn. Raises this process's limit of open files as far as allowed; connections use at most
    half of it. `shutdown_timeout_s`: seconds for running requests to finish."""
    max_by_files = max(int(_raise_open_file_limit() * _CONNECTIONS_PER_FILE), 1)
    limits = replace(limits, max_connections=min(limits.max_connections, max_by_files))
    return {
        "http": type("LimitedConnection", (Connection,), {"limits": limits, "idle_peers": {}, "num_open": Counter()}),
        "ws": "none",
        "access_log": False,
        "proxy_headers": False,  # the applications read them themselves, by their own settings
        "timeout_keep_alive": max(int(limits.keep_alive_s), 1),
        "timeout_graceful_shutdown": shutdown_timeout_s,
    }


def _raise_open_file_limit() -> int:
    """Raise this process's limit of open files as far as allowed. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class Connection(HttpToolsProtocol):
    """A connection that is closed if its client is idle for too long, sends too slowly or does not read, or if there
    are too many connections while it is idle. It is idle while the server processes no request of it."""

    limits = ConnectionLimits()
    idle_peers: dict[Connection, None]
    """Idle connections of the server, longest idle first."""
    num_open: Counter[str]
    """Number of open connections per client address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_counted = False
        """Whether `num_open` includes this connection."""
        self._in_message = False
        """Whether a request is partly received."""
        self._overhead_bytes = 0
        """Bytes received since the last complete head, without bodies and their framing."""
        self._late_bytes = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        current: Any = self.cycle  # None before the first request, unlike uvicorn's types say
        return current is None or current.response_complete

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._is_counted = True
        self.num_open[self.address] += 1
        self._mark_idle(self.limits.head_s)
        self._close_excess_connection()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel_timer(self._idle_timer)
        _cancel_timer(self._unread_timer)
        self._stop_counting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                break
            piece = data[start : start + _PIECE_BYTES]
            self._overhead_bytes += len(piece)
            self._late_bytes += len(piece)
            super().data_received(piece)
            self._check_byte_limits()
        if self.transport.is_closing():
            self._watch_reading()

    # Requests, called by the parser

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()
        if self in self.idle_peers and not self._is_new:
            self._start_timer(self.limits.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= REQUEST_HEAD_FIELDS.default:
            raise ValueError("too many fields")  # uvicorn responds with 400, as to all errors of the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED_REQUESTS.default:
            raise ValueError("too many requests before the first response")
        before = self.cycle
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not before:
            self.cycle.send = _CloseDelimitedResponse(self.cycle).send  # type: ignore[method-assign]
        self._overhead_bytes = 0
        self.idle_peers.pop(self, None)
        _cancel_timer(self._idle_timer)

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = max(self._overhead_bytes - _MAX_WIRE_BYTES_PER_BODY_BYTE * len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()
        if self in self.idle_peers:
            self._start_timer(self.limits.keep_alive_s)

    def send_400_response(self, msg: str) -> None:
        if not self.is_idle and self.cycle.response_started:
            self.transport.abort()  # not a second response within the first
        else:
            super().send_400_response(msg)

    def _check_byte_limits(self) -> None:
        """Close the connection if it has sent too many bytes of a head, or of a body after its response."""
        if self.transport.is_closing():
            return
        if self._overhead_bytes > REQUEST_HEAD_BYTES.default and self._is_new:
            self.send_400_response("The head of the request is too long.")
        elif self._overhead_bytes > REQUEST_HEAD_BYTES.default or (
            self.is_idle and self._late_bytes > self._max_late_bytes
        ):
            self.transport.abort()

    @property
    def _is_new(self) -> bool:
        first: Any = self.cycle
        return first is None

    @property
    def _max_late_bytes(self) -> int:
        """Max bytes to skip after a response, since a client may read it only after sending its body. Less for chunked
        bodies, which cost more to skip."""
        if self._is_new or not self._in_message or b"transfer-encoding" in dict(self.cycle.scope["headers"]):
            return REQUEST_HEAD_BYTES.default
        return DRAINED_BODY_BYTES.default

    # Responses

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reading()
        elif self.is_idle:  # the next request may have come already
            self._late_bytes = 0
            self._mark_idle(self.limits.head_s if self._in_message else self.limits.keep_alive_s)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing; `_idle_timer` replaces uvicorn's timer."""

    def shutdown(self) -> None:
        super().shutdown()
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            _cancel_timer(self._unread_timer)

    def _watch_reading(self) -> None:
        """Close the connection unless the client continues to read its response."""
        _cancel_timer(self._unread_timer)
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._unread_timer = self.loop.call_later(self.limits.unread_s, self._abort_if_still_unread, unread)

    def _abort_if_still_unread(self, unread_before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread > max(unread_before - _MIN_READ_BYTES, 0):
            self.transport.abort()
        else:
            self._watch_reading()

    # Idle connections

    def _mark_idle(self, seconds: float) -> None:
        self.idle_peers.pop(self, None)
        if self._is_counted:
            self.idle_peers[self] = None
        self._start_timer(seconds)

    def _start_timer(self, seconds: float) -> None:
        """Close the connection after `seconds`; parts of a head do not extend them."""
        _cancel_timer(self._idle_timer)
        self._idle_timer = self.loop.call_later(seconds, self.transport.abort)

    def _close_excess_connection(self) -> None:
        """If there are too many connections, of this address or of all, close the one that is idle for longest, or this
        one if none is idle."""
        if self.num_open[self.address] > max(self.limits.max_connections // 2, 1):
            self._close_longest_idle(self.address)
        elif len(self.connections) > self.limits.max_connections:
            self._close_longest_idle(None)

    def _close_longest_idle(self, address: str | None) -> None:
        """Close the connection that is idle for longest, among all or those of an address."""
        oldest = next((each for each in self.idle_peers if address in (None, each.address)), self)
        oldest._stop_counting()  # `connection_lost` comes later
        oldest.transport.abort()

    def _stop_counting(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self.connections.discard(self)
            self.idle_peers.pop(self, None)
            self.num_open[self.address] -= 1
            if not self.num_open[self.address]:
                del self.num_open[self.address]


class _CloseDelimitedResponse:
    """Sends a response to an HTTP/1.0 client. The end of the connection is the end of a body of unknown length, since
    such clients do not know the chunks that uvicorn would send."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._has_length = cycle, cycle.send, True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = b"content-length" in {name.lower() for name, _ in message.get("headers", ())}
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


SWITCH_INTERVAL_S = 0.0002
"""Seconds after which a computing thread must release the GIL. A response takes the GIL about ten times, and an engine
step once per operator: with Python's default of 5 ms, waiting takes longer than the work."""


def tune_interpreter() -> None:
    """Shorten waits for the GIL, and exclude all current objects from garbage collection, which stops all threads (for
    0.2 s with the objects of torch). Call it again after replacing large objects, so that the old ones are freed."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def tune_on_startup(app: FastAPI) -> FastAPI:
    """Make `app` call `tune_interpreter` after its start. Returns `app`. Builds FastAPI's routes first, so that garbage
    collection skips them."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan_with_tuning(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            # The older FastAPI that vLLM 0.32 requires builds routes at once and has no such function.
            for _ in getattr(routing, "iter_route_contexts", iter)(app.routes):
                pass
            tune_interpreter()
            yield state

    app.router.lifespan_context = lifespan_with_tuning
    return app
