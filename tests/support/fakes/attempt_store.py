"""The worker's side of the attempt channel without a worker, through the real storage code."""

from typing import Any

from pydantic import BaseModel

from swiftkv_platform.contract.attempts import AttemptId, Manifest, ManifestFile
from swiftkv_platform.contract.events import ATTEMPT_EVENT
from swiftkv_platform.storage.artifacts import write_manifest
from swiftkv_platform.storage.attempt_store import EventWriter
from swiftkv_platform.storage.object_store import ObjectStore

METRICS = {"distilled": {"kl": 0.1}}


class _Unchecked(BaseModel):
    time: float = 0.0
    type: str
    message: str = "nonsense"
    data: dict[str, Any]


class FakeWorker:
    """Writes the events that a test wants, as one writer of one attempt."""

    def __init__(self, store: ObjectStore, job_id: str, attempt: int = 1, writer: str = "driver") -> None:
        self._store = store
        self._attempt = AttemptId(job_id, attempt)
        self._events = EventWriter(store, self._attempt, writer)

    def say(self, kind: str, message: str = "", *, time: float = 0.0, level: str = "info", **data: Any) -> None:
        """Write an event that the contract defines."""
        document = {"time": time, "level": level, "type": kind, "message": message or kind, "data": data}
        self._events.write(ATTEMPT_EVENT.validate_python(document))

    def say_nonsense(self, kind: str, **data: Any) -> None:
        """Write an event that the contract does not define."""
        self._events.write(_Unchecked(type=kind, data=data))  # type: ignore[arg-type]

    def step(self, *steps: int, time: float, total: int = 10) -> None:
        """Write the metrics of these steps in one event."""
        points = [{"step": step, "tokens": step * 100, "loss": 1.0 / step} for step in steps]
        self.say("metrics", time=time, points=points, total_steps=total)

    def checkpoint(self, step: int, **lineage: Any) -> str:
        """Publish a complete checkpoint; return its key."""
        key = f"{self._attempt.checkpoints_prefix}/step-{step:08d}"
        self._publish(key, "checkpoint", lineage)
        return key

    def artifact(self, **metrics: Any) -> Manifest:
        return self._publish(self._attempt.artifact_prefix, "artifact", {}, **metrics)

    def _publish(self, prefix: str, kind: Any, known: dict[str, Any], **metrics: Any) -> Manifest:
        self._store.put_bytes(f"{prefix}/data.bin", b"weights")
        files = {"data.bin": ManifestFile(size=7, sha256="0" * 64)}
        lineage = {"teacher": "tiny", **known}
        return write_manifest(self._store, prefix, files, kind=kind, lineage=lineage, metrics=METRICS | metrics)
