"""Messages between an attempt and the control plane, stored as objects: the attempt writes numbered events and reads
stop requests. SIGTERM is a stop request too: the driver stores it as an object, a worker keeps it in its process.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from ulid import ULID

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest, Manifest, StopRequest
from swiftkv_platform.contract.events import (
    ArtifactEvent,
    AttemptEvent,
    AttemptStatus,
    CheckpointEvent,
    ErrorEvent,
    Level,
    MessageEvent,
    MetricsEvent,
    PlacementData,
    PlacementEvent,
    ProgressEvent,
    StatusEvent,
    SteeringData,
    SteeringEvent,
    TrackingEvent,
    name_phase,
)
from swiftkv_platform.errors import StorageError, SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import hash_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore, EventWriter
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.tracking.tracker import TrackingInfo

PROGRESS_INTERVAL_S = 30.0
"""Minimum seconds between progress events of a phase."""
STOP_POLL_INTERVAL_S = 1.0
_EVENT_POLL_INTERVAL_S = 0.5
_FINAL_READ_ATTEMPTS = 3
_MAX_TRACKING_FAULT_LENGTH = 500
sigterm_received = threading.Event()
"""Set when this worker process receives SIGTERM."""


class EventReporter:
    """Writes the events of one process, under a unique name. Thread-safe.

    Args:
        role: first part of that name, e.g. `driver`.
    """

    def __init__(self, store: ObjectStore, attempt: AttemptId, role: str) -> None:
        self._writer = EventWriter(store, attempt, f"{role}-{ULID()}")
        self._lock = threading.Lock()

    def send_status(self, status: AttemptStatus) -> None:
        self._write_event(StatusEvent, status, {"status": status})

    def send_message(self, message: str, *, level: Level = "info", **data: Any) -> None:
        self._write_event(MessageEvent, message, data, level)

    def send_metrics(self, points: list[dict[str, float]], total_steps: int) -> None:
        message = f"step {int(points[-1]['step'])} of {total_steps}"
        self._write_event(MetricsEvent, message, {"points": points, "total_steps": total_steps})

    def send_checkpoint(self, key: str, manifest: Manifest, step: int) -> None:
        data = {"step": step, "key": key, "size": manifest.size, "sha256": hash_manifest(manifest)}
        self._write_event(CheckpointEvent, f"checkpoint of step {step}", data)

    def send_artifact(self, key: str, manifest: Manifest) -> None:
        data = {"key": key, "sha256": hash_manifest(manifest), "size": manifest.size, "metrics": manifest.metrics}
        self._write_event(ArtifactEvent, f"model of {manifest.size} bytes", data)

    def send_tracking(self, info: TrackingInfo) -> None:
        message = f"tracking with {info.provider}, {info.mode}"
        if info.fault is not None:
            message = f"{message}; the data is kept and uploaded later: {info.fault[:_MAX_TRACKING_FAULT_LENGTH]}"
        data = {"provider": info.provider, "run_id": info.run_id, "mode": info.mode, "url": info.url}
        self._write_event(TrackingEvent, message, data, "info" if info.fault is None else "warn")

    def send_placement(self, data: PlacementData) -> None:
        """Report that a phase waits for resources, or that its workers have started."""
        self._write_event(PlacementEvent, f"{data['phase']}: {data['state']}", data)

    def send_progress(self, phase: str, part: str, *, done: int, total: int, eta_s: float | None) -> None:
        left = "" if eta_s is None or done >= total else f", {eta_s:.0f} s left"
        data = {"phase": phase, "part": part, "done": done, "total": total, "eta_s": eta_s}
        self._write_event(ProgressEvent, f"{phase}: {part} {done} of {total}{left}", data)

    def send_steering_decision(self, message: str, data: SteeringData) -> None:
        """Report a steering decision; a rollback is a warning."""
        self._write_event(SteeringEvent, message, data, "warn" if data["action"] == "rollback" else "info")

    def send_error(self, message: str, *, code: str, field: str | None, value: Any, retryable: bool) -> None:
        data = {"code": code, "field": field, "value": value, "retryable": retryable}
        self._write_event(ErrorEvent, message, data, "error")

    def _write_event(
        self, event: Callable[..., AttemptEvent], message: str, data: Mapping[str, Any], level: Level = "info"
    ) -> None:
        with self._lock:  # keeps numbers and times in the same order
            self._writer.write(event(time=time.time(), level=level, message=message, data=data))


class MetricsBuffer:
    """Queue of points for `metrics` events. A thread writes at most one event per `interval_s` seconds, plus one per
    flush. While the store is unavailable, points wait in the queue and training continues.
    """

    def __init__(self, reporter: EventReporter, total_steps: int, *, interval_s: float = 1.0) -> None:
        self._reporter = reporter
        self._total_steps = total_steps
        self._interval_s = interval_s
        self._items: SimpleQueue[dict[str, float] | threading.Event | None] = SimpleQueue()
        """Points; events to set after an attempt to write the points before them; None at the end."""
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=copy_context().run, args=(self._drain,), name="metrics", daemon=True)
        self._thread.start()

    def add_point(self, point: dict[str, float]) -> None:
        """Queue a point without waiting for the store."""
        self._items.put(point)

    def flush(self) -> None:
        """Wait for one attempt to write all queued points."""
        attempted = threading.Event()
        with self._closing:
            if self._closed:
                return
            self._items.put(attempted)
        attempted.wait()

    def close(self) -> None:
        """Flush the queue and end the thread."""
        with self._closing:
            self._closed = True
            self._items.put(None)
        self._thread.join()

    def _drain(self) -> None:
        points: list[dict[str, float]] = []
        due = -math.inf
        while True:
            try:
                item = self._items.get(timeout=max(0.0, due - time.monotonic()) if points else None)
            except Empty:
                item = threading.Event()  # like a flush, but no caller waits
            if isinstance(item, dict):
                points.append(item)
                continue
            if points:
                points = [] if self._write_points(points) else points
                due = time.monotonic() + self._interval_s
            if item is None:
                break
            item.set()
        if points:
            get_logger().error("metrics_lost", num_points=len(points))

    def _write_points(self, points: list[dict[str, float]]) -> bool:
        """Write the points; return whether that succeeded. No exception ends the thread, since `flush` waits for it."""
        try:
            self._reporter.send_metrics(points, self._total_steps)
        except SwiftKVError as error:
            get_logger().warning("metrics_delayed", num_points=len(points), error=error.message)
            return False
        except Exception:
            get_logger().exception("metrics_delayed", num_points=len(points))
            return False
        return True


class PhaseProgressReporter:
    """Writes progress events of a phase's parts, with a time estimate."""

    def __init__(self, reporter: EventReporter, phase: str) -> None:
        self._reporter = reporter
        self._phase = phase
        self._started: dict[str, tuple[float, int]] = {}
        self._last_report = 0.0

    def start_part(self, part: str) -> None:
        """Start the clock of a part."""
        self._started[part] = time.monotonic(), 0

    def report_progress(self, part: str, done: int, total: int) -> None:
        """Write an event if the part is complete or the last event is not recent. Ignores storage errors."""
        now = time.monotonic()
        if done < total and now < self._last_report + PROGRESS_INTERVAL_S:
            return
        self._last_report = now
        started, before = self._started.setdefault(part, (now, done))
        eta = (now - started) * (total - done) / (done - before) if done > before else None
        with suppress(StorageError):
            self._reporter.send_progress(self._phase, part, done=done, total=total, eta_s=eta)


