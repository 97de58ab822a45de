"""A real HTTP server on a free port whose answers a test writes down. Knows sockets and scripts, no route of ours."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: Any
    raw: bytes = b""


@dataclass(frozen=True)
class Answer:
    """Answer that goes over the wire."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Close the connection as a crash would: with fewer bytes than were promised, or none at all."""


def json_answer(document: Any, status: int = 200, **headers: str) -> Answer:
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Answer(status, json.dumps(document).encode(), headers)


def list_answer(rows: list[dict[str, Any]], *, has_more: bool = False) -> Answer:
    ids = [row.get("id") for row in rows] or [None]
    return json_answer({"object": "list", "data": rows, "has_more": has_more, "first_id": ids[0], "last_id": ids[-1]})


def problem_answer(status: int, detail: str, code: str = "invalid_input", **extra: Any) -> Answer:
    document = {"type": "about:blank", "title": "Refused", "status": status, "detail": detail, "code": code, **extra}
    return Answer(status, json.dumps(document).encode(), {"Content-Type": "application/problem+json"})


def event_stream(*events: tuple[str | None, Any], cut: bool = False) -> Answer:
    """Server-sent events, each (id, data); data that is no text becomes JSON."""
    text = ""
    for identifier, data in events:
        text += f"id: {identifier}\n" if identifier else ""
        text += f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
    return Answer(200, text.encode(), {"Content-Type": "text/event-stream"}, cut)


Step = Answer | Callable[[Request], Answer]


class Script:
    """Answers by method and path, taken in turn; the last of a route stays."""

    def __init__(self) -> None:
        self._steps: defaultdict[tuple[str, str], list[Step]] = defaultdict(list)
        self._lock = threading.Lock()
        self.requests: list[Request] = []

    def on(self, method: str, path: str, *steps: Step) -> None:
        self._steps[method, path] = list(steps)

    def sent(self, method: str, path: str) -> list[Request]:
        return [request for request in self.requests if (request.method, request.path) == (method, path)]

    def answer(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            steps = self._steps.get((request.method, request.path))
            if not steps:
                return problem_answer(404, f"no {request.method} {request.path} in this test's script", "not_found")
            step = steps.pop(0) if len(steps) > 1 else steps[0]
        return step(request) if callable(step) else step


@contextmanager
def serve(script: Script) -> Iterator[str]:
    """Run the script; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            raw, parts = self.rfile.read(int(self.headers.get("Content-Length") or 0)), urlsplit(self.path)
            headers, query = {name.lower(): value for name, value in self.headers.items()}, dict(parse_qsl(parts.query))
            body = json.loads(raw) if raw else None
            self._send(script.answer(Request(self.command, parts.path, query, headers, body, raw)))

        def _send(self, answer: Answer) -> None:
            if answer.cut:
                self.close_connection = True
                if not answer.body:
                    return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) + (1000 if answer.cut else 0)))
            self.end_headers()
            self.wfile.write(answer.body)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _handle  # noqa: N815 (http.server's names)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's name)
            """Silent."""

    with running(Handler) as url:
        yield url


@contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server in a thread; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
