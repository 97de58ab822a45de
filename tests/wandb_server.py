"""A W&B server on this machine: the requests of wandb's own client, over HTTP, with outages by request."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Outage = Literal["hangs", "refuses", "fails"]
"""`hangs`: takes a request and never answers; `refuses`: ends the connection; `fails`: answers 500."""


@dataclass
class Run:
    """State of one run at the server."""

    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows by their line number, which a client counts on from where a run was resumed."""
    files: set[str] = field(default_factory=set)
    display_name: str = ""
    complete: bool = False
    starts: int = 0
    """Times it was resumed or begun."""

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for _, row in sorted(self.history.items())]


class WandbServer:
    """Runs by id, and whether the server is away."""

    def __init__(self, port: int = 0) -> None:
        self.runs: dict[str, Run] = {}
        self.outage: Outage | None = None
        self.hanging = 0
        """Requests that were taken during a hang."""
        self.refused = 0
        """Requests that were answered with 500 or not at all."""
        self._over = threading.Event()
        handler = type("_Bound", (_Handler,), {"wandb": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def hang(self) -> None:
        """Keep a request until the server ends."""
        self.hanging += 1
        self._over.wait()

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL request."""
        match operation:
            case "RunResumeStatus" | "LastStep":
                return {"model": _project() | {"bucket": self._resumable(variables["name"])}}
            case "UpsertBucket":
                return {"upsertBucket": {"bucket": self._upsert(variables), "inserted": False}}
            case "CreateRunFiles":
                return {"createRunFiles": self._new_files(variables["run"], variables["files"])}
            case "Viewer":
                return {"viewer": {"id": "1", "entity": "team", "flags": "{}", "teams": {"edges": []}}}
            case _:
                return {}

    def _resumable(self, run_id: str) -> dict[str, Any] | None:
        run = self.runs.get(run_id)
        if run is None:
            return None
        tail = [json.dumps(run.history[max(run.history)])] if run.history else []
        return {
            "id": run_id,
            "name": run_id,
            "displayName": run.display_name,
            "summaryMetrics": "{}",
            "config": "{}",
            "tags": [],
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',
        }

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run_id = variables["name"] or variables["id"]
        run = self.runs.setdefault(run_id, Run())
        if variables.get("displayName"):
            run.display_name = variables["displayName"]
            run.starts += 1
        return {
            "id": run_id,
            "name": run_id,
            "displayName": run.display_name,
            "config": "{}",
            "project": _project(),
            "historyLineCount": len(run.history),
        }

    def _new_files(self, run_id: str, names: list[str]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{run_id}/{name}"} for name in names]
        return {"runID": run_id, "uploadHeaders": [], "files": files}

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        """Take a piece of a run's history: lines from `offset` on."""
        run = self.runs.setdefault(run_id, Run())
        piece = (body.get("files") or {}).get("wandb-history.jsonl")
        if piece is not None:
            run.history |= {piece["offset"] + i: json.loads(line) for i, line in enumerate(piece["content"])}
        run.complete = run.complete or bool(body.get("complete"))


def _project() -> dict[str, Any]:
    return {"id": "p", "name": "swiftkv", "entity": {"id": "e", "name": "team"}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wandb: WandbServer

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):  # a client that ends while a request waits
            super().handle_one_request()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        match self.wandb.outage:
            case "hangs":
                self.wandb.hang()
                self.close_connection = True
                return
            case "refuses":
                self.wandb.refused += 1
                self.close_connection = True
                return
            case "fails":
                self.wandb.refused += 1
                self._send(500, {"error": "down"})
                return
        self._send(200, self._answer(body))

    do_GET = do_PUT = do_POST  # noqa: N815

    def _answer(self, body: bytes) -> dict[str, Any]:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts == ["graphql"]:
            request = json.loads(body)
            name = request.get("operationName") or request["query"].split()[1]
            return {"data": self.wandb.answer(name, request.get("variables") or {})}
        if parts[-1] == "file_stream":
            self.wandb.stream(parts[-2], json.loads(body))
        elif parts[0] == "upload":
            self.wandb.runs[parts[1]].files.add("/".join(parts[2:]))
        return {}

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    try:
        yield server
    finally:
        server.close()
