"""Control of an attempt from outside: to pause, or to save before its machines go. Stop requests are objects in the
store, or SIGTERM: the driver's becomes such an object, a worker's is kept in its process. Knows no Ray Train.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.errors import StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore

LOOK_INTERVAL_S = 1.0
"""Seconds between looks for control objects."""
_told_to_leave = threading.Event()
"""SIGTERM flag of this process, a worker."""


def look(store: ObjectStore, request: AttemptRequest) -> StopRequest:
    """Read the stop request for an attempt from the store; `NONE` while it is away."""
    attempts = AttemptStore(store)
    try:
        if attempts.pause_requested(request.attempt_id):
            return StopRequest.PAUSE
        return StopRequest.STOP if attempts.preemption_announced(request.attempt_id) else StopRequest.NONE
    except StorageError as error:
        get_logger().warning("control_unreadable", error=error.message)
        return StopRequest.NONE


class ControlWatcher:
    """Looks for control objects of an attempt, on a thread of its own, so that no step waits for the store."""

    def __init__(self, store: ObjectStore, request: AttemptRequest, *, interval_s: float = LOOK_INTERVAL_S) -> None:
        self._store = store
        self._request = request
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._stop_request = StopRequest.NONE
        self._thread = threading.Thread(target=self._watch, name="control", daemon=True)
        self._thread.start()

    @property
    def stop_request(self) -> StopRequest:
        return self._stop_request

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._stop_request = max(self._stop_request, look(self._store, self._request))


@contextmanager
def checkpoint_on_sigterm(store: ObjectStore, request: AttemptRequest) -> Iterator[None]:
    """The first SIGTERM asks the workers for a checkpoint, after which they end; the next one does what it did before.

    Elsewhere than on the main thread, which alone may handle signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def announce(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        get_logger().warning("preempted")
        with suppress(StorageError):  # the attempt then ends with the checkpoints there are
            AttemptStore(store).announce_preemption(request.attempt_id)

    signal.signal(signal.SIGTERM, announce)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_on_sigterm() -> None:
    """The first SIGTERM to this process, a worker, makes `told_to_leave` true; the next one does what it did before.

    Called on the main thread, which alone may handle signals; the trainer runs on another.
    """
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def note(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        _told_to_leave.set()

    signal.signal(signal.SIGTERM, note)


def told_to_leave() -> bool:
    return _told_to_leave.is_set()
