"""Messages between an attempt and the control plane, as objects in the store: numbered events go out; requests to
pause, or to save before machines go, come in. SIGTERM has the same meaning: the driver stores it as such an object, a
worker keeps it in its process.
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
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.attempt_store import AttemptStore, EventWriter
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.tracking.tracker import TrackingInfo

PROGRESS_INTERVAL_S = 30.0
"""Seconds between progress events of a part."""
LOOK_INTERVAL_S = 1.0
"""Seconds between looks for control objects."""
_FOLLOW_INTERVAL_S = 0.5
_LAST_ROUNDS = 3
"""Attempts to read the last events if the store fails."""
_LONGEST_FAULT = 500
told_to_leave = threading.Event()
"""Set when this process, a worker, gets SIGTERM."""


class Reporter:
    """The events of one process, under a name that no other process and no later start of it has. Thread-safe.

    Args:
        role: first part of that name, e.g. `driver`.
    """

    def __init__(self, store: ObjectStore, attempt: AttemptId, role: str) -> None:
        self._writer = EventWriter(store, attempt, f"{role}-{ULID()}")
        self._lock = threading.Lock()

    def status(self, status: AttemptStatus) -> None:
        self._write(StatusEvent, status, {"status": status})

    def message(self, message: str, *, level: Level = "info", **data: Any) -> None:
        self._write(MessageEvent, message, data, level)

    def metrics(self, points: list[dict[str, float]], total_steps: int) -> None:
        message = f"step {int(points[-1]['step'])} of {total_steps}"
        self._write(MetricsEvent, message, {"points": points, "total_steps": total_steps})

    def checkpoint(self, key: str, manifest: Manifest, step: int) -> None:
        data = {"step": step, "key": key, "size": manifest.size, "sha256": manifest_digest(manifest)}
        self._write(CheckpointEvent, f"checkpoint of step {step}", data)

    def artifact(self, key: str, manifest: Manifest) -> None:
        data = {"key": key, "sha256": manifest_digest(manifest), "size": manifest.size, "metrics": manifest.metrics}
        self._write(ArtifactEvent, f"model of {manifest.size} bytes", data)

    def tracking(self, info: TrackingInfo) -> None:
        message = f"tracked by {info.provider}, {info.mode}"
        if info.fault is not None:
            message = f"{message}, to be uploaded later: {info.fault[:_LONGEST_FAULT]}"
        data = {"provider": info.provider, "run_id": info.run_id, "mode": info.mode, "url": info.url}
        self._write(TrackingEvent, message, data, "info" if info.fault is None else "warn")

    def placement(self, data: PlacementData) -> None:
        """Report that a phase waits for a place on the cluster, or that a worker has found one."""
        self._write(PlacementEvent, f"{data['phase']}: {data['state']}", data)

    def progress(self, phase: str, part: str, *, done: int, total: int, eta_s: float | None) -> None:
        left = "" if eta_s is None or done >= total else f", {eta_s:.0f} s left"
        data = {"phase": phase, "part": part, "done": done, "total": total, "eta_s": eta_s}
        self._write(ProgressEvent, f"{phase}: {part} {done} of {total}{left}", data)

    def course(self, message: str, data: SteeringData) -> None:
        """Report a turn of the training run; going back is a warning."""
        self._write(SteeringEvent, message, data, "warn" if data["action"] == "rollback" else "info")

    def error(self, message: str, *, code: str, field: str | None, value: Any, retryable: bool) -> None:
        data = {"code": code, "field": field, "value": value, "retryable": retryable}
        self._write(ErrorEvent, message, data, "error")

    def _write(
        self, event: Callable[..., AttemptEvent], message: str, data: Mapping[str, Any], level: Level = "info"
    ) -> None:
        with self._lock:  # so that numbers and times are in the same order
            self._writer.write(event(time=time.time(), level=level, message=message, data=data))


class MetricsBuffer:
    """Queue of points for `metrics` events, which its own thread writes: at most one event every `interval_s` seconds,
    plus one per flush. While the store is away the points wait, and training goes on.
    """

    def __init__(self, reporter: Reporter, total_steps: int, *, interval_s: float = 1.0) -> None:
        self._reporter = reporter
        self._total_steps = total_steps
        self._interval_s = interval_s
        self._items: SimpleQueue[dict[str, float] | threading.Event | None] = SimpleQueue()
        """Points; events to set after the points before them were tried; None at the end."""
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="metrics", daemon=True)
        self._thread.start()

    def add(self, point: dict[str, float]) -> None:
        """Queue a point. Never waits for the store."""
        self._items.put(point)

    def flush(self) -> None:
        """Wait until an attempt has been made to write all points added so far."""
        tried = threading.Event()
        with self._closing:
            if self._closed:
                return
            self._items.put(tried)
        tried.wait()

    def close(self) -> None:
        """Flush, and end the thread."""
        with self._closing:
            self._closed = True
            self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
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
                points = [] if self._write(points) else points
                due = time.monotonic() + self._interval_s
            if item is None:
                break
            item.set()
        if points:
            get_logger().error("metrics_lost", num_points=len(points))

    def _write(self, points: list[dict[str, float]]) -> bool:
        """Write the points; return whether they are in the store. No failure ends the thread, since a flush waits for
        it."""
        try:
            self._reporter.metrics(points, self._total_steps)
        except SwiftKVError as error:
            get_logger().warning("metrics_delayed", num_points=len(points), error=error.message)
            return False
        except Exception:
            get_logger().exception("metrics_delayed", num_points=len(points))
            return False
        return True


class PhaseProgress:
    """Writes events with the progress of a phase's parts, and the estimated time left at the pace so far."""

    def __init__(self, reporter: Reporter, phase: str) -> None:
        self._reporter = reporter
        self._phase = phase
        self._began: dict[str, tuple[float, int]] = {}
        self._told = 0.0

    def begin(self, part: str, done: int = 0) -> None:
        """Start the part's clock; `done` of its pieces were done before."""
        self._began[part] = time.monotonic(), done

    def tell(self, part: str, done: int, total: int) -> None:
        """Write an event, unless the last one is recent and the part is not finished. Storage errors are ignored: the
        work goes on."""
        now = time.monotonic()
        if done < total and now < self._told + PROGRESS_INTERVAL_S:
            return
        self._told = now
        began, before = self._began.setdefault(part, (now, done))
        eta = (now - began) * (total - done) / (done - before) if done > before else None
        with suppress(StorageError):
            self._reporter.progress(self._phase, part, done=done, total=total, eta_s=eta)


