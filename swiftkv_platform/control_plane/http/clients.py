"""Clients that wait for an answer: work for a client stops when it has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect


class Client:
    """The client of one request. Threads register how to stop their work."""

    def __init__(self) -> None:
        self._has_left = False
        self._stops: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def leave(self) -> None:
        """Stop all registered work."""
        with self._lock:
            self._has_left = True
            for stop in self._stops:
                stop()

    def check_present(self) -> None:
        """Raise `ClientDisconnect` if the client has left."""
        if self._has_left:
            raise ClientDisconnect

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` if the client leaves within the context. Raises `ClientDisconnect` if it has left before."""
        with self._lock:
            self.check_present()
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._lock:
                self._stops.remove(stop)


@asynccontextmanager
async def watched_client(request: Request) -> AsyncIterator[Client]:
    """Watch a request's connection within the context. Only for requests whose body has been read: watching discards
    what still comes."""
    client = Client()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        client.leave()

    watching = asyncio.create_task(watch())
    try:
        yield client
    finally:
        watching.cancel()


async def _waiting_client(request: Request) -> AsyncIterator[Client]:
    async with watched_client(request) as client:
        yield client


WaitingClient = Annotated[Client, Depends(_waiting_client, scope="function")]
"""The request's client, watched until the route's function returns. For routes whose body `BodyRoute` has read."""
