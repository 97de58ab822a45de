"""Real HTTP servers on free ports, and one with scripted answers. They know none of the project's routes."""

import gzip
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    raw: bytes
    """The body, decompressed."""
    target: str = ""
    """Path and query as sent."""

    @cached_property
    def body(self) -> Any:
        return json.loads(self.raw) if self.raw else None


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    """Close the connection like a crash: after fewer bytes than announced, or none."""


class Answering(Protocol):
    """Answers requests, each in its own thread."""

    def answer(self, request: Request) -> Answer: ...


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
    """Return server-sent events, each (id, data); data that is not a string becomes JSON."""
    text = ""
    for identifier, data in events:
        text += f"id: {identifier}\n" if identifier else ""
        text += f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
    return Answer(200, text.encode(), {"Content-Type": "text/event-stream"}, cut)


Step = Answer | Callable[[Request], Answer]


class Script:
    """Answers by method and path, used in turn; the last one of a route repeats."""

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
def serve(answering: Answering, host: str = "127.0.0.1") -> Iterator[str]:
    """Run the server at an address of this machine, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = dict(parse_qsl(parts.query))
            request = Request(self.command, parts.path, query, headers, self._body(headers), self.path)
            with suppress(ConnectionError):  # the client left while its request waited
                self._send(answering.answer(request))

        def _body(self, headers: dict[str, str]) -> bytes:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                data = b""
                while size := int(self.rfile.readline().strip(), 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                data = self.rfile.read(int(headers.get("content-length") or 0))
            return gzip.decompress(data) if headers.get("content-encoding") == "gzip" else data

        def _send(self, answer: Answer) -> None:
            if answer.cut:
                self.close_connection = True
                if not answer.body:
                    return
            self.send_response(answer.status)
            length = str(len(answer.body) + (1000 if answer.cut else 0))
            for name, value in {"Content-Length": length, **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _handle  # noqa: N815 (http.server's names)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's name)
            """Log nothing."""

    server = ThreadingHTTPServer((host, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
