"""The HTTP server of the control plane and of `swiftkv serve`: uvicorn with limits for silent, slow and greedy clients.

uvicorn ends idle connections between requests. It lets a client stay silent before its first request, or in the middle
of a head of any length, for ever, and waits for ever for a client that does not read. Here all of these are closed. If
there are too many connections, the one that has been silent for longest is closed. Interpreter settings let the process
answer while other threads compute. Knows no route.
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from swiftkv_platform.limits import (
    CONNECTIONS,
    HEAD_BYTES,
    HEAD_FIELDS,
    HEAD_SECONDS,
    KEEP_ALIVE_SECONDS,
    LATE_BODY_BYTES,
    PIPELINED_REQUESTS,
    UNREAD_SECONDS,
)
from swiftkv_platform.settings import Settings

_SHUTDOWN_TIMEOUT_S = 10
_PIECE_BYTES = 16 << 10
"""Bytes that are parsed at a time, so that each limit is checked before much more is kept."""
_BODY_OVERHEAD = 8
"""Bytes on the wire that each byte of a chunked body may take; chunks of one byte take six."""
_READ_BYTES = 1 << 20
"""Bytes of an answer that a client has to read in `unread_s` seconds, if there are as many."""
_MAX_FILES = 1 << 16
_CONNECTIONS_PER_FILE = 0.5
"""Connections per file that may be open: requests, databases and stores need the others."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections; times in seconds."""

    max_connections: int = CONNECTIONS.default
    """Open connections of all clients; each address may have half of them."""
    head_s: float = HEAD_SECONDS.default
    """Time for a request's head to come."""
    keep_alive_s: float = KEEP_ALIVE_SECONDS.default
    """Time between two requests of a connection."""
    unread_s: float = UNREAD_SECONDS.default
    """Time for a client to read more of its answer."""

    @property
    def max_of_address(self) -> int:
        """Connections of one client address."""
        return max(self.max_connections // 2, 1)

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Return the limits that an operator has set."""
        return cls(settings.max_connections, settings.request_head_timeout_s)


def server_options(limits: ConnectionLimits, *, shutdown_timeout_s: int = _SHUTDOWN_TIMEOUT_S) -> dict[str, Any]:
    """Return options for uvicorn. Raises this process's limit of open files as far as allowed; connections use at most
    half of it. `shutdown_timeout_s`: seconds for running requests to finish."""
    of_files = max(int(_raise_open_files() * _CONNECTIONS_PER_FILE), 1)
    used = replace(limits, max_connections=min(limits.max_connections, of_files))
    return {
        "http": type("LimitedConnection", (Connection,), {"limits": used, "silent": {}, "open_of": Counter()}),
        "ws": "none",
        "access_log": False,
        "proxy_headers": False,  # the applications read them themselves, by their own settings
        "timeout_keep_alive": max(int(limits.keep_alive_s), 1),
        "timeout_graceful_shutdown": shutdown_timeout_s,
    }


def _raise_open_files() -> int:
    """Raise this process's limit of open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


class Connection(HttpToolsProtocol):
    """A connection that is closed if its client is silent, sends too slowly or does not read, or if others need its
    place while it is silent. It is silent while no request is being answered."""

    limits = ConnectionLimits()
    silent: dict[Connection, None]
    """Silent connections of the server, the one that has been silent for longest first."""
    open_of: Counter[str]
    """Open connections of each client address."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_counted = False
        """Whether it counts as open."""
        self._in_message = False
        """Whether a request has begun to come and is not complete."""
        self._overhead_bytes = 0
        """Bytes since the last complete head, less those of bodies with their framing."""
        self._late_bytes = 0
        """Bytes since the last answer."""
        self._silence_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """Address of the client; empty for one without."""
        return self.client[0] if self.client else ""

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered."""
        answered: Any = self.cycle  # uvicorn's types leave out that there is none at first
        return answered is None or answered.response_complete

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._is_counted = True
        self.open_of[self.address] += 1
        self._fall_silent(self.limits.head_s)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._silence_timer)
        _stop(self._unread_timer)
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
            self._check_bytes()
        if self.transport.is_closing():
            self._wait_for_reading()

    # Requests, as the parser finds them

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()
        if self in self.silent and not self._is_new:
            self._start_timer(self.limits.head_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= HEAD_FIELDS.default:
            raise ValueError("too many fields")  # answered with 400, as all errors of the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED_REQUESTS.default:
            raise ValueError("too many requests before the first answer")
        super().on_headers_complete()
        self._overhead_bytes = 0
        self.silent.pop(self, None)
        _stop(self._silence_timer)

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = max(self._overhead_bytes - _BODY_OVERHEAD * len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()
        if self in self.silent:
            self._start_timer(self.limits.keep_alive_s)

    def send_400_response(self, msg: str) -> None:
        if not self.is_silent and self.cycle.response_started:
            self.transport.abort()  # not a second answer within the first
        else:
            super().send_400_response(msg)

    def _check_bytes(self) -> None:
        """Close the connection if it has sent too much that is neither a body nor a short head, or too much of a body
        whose request is answered."""
        if self.transport.is_closing():
            return
        if self._overhead_bytes > HEAD_BYTES.default and self._is_new:
            self.send_400_response("The head of the request is too long.")
        elif self._overhead_bytes > HEAD_BYTES.default or (self.is_silent and self._late_bytes > self._max_late_bytes):
            self.transport.abort()

    @property
    def _is_new(self) -> bool:
        """Whether there was no request yet."""
        first: Any = self.cycle
        return first is None

    @property
    def _max_late_bytes(self) -> int:
        """Bytes that are skipped after an answer: a client may read it only after sending the body. Chunked bodies cost
        more to skip."""
        if self._is_new or not self._in_message or b"transfer-encoding" in dict(self.cycle.scope["headers"]):
            return HEAD_BYTES.default
        return LATE_BODY_BYTES.default

    # Answers

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reading()
        elif self.is_silent:  # the next request may have come already
            self._late_bytes = 0
            self._fall_silent(self.limits.head_s if self._in_message else self.limits.keep_alive_s)

    def timeout_keep_alive_handler(self) -> None:
        """Do nothing: the connection's own timer knows more."""

    def shutdown(self) -> None:
        super().shutdown()
        self._wait_for_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            _stop(self._unread_timer)

    def _wait_for_reading(self) -> None:
        """Close the connection unless the client goes on reading what is written."""
        _stop(self._unread_timer)
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._unread_timer = self.loop.call_later(self.limits.unread_s, self._check_reading, unread)

    def _check_reading(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread > max(before - _READ_BYTES, 0):
            self.transport.abort()
        else:
            self._wait_for_reading()

    # Silence

    def _fall_silent(self, seconds: float) -> None:
        self.silent.pop(self, None)
        if self._is_counted:
            self.silent[self] = None
        self._start_timer(seconds)

    def _start_timer(self, seconds: float) -> None:
        """Close the connection after this time; parts of a head do not extend it."""
        _stop(self._silence_timer)
        self._silence_timer = self.loop.call_later(seconds, self.transport.abort)

    def _make_room(self) -> None:
        """If there are too many connections, of this address or of all, close the one that has been silent for longest,
        or this one if none is silent."""
        if self.open_of[self.address] > self.limits.max_of_address:
            self._close_silent(self.address)
        elif len(self.connections) > self.limits.max_connections:
            self._close_silent(None)

    def _close_silent(self, address: str | None) -> None:
        """Close the connection that has been silent for longest; with an address, of that address."""
        oldest = next((each for each in self.silent if address in (None, each.address)), self)
        oldest._stop_counting()  # `connection_lost` comes later
        oldest.transport.abort()

    def _stop_counting(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self.connections.discard(self)
            self.silent.pop(self, None)
            self.open_of[self.address] -= 1
            if not self.open_of[self.address]:
                del self.open_of[self.address]


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


SWITCH_INTERVAL_S = 0.0002
"""Seconds after which a computing thread must give up the GIL. A response takes the GIL about ten times, and an engine
step once per operator: with Python's default of 5 ms, waiting takes longer than the work itself."""


def answer_promptly() -> None:
    """Bound waits for the GIL, and exclude all present objects from garbage collections, which stop all threads (0.2 s
    for the objects of torch). Call it again after replacing large objects, so that the old ones are collected."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def answering_promptly(app: FastAPI) -> FastAPI:
    """Make `app` call `answer_promptly` once it has started, and return it. FastAPI builds its routes in the first
    request; they are built before that here, so that garbage collections skip them."""
    start = app.router.lifespan_context

    @asynccontextmanager
    async def started(app: FastAPI) -> AsyncIterator[Any]:
        async with start(app) as state:
            # The older FastAPI that vLLM 0.32 asks for has no such function: there they are built already.
            for _ in getattr(routing, "iter_route_contexts", iter)(app.routes):
                pass
            answer_promptly()
            yield state

    app.router.lifespan_context = started
    return app
