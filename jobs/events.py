"""What a process of an attempt tells the control plane, as numbered events in the object store. Knows no Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from ulid import ULID

from swiftkv_platform.attempts import AttemptEvent, AttemptRequest, Manifest
from swiftkv_platform.errors import StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.attempt_store import EventWriter
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.tracking.tracker import TrackingInfo

EventType = Literal["message", "status", "metrics", "checkpoint", "artifact", "tracking", "error"]
Level = Literal["info", "warn", "error"]


class Reporter:
    """The events of one process, under a name that no other process and no later start of it has.

    Args:
        role: first part of that name, e.g. `driver`.
    """

    def __init__(self, store: ObjectStore, request: AttemptRequest, role: str) -> None:
        self._writer = EventWriter(store, request.job_id, request.attempt, f"{role}-{ULID()}")

    def status(self, status: Literal["running", "evaluating", "paused"]) -> None:
        self._write("status", status, {"status": status})

    def message(self, message: str, *, level: Level = "info", **data: Any) -> None:
        self._write("message", message, data, level=level)

    def metrics(self, points: list[dict[str, float]], total_steps: int) -> None:
        step = int(points[-1]["step"])
        self._write("metrics", f"step {step} of {total_steps}", {"points": points, "total_steps": total_steps})

    def checkpoint(self, key: str, manifest: Manifest, step: int) -> None:
        data = {"step": step, "key": key, "size": manifest.size, "sha256": manifest_digest(manifest)}
        self._write("checkpoint", f"checkpoint of step {step}", data)

    def artifact(self, key: str, manifest: Manifest) -> None:
        data = {"key": key, "sha256": manifest_digest(manifest), "size": manifest.size, "metrics": manifest.metrics}
        self._write("artifact", f"model of {manifest.size} bytes", data)

    def tracking(self, info: TrackingInfo) -> None:
        self._write("tracking", f"tracked by {info.provider}, {info.mode}", info.as_dict())

    def error(self, message: str, *, code: str, field: str | None, value: Any, retryable: bool) -> None:
        data = {"code": code, "field": field, "value": value, "retryable": retryable}
        self._write("error", message, data, level="error")

    def _write(self, type_: EventType, message: str, data: Mapping[str, Any], *, level: Level = "info") -> None:
        event = AttemptEvent(time=time.time(), level=level, type=type_, message=message, data=dict(data))
        self._writer.write(event)


class MetricsBuffer:
    """Points on their way to `metrics` events, of which it writes at most one every `interval_s` seconds."""

    def __init__(self, reporter: Reporter, total_steps: int, *, interval_s: float = 1.0) -> None:
        self._reporter = reporter
        self._total_steps = total_steps
        self._interval_s = interval_s
        self._points: list[dict[str, float]] = []
        self._flushed_at = -math.inf

    def add(self, point: dict[str, float]) -> None:
        self._points.append(point)
        if time.monotonic() - self._flushed_at >= self._interval_s:
            self.flush()

    def flush(self) -> None:
        """Write what is there. While the store is away the points wait, and training goes on."""
        if not self._points:
            return
        self._flushed_at = time.monotonic()
        try:
            self._reporter.metrics(self._points, self._total_steps)
        except StorageError as error:
            get_logger().warning("metrics_delayed", num_points=len(self._points), error=error.message)
        else:
            self._points = []
