"""A tracker behind a bounded queue, so that callers do not wait except in `finish`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

from swiftkv_platform.logs import get_logger
from swiftkv_platform.tracking.tracker import Table, Tracker, TrackingInfo

_MOST_WAITING = 10_000
_TELL_AGAIN_S = 5.0


class BackgroundTracker:
    """Makes the calls of a tracker in order, on its own thread.

    Args:
        on_info: called on that thread with the run's location, once it is known; retried every few seconds while it
            returns False.
        most_waiting: size of the queue. Further calls are dropped, and counted in one warning.
        finish_s: seconds that `finish` waits for earlier calls.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        on_info: Callable[[TrackingInfo], bool] = lambda _: True,
        most_waiting: int = _MOST_WAITING,
        finish_s: float = 90.0,
    ) -> None:
        self._tracker = tracker
        self._on_info = on_info
        self._finish_s = finish_s
        self._calls: Queue[Callable[[], None] | None] = Queue(most_waiting)
        self._dropped = 0
        self._told = False
        self._tell_at = 0.0
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="tracking", daemon=True)
        self._thread.start()

    @property
    def info(self) -> TrackingInfo | None:
        return self._tracker.info

    @property
    def files(self) -> Path | None:
        return self._tracker.files

    @property
    def uploaded(self) -> bool:
        return self._tracker.uploaded

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        self._put(partial(self._tracker.start, run_id, config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._put(partial(self._tracker.log, dict(metrics), step))

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        self._put(partial(self._tracker.log_report, summary, tables, images, step))

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        self._put(partial(self._tracker.log_artifact, name, uri, digest))

    def finish(self) -> None:
        """Wait until all calls are made, at most `finish_s` seconds. The thread ends with its process."""
        deadline = time.monotonic() + self._finish_s
        try:
            self._calls.put(self._tracker.finish, timeout=self._finish_s)
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except Full:
            pass  # logged below
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            get_logger().warning("tracking_unfinished", waited_s=self._finish_s, num_calls=self._calls.qsize())
        if self._dropped:
            get_logger().warning("tracking_dropped", num_calls=self._dropped)

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._dropped += 1

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=None if self._told or self.info is None else _TELL_AGAIN_S)
            except Empty:
                self._tell()
                continue
            if call is None:
                return
            try:
                call()
            except Exception:  # no failure of tracking may end the thread, which `finish` waits for
                get_logger().exception("tracking_failed")
            self._tell()

    def _tell(self) -> None:
        info = self.info
        if self._told or info is None or time.monotonic() < self._tell_at:
            return
        self._told = self._on_info(info)
        self._tell_at = time.monotonic() + _TELL_AGAIN_S
