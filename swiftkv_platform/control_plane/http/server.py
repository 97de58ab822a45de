"""The control plane's HTTP server: uvicorn with timeouts for silent and slow clients. Knows no route.

uvicorn ends idle connections between requests. It lets a client stay silent before its first request, or in the middle
of a head of any length, for ever, and waits for ever for a client that does not read. Here all of these are closed, and
when there are too many connections, the one that has been silent for longest.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from swiftkv_platform.settings import Settings

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Mixed
else:
    _Mixed = object

_SHUTDOWN_TIMEOUT_S = 10
_READING_TIMEOUT_S = 60.0
"""Seconds after which a client that reads nothing of its answer is disconnected."""
_MOST_HEAD_BYTES = 32 << 10
_MOST_LATE_BYTES = 2 << 20
"""Most bytes of a body that are skipped once its request is answered: clients may read the answer only after
sending."""
_MOST_FILES = 1 << 16
_CONNECTIONS_PER_FILE = 0.5
"""Connections per file that may be open: requests, databases and stores need the others."""
_TURNS = itertools.count()


def server_options(settings: Settings) -> dict[str, Any]:
    """Options for uvicorn."""
    most = max(min(settings.max_connections, int(_files() * _CONNECTIONS_PER_FILE)), 1)

    limits = {"most_connections": most, "head_timeout_s": settings.request_head_timeout_s}
    return {
        "host": settings.host,
        "port": settings.port,
        "http": type("Connection", (Patience, AutoHTTPProtocol), limits),
        "ws": "none",
        "access_log": False,
        "proxy_headers": False,  # the application reads them itself, by its own setting
        "timeout_graceful_shutdown": _SHUTDOWN_TIMEOUT_S,
    }


def _files() -> int:
    """Raise this process's limit of open files as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


class Patience(_Mixed):
    """Mixin for either of uvicorn's protocols that closes a connection when its client is silent for too long, or
    silent while others need the place."""

    most_connections: int
    head_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silent_since: int | None = None
        """Sequence number of falling silent, since clocks are too coarse; None while there is a request."""
        self._unasked_bytes = 0
        """Bytes that came since then."""
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
        if not self.is_silent:
            self._silent_since, self._unasked_bytes = None, 0
            _stop(self._head_timer)
            return
        self._wait_for_head()
        self._unasked_bytes += len(data)
        most = _MOST_LATE_BYTES if self._sends_announced_body else _MOST_HEAD_BYTES
        if self._unasked_bytes > most and not self.transport.is_closing():
            answered: Any = self.cycle  # uvicorn's types leave out that there is none at first
            if answered is None:
                self.send_400_response("The head of the request is too long.")
            else:
                self.transport.abort()

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

    @property
    def _sends_announced_body(self) -> bool:
        """Whether the answer came before the end of a body whose size is known; chunked bodies cost more to skip."""
        return (
            self.cycle is not None
            and self.cycle.more_body
            and b"transfer-encoding" not in dict(self.cycle.scope["headers"])
        )

    def _wait_for_head(self) -> None:
        """Close the connection unless a whole request head comes in time; parts of a head do not extend the time."""
        if self._silent_since is None:
            self._silent_since = next(_TURNS)
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection that has been silent for longest, or the new one if none is silent."""
        waiting = {
            each: each._silent_since
            for each in self.connections
            if isinstance(each, Patience) and each._silent_since is not None and not each.transport.is_closing()
        }
        oldest = min(waiting, key=waiting.__getitem__, default=self)
        self.connections.discard(oldest)  # no longer counted, although `connection_lost` comes later
        oldest.transport.abort()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