def make_progress_callback(
    store: ObjectStore, request: AttemptRequest, phase: str, part: str
) -> Callable[[int, int], None]:
    """Return a callback (done, total) that reports the progress of a phase with a single part."""
    reporter = EventReporter(store, request.attempt_id, f"{phase}-progress")
    return partial(PhaseProgressReporter(reporter, phase).report_progress, part)


def report_workers_requested(reporter: EventReporter, spec: JobSpec, phase: str, *, num_workers: int = 1) -> None:
    """Report that a phase requests its workers."""
    reporter.send_placement(
        {"phase": name_phase(phase, spec.name), "state": "waiting", "needs": _describe_resources(spec, num_workers)}
    )


def report_workers_started(store: ObjectStore, request: AttemptRequest, phase: str) -> None:
    """Report that the calling worker of a phase has started."""
    EventReporter(store, request.attempt_id, phase).send_placement(
        {"phase": name_phase(phase, request.spec.name), "state": "placed"}
    )


def _describe_resources(spec: JobSpec, num_workers: int) -> str:
    import ray  # imported here so that evaluation and calibration run without ray

    resources, cluster = spec.resources, ray.cluster_resources()
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    total = " and ".join(f"{cluster.get(name, 0.0):g} {name}" for name, amount in each.items() if amount)
    return f"{resources.describe(num_workers)}; the cluster has {total}"


