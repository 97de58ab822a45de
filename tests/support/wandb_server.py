"""A local W&B server: the HTTP requests of wandb's own client, with outages for each request."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.fakes.scripted_server import Answer, Request, json_answer, serve

Outage = Literal["hangs", "refuses", "fails"]
"""`hangs`: take a request and never answer; `refuses`: close the connection; `fails`: answer 500."""


@dataclass
class Run:
    """A run's state on the server."""

    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows by line number; after a resume, clients count on from the last line."""
    files: set[str] = field(default_factory=set)
    display_name: str = ""
    complete: bool = False
    starts: int = 0
    """Number of times that the run was started or resumed."""

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for _, row in sorted(self.history.items())]


class WandbServer:
    """Runs by id, and the current outage."""

    url = ""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.outage: Outage | None = None
        self.hanging = 0
        """Number of requests received during a hang."""
        self.refused = 0
        """Number of requests answered with 500 or closed."""
        self.over = threading.Event()

    def answer(self, request: Request) -> Answer:
        match self.outage:
            case "hangs":
                self.hanging += 1
                self.over.wait()
                return Answer(cut=True)
            case "refuses":
                self.refused += 1
                return Answer(cut=True)
            case "fails":
                self.refused += 1
                return json_answer({"error": "down"}, 500)
        parts = request.path.strip("/").split("/")
        if parts == ["graphql"]:
            name = request.body.get("operationName") or request.body["query"].split()[1]
            return json_answer({"data": self._query(name, request.body.get("variables") or {})})
        if parts[-1] == "file_stream":
            self._stream(parts[-2], request.body)
        elif parts[0] == "upload":
            self.runs[parts[1]].files.add("/".join(parts[2:]))
        return json_answer({})

    def _query(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL response."""
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

    def _stream(self, run_id: str, body: dict[str, Any]) -> None:
        """Store a piece of a run's history: lines from `offset` on."""
        run = self.runs.setdefault(run_id, Run())
        piece = (body.get("files") or {}).get("wandb-history.jsonl")
        if piece is not None:
            run.history |= {piece["offset"] + i: json.loads(line) for i, line in enumerate(piece["content"])}
        run.complete = run.complete or bool(body.get("complete"))


def _project() -> dict[str, Any]:
    return {"id": "p", "name": "swiftkv", "entity": {"id": "e", "name": "team"}}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    with serve(server) as server.url:
        try:
            yield server
        finally:
            server.over.set()
