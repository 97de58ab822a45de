"""The HTTP server of the control plane: uvicorn's, whose connections wait for no one for long. Knows no route.

uvicorn bounds the head of a request, idle connections between requests and requests at a time. It lets a connection be
silent before its first request, or in the middle of a head, for ever, and waits for ever for a client that does not
read: here both end, and of too many connections the one that has been silent for longest.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from swiftkv_platform.settings import Settings

_SHUTDOWN_TIMEOUT_S = 10
_READING_TIMEOUT_S = 60.0
"""Seconds for which a client may read nothing of an answer that waits for it."""
_MOST_HEAD_BYTES = 32 << 10
_MOST_FILES = 1 << 16
_CONNECTIONS_PER_FILE = 0.5
"""Connections for each file that may be open: what a request opens, databases and stores need the others."""


def server_options(settings: Settings) -> dict[str, Any]:
    """Options for uvicorn."""
    most = max(min(settings.max_connections, int(_files() * _CONNECTIONS_PER_FILE)), 1)

    class Connection(PatientConnection):
        most_connections = most
        head_timeout_s = settings.request_head_timeout_s

    return {
        "host": settings.host,
        "port": settings.port,
        "http": Connection,
        "ws": "none",
        "access_log": False,
        "proxy_headers": False,  # the application looks at them itself, by its own setting
        "h11_max_incomplete_event_size": _MOST_HEAD_BYTES,
        "timeout_graceful_shutdown": _SHUTDOWN_TIMEOUT_S,
    }


def _files() -> int:
    """Files that this process may open, once it may open as many as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


class PatientConnection(H11Protocol):
    """A connection that is closed when its client is silent for too long, or keeps others out by its silence."""

    most_connections: int
    head_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silent_since: float | None = None
        """Time on the loop's clock since when there is no request; None while there is one."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > self.most_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._head_timer)
        _stop(self._reading_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_silent:
            self._wait_for_head()
        else:
            self._silent_since = None
            _stop(self._head_timer)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request may have come already.
        if self.is_silent and not self.transport.is_closing():
            self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_timer = self.loop.call_later(_READING_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._reading_timer)

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        """Close the connection unless a whole head comes in time; pieces of one do not make it longer."""
        if self._silent_since is None:
            self._silent_since = self.loop.time()
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has been silent for longest; the new one, if no other is."""
        silent = [each for each in self.connections if isinstance(each, PatientConnection) and each.is_silent]
        oldest = min(silent, key=lambda each: each._silent_since or 0.0, default=self)
        self.connections.discard(oldest)  # it counts no more, although its end is told later
        oldest.transport.abort()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