def phase_progress(store: ObjectStore, request: AttemptRequest, phase: str, part: str) -> Callable[[int, int], None]:
    """Return a function to call with the done and total pieces of a phase's only part. Writes nothing before the first
    call."""
    return partial(PhaseProgress(Reporter(store, request.attempt_id, f"{phase}-progress"), phase).tell, part)


def say_waiting(reporter: Reporter, spec: JobSpec, phase: str, *, num_workers: int = 1) -> None:
    """Report that workers of a phase are about to be requested."""
    reporter.placement({"phase": name_phase(phase, spec.name), "state": "waiting", "needs": _needs(spec, num_workers)})


def say_placed(store: ObjectStore, request: AttemptRequest, phase: str) -> None:
    """Report that the calling worker of the phase has found a place."""
    Reporter(store, request.attempt_id, phase).placement(
        {"phase": name_phase(phase, request.spec.name), "state": "placed"}
    )


def _needs(spec: JobSpec, num_workers: int) -> str:
    import ray  # imported here so that evaluation and calibration run without ray

    resources, there = spec.resources, ray.cluster_resources()
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    total = " and ".join(f"{there.get(name, 0.0):g} {name}" for name, amount in each.items() if amount)
    return f"{resources.describe(num_workers)}; the whole cluster had {total}"


def look(store: ObjectStore, request: AttemptRequest) -> StopRequest:
    """Read the stop request for an attempt from the store; `NONE` while it is away."""
    attempts = AttemptStore(store)
    try:
        if attempts.is_pause_requested(request.attempt_id):
            return StopRequest.PAUSE
        return StopRequest.STOP if attempts.is_preemption_announced(request.attempt_id) else StopRequest.NONE
    except StorageError as error:
        get_logger().warning("control_unreadable", error=error.message)
        return StopRequest.NONE


class ControlWatcher:
    """Polls the control objects of an attempt on its own thread, so that no step waits for the store."""

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
        while not self._closed.wait(LOOK_INTERVAL_S):
            self.stop_request = max(self.stop_request, look(self._store, self._request))


@contextmanager
def checkpoint_on_sigterm(store: ObjectStore, request: AttemptRequest) -> Iterator[None]:
    """Make the first SIGTERM ask the workers to save a checkpoint and end. The next one has its previous effect.

    Does nothing outside the main thread, the only one that may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def announce() -> None:
        get_logger().warning("preempted")
        with suppress(StorageError):  # the attempt then ends with the existing checkpoints
            AttemptStore(store).announce_preemption(request.attempt_id)

    before = _on_first_sigterm(announce)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_on_sigterm() -> None:
    """Make the first SIGTERM to this process, a worker, set `told_to_leave`. The next one has its previous effect.

    Call it on the main thread, the only one that may handle signals; the trainer runs on another.
    """
    _on_first_sigterm(told_to_leave.set)


def _on_first_sigterm(action: Callable[[], None]) -> Any:
    """Call `action` at the next SIGTERM. Returns the handler of those after it, which is the present one."""
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def handle(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        action()

    signal.signal(signal.SIGTERM, handle)
    return before


@contextmanager
def following(
    store: AttemptStore, request: AttemptRequest, on_event: Callable[[AttemptEvent], None] | None
) -> Iterator[None]:
    """Call `on_event` with every event of the attempt, the last ones before the context ends.

    If the store fails, or `on_event` raises a `StorageError`, the remaining events are delivered later. If `on_event`
    raises another error, it is logged and the event skipped.
    """
    if on_event is None:
        yield
        return
    ended, cursor = threading.Event(), dict[str, int]()

    def deliver() -> bool:
        """Deliver new events; return whether all were delivered."""
        try:
            for stored in store.read_events(request.attempt_id, cursor):
                _tell(on_event, stored.event)
                cursor[stored.writer] = stored.sequence
        except StorageError as error:
            get_logger().warning("events_delayed", error=error.message)
            return False
        return True

    def follow() -> None:
        while not ended.wait(_FOLLOW_INTERVAL_S):
            deliver()
        for last in range(1, _LAST_ROUNDS + 1):
            if deliver():
                return
            if last < _LAST_ROUNDS:
                time.sleep(_FOLLOW_INTERVAL_S)
        get_logger().error("events_not_followed", after=cursor)

    follower = threading.Thread(target=copy_context().run, args=(follow,), name="events", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _tell(on_event: Callable[[AttemptEvent], None], event: AttemptEvent) -> None:
    try:
        on_event(event)
    except StorageError:
        raise
    except Exception:
        get_logger().exception("event_not_handled", type=event.type, message=event.message)