def read_stop_request(store: ObjectStore, request: AttemptRequest) -> StopRequest:
    """Read the stop request of an attempt from the store; `NONE` while the store is unavailable."""
    attempts = AttemptStore(store)
    try:
        if attempts.is_pause_requested(request.attempt_id):
            return StopRequest.PAUSE
        return StopRequest.STOP if attempts.is_preemption_announced(request.attempt_id) else StopRequest.NONE
    except StorageError as error:
        get_logger().warning("stop_request_unreadable", error=error.message)
        return StopRequest.NONE


class StopRequestWatcher:
    """Polls the stop request of an attempt on its own thread, so that no step waits for the store."""

    def __init__(self, store: ObjectStore, request: AttemptRequest) -> None:
        self._store = store
        self._request = request
        self._closed = threading.Event()
        self.stop_request = StopRequest.NONE
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(STOP_POLL_INTERVAL_S):
            self.stop_request = max(self.stop_request, read_stop_request(self._store, self._request))


@contextmanager
def checkpoint_on_sigterm(store: ObjectStore, request: AttemptRequest) -> Iterator[None]:
    """On the first SIGTERM, request that the workers save a checkpoint and end. Later signals get the previous handler.

    Does nothing outside the main thread, the only one that may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_checkpoint() -> None:
        get_logger().warning("sigterm_received")
        with suppress(StorageError):  # then the attempt ends with the existing checkpoints
            AttemptStore(store).announce_preemption(request.attempt_id)

    before = _handle_first_sigterm(request_checkpoint)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def record_sigterm() -> None:
    """On the first SIGTERM to this worker process, set `sigterm_received`. Later signals get the previous handler.

    Call it on the main thread, the only one that may handle signals; the trainer runs on another.
    """
    _handle_first_sigterm(sigterm_received.set)


def _handle_first_sigterm(action: Callable[[], None]) -> Any:
    """Call `action` at the next SIGTERM, and then restore the current handler, which is returned."""
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        action()

    signal.signal(signal.SIGTERM, handle)
    return before


@contextmanager
def follow_events(
    store: AttemptStore, request: AttemptRequest, on_event: Callable[[AttemptEvent], None] | None
) -> Iterator[None]:
    """Call `on_event` with every event of the attempt; the context ends after the last ones.

    After a storage error, also one raised by `on_event`, events are delivered later. Any other error of `on_event` is
    logged, and its event is skipped.
    """
    if on_event is None:
        yield
        return
    ended, cursor = threading.Event(), dict[str, int]()

    def deliver_new_events() -> bool:
        """Return whether all new events were delivered."""
        try:
            for stored in store.read_events(request.attempt_id, cursor):
                _deliver_event(on_event, stored.event)
                cursor[stored.writer] = stored.sequence
        except StorageError as error:
            get_logger().warning("events_delayed", error=error.message)
            return False
        return True

    def follow() -> None:
        while not ended.wait(_EVENT_POLL_INTERVAL_S):
            deliver_new_events()
        for attempt in range(1, _FINAL_READ_ATTEMPTS + 1):
            if deliver_new_events():
                return
            if attempt < _FINAL_READ_ATTEMPTS:
                time.sleep(_EVENT_POLL_INTERVAL_S)
        get_logger().error("event_forwarding_failed", after=cursor)

    follower = threading.Thread(target=copy_context().run, args=(follow,), name="events", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _deliver_event(on_event: Callable[[AttemptEvent], None], event: AttemptEvent) -> None:
    try:
        on_event(event)
    except StorageError:
        raise
    except Exception:
        get_logger().exception("event_handler_failed", type=event.type, message=event.message)
