"""Losses of a run by step, thinned to what a chart shows: one object of an attempt, so that an evaluation need not read
thousands of events. Knows no chart.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.errors import ObjectNotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.object_store import ObjectStore

Point = Mapping[str, float]

_MOST_POINTS = 2048


class Curve:
    """The curve of an attempt while it trains. A step waits for no store. Thread-safe."""

    def __init__(self, store: ObjectStore, attempt: AttemptId) -> None:
        self._store = store
        self._attempt = attempt
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._every = 1
        """Steps between points that are kept."""
        self._last: Point | None = None

    def begin(self, step: int) -> None:
        """Go on after `step` with what workers of this attempt have drawn so far, if they have and it can be read."""
        try:
            drawn = _stored(self._store, self._attempt)
        except StorageError as error:
            get_logger().warning("curve_begins_anew", step=step, error=error.message)
            return
        with self._lock:
            self._points = [point for point in drawn if point["step"] <= step]
            self._thin()

    def add(self, point: Point) -> None:
        """Keep the losses of a step, or of every second, fourth, ... one of a long run; the last one always."""
        losses = {key: value for key, value in point.items() if key in ("step", "tokens", "loss") or "_loss" in key}
        with self._lock:
            self._last = losses
            if losses["step"] % self._every == 0:
                self._points.append(losses)
                self._thin()

    def save(self) -> None:
        with self._lock:
            points = list(self._points)
            if self._last is not None and (not points or points[-1] is not self._last):
                points.append(self._last)
        try:
            self._store.put_bytes(self._attempt.curve_key, json.dumps(points).encode())
        except StorageError as error:
            get_logger().warning("curve_delayed", num_points=len(points), error=error.message)

    def _thin(self) -> None:
        while len(self._points) > _MOST_POINTS:
            self._every *= 2
            self._points = [point for point in self._points if point["step"] % self._every == 0]


def read_curve(store: ObjectStore, attempts: Iterable[AttemptId]) -> list[Point]:
    """The curve of a job's attempts, the first try first: steps that a later one repeats are its own."""
    points: list[Point] = []
    for attempt in attempts:
        later = _stored(store, attempt)
        if later:
            points = [point for point in points if point["step"] < later[0]["step"]] + later
    return points


def _stored(store: ObjectStore, attempt: AttemptId) -> list[Point]:
    try:
        points: list[Point] = json.loads(store.get_bytes(attempt.curve_key))
    except ObjectNotFoundError:
        return []
    return points
