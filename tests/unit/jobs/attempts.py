"""An attempt of a small job in this process, its events, and a store that hangs or fails."""

import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.errors import StorageError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore, open_store
from tests.support.fakes.object_store import InMemoryObjectStore

AWAY = StorageError("the store is away")
COPIED = {"swiftkv": {"initialization": "copied"}}
UNTRACKED = {"tracking": {"wandb": {"mode": "disabled"}}}


def request(attempt: int = 1, spec: JobSpec | None = None, **fields: Any) -> AttemptRequest:
    return AttemptRequest(job_id="job", attempt=attempt, spec=spec or JobSpec(name="n"), run_id="run", **fields)


def said(store: ObjectStore, kind: str | None = None) -> list[AttemptEvent]:
    """Events of the first attempt; of one `kind`, if given."""
    events = [stored.event for stored in AttemptStore(store).read_events(AttemptId("job", 1), {})]
    return [event for event in events if kind in (None, event.type)]


def points(store: ObjectStore) -> list[dict[str, Any]]:
    return [point for event in said(store, "metrics") for point in event.data["points"]]


@dataclass
class Job:
    """A job of a tiny teacher on a file of rows, with a store, in a directory of its own."""

    directory: Path
    teacher: Path

    def __post_init__(self) -> None:
        self.store = open_store(str(self.directory / "store"))
        self.corpus = self.directory / "functions.jsonl"
        self.write({"text": f"def add_{i}(x):\n    return x + {i}\n"} for i in range(120))

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        self.corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def spec(self, **sections: Any) -> JobSpec:
        """Spec of the job; `data` and `swiftkv` change single fields, other sections are replaced."""
        data = {"sources": [{"name_or_path": str(self.corpus)}], "max_length": 96, "validation_fraction": 0.2}
        swiftkv = {"key_value_group_size": 2, "calibration_tokens": 1024, **sections.pop("swiftkv", {})}
        document = {"name": "tiny", "model": {"name_or_path": str(self.teacher), "dtype": "float32"}, **UNTRACKED}
        document |= {"training": {"max_steps": 2, "batch_size": 2}, "swiftkv": swiftkv, **sections}
        return JobSpec.model_validate({**document, "data": {**data, **sections.get("data", {})}})


class HangingStore(InMemoryObjectStore):
    """A store whose writes wait for `open` and then raise `error`, if set; its next `failing_lists` listings fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached, self.written = threading.Event(), threading.Event(), threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.failing_lists = 0

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.reached.set()
        self.open.wait()
        if self.error is not None:
            raise self.error
        super().put_bytes(key, data, if_absent=if_absent)
        self.written.set()

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        if self.failing_lists > 0:
            self.failing_lists -= 1
            raise AWAY
        return super().list(prefix, start_after=start_after)
