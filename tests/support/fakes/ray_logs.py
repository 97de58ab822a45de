"""The part of Ray's dashboard that serves submissions' logs, over real HTTP; counts the bytes that it sends.

Paths and shapes are Ray 2.60's: `/api/jobs/{id}` and its `/logs` and `/logs/tail` (a WebSocket that closes when the
submission has ended), and `/api/v0/logs/file`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import WSCloseCode, web

BLOCK = 1 << 16
_POLL_S = 0.02


@dataclass
class RayLog:
    """The log of one submission, which a test can extend."""

    text: bytes = b""
    repeats: int = 1
    """Number of times that the log repeats `text`, which is stored once."""
    ended: bool = False
    starting: bool = False
    """The driver has no node yet."""
    broken: bool = False
    """The node with the log is gone."""
    cut_after: int | None = None
    """Bytes after which the connection breaks."""
    sent: int = 0
    """Bytes sent, over all requests."""
    requests: list[str] = field(default_factory=list)
    following: int = 0
    """Open WebSockets."""

    @property
    def size(self) -> int:
        return len(self.text) * self.repeats

    def blocks(self, start: int = 0) -> Iterator[bytes]:
        """Yield the log from byte `start` to its current end."""
        for number in range(start // max(len(self.text), 1), self.repeats):
            skipped = max(start - number * len(self.text), 0)
            for offset in range(skipped, len(self.text), BLOCK):
                yield self.text[offset : offset + BLOCK]


class FakeRayLogs:
    """The dashboard of one cluster."""

    def __init__(self) -> None:
        self.logs: dict[str, RayLog] = {}
        self.url = ""
        self._app = web.Application()
        self._app.router.add_get("/api/jobs/{id}", self._details)
        self._app.router.add_get("/api/jobs/{id}/logs", self._whole)
        self._app.router.add_get("/api/jobs/{id}/logs/tail", self._tail)
        self._app.router.add_get("/api/v0/logs/file", self._file)

    def _log(self, request: web.Request, name: str) -> RayLog:
        log = self.logs.get(name)
        if log is None:
            raise web.HTTPNotFound(text=f"Job {name} does not exist")
        log.requests.append(request.path)
        return log

    async def _details(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        log = self._log(request, name)
        node = None if log.starting else "ab" * 28
        status = "SUCCEEDED" if log.ended else "RUNNING"
        return web.json_response({"submission_id": name, "status": status, "driver_node_id": node, "message": ""})

    async def _whole(self, request: web.Request) -> web.StreamResponse:
        """The whole log as one JSON string."""
        log = self._log(request, request.match_info["id"])
        if log.broken:
            raise web.HTTPInternalServerError(text="Traceback ...\nRuntimeError: the node is gone\n")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        await answer.write(b'{"logs": "')
        for block in log.blocks():
            log.sent += len(block)
            await answer.write(block.replace(b"\n", b"\\n"))
        await answer.write(b'"}')
        return answer

    async def _file(self, request: web.Request) -> web.StreamResponse:
        log = self._log(request, request.query["submission_id"])
        assert request.query["node_id"], "Ray requires node_id"
        if log.broken:
            raise web.HTTPInternalServerError(text="Agent for node id: ab doesn't exist.")
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        lines, sent = int(request.query.get("lines", "1000")), 0
        tail = b"".join(log.text.splitlines(keepends=True)[-lines:])
        for block in [tail] if lines != -1 else log.blocks():
            if log.cut_after is not None and sent + len(block) > log.cut_after:
                await answer.write(block[: log.cut_after - sent])
                assert request.transport is not None
                request.transport.close()
                return answer
            sent += len(block)
            log.sent += len(block)
            try:
                await answer.write(block)
            except ConnectionError:  # the reader stopped reading
                return answer
        return answer

    async def _tail(self, request: web.Request) -> web.WebSocketResponse:
        log = self._log(request, request.match_info["id"])
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        log.following += 1
        try:
            sent = 0
            while not (log.ended and sent == log.size):
                for block in log.blocks(sent):
                    sent += len(block)
                    log.sent += len(block)
                    await socket.send_str(block.decode())
                await asyncio.sleep(_POLL_S)
        except ConnectionError:
            return socket
        finally:
            log.following -= 1
        await socket.close(code=WSCloseCode.OK)
        return socket

    @contextmanager
    def serving(self) -> Iterator[FakeRayLogs]:
        loop, ready = asyncio.new_event_loop(), threading.Event()
        runner = web.AppRunner(self._app, handler_cancellation=True)

        async def start() -> None:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()

        def run() -> None:
            loop.run_until_complete(start())
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(70)
