"""The tracked run of an attempt, and its loss curve. Both are kept in the object store: `swiftkv jobs wandb-sync`
uploads the run's files when the worker's disk may be deleted, and the evaluation reads the curve instead of thousands
of events.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest, Manifest
from swiftkv_platform.errors import ObjectNotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.reports.pages import STAGES, plot_evaluation, render_png
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import hash_manifest
from swiftkv_platform.storage.object_store import ObjectStore, join_object_key
from swiftkv_platform.tracking.tracker import BackgroundTracker, Table, TrackingInfo, WandbTracker

Point = Mapping[str, float]
_MAX_LOSS_CURVE_POINTS = 2048


class TrackedRun:
    """Tracked run of an attempt. Its errors do not fail the job, and only `save` and `close` block.

    Args:
        on_info: called on another thread with the run's location; retried after a `StorageError`; called again at the
            end if W&B lacks data of the run.
    """

    def __init__(
        self, store: ObjectStore, request: AttemptRequest, on_info: Callable[[TrackingInfo], None] | None = None
    ) -> None:
        spec, self._store, self._request = request.spec, store, request
        directory = Settings().home / "tracking" / request.job_id
        tracker = WandbTracker(spec.tracking.wandb, directory, name=spec.name)
        self._report_info = partial(_try_to_report_run, on_info or (lambda _info: None))
        self._tracker = BackgroundTracker(tracker, on_info=self._report_info)
        self._tracker.start(request.run_id, spec.model_dump(mode="json"))

    @property
    def info(self) -> TrackingInfo | None:
        return self._tracker.info

    def log(self, point: Mapping[str, float], step: int) -> None:
        self._tracker.log(point, step)

    def log_report(self, report: Mapping[str, Any], step: int) -> None:
        """Log the figures, tables and charts of an evaluation, after the optimizer step `step`."""
        images = {name: render_png(chart) for name, chart in plot_evaluation(report).items()}
        self._tracker.log_report({"evaluation": report}, _build_tables(report), images, step + 1)

    def log_artifact(self, manifest: Manifest) -> None:
        uri = join_object_key(self._store.uri, self._request.attempt_id.artifact_prefix)
        self._tracker.log_artifact(self._request.spec.name, uri, hash_manifest(manifest))

    def save(self) -> None:
        """Upload the recorded files. If the store is unavailable, the next call uploads them."""
        files = self._tracker.files
        if files is None:
            return
        try:
            for path in sorted(files.rglob("*")):
                if path.is_file():
                    name = path.relative_to(files).as_posix()
                    self._store.upload_file(path, join_object_key(self._make_upload_prefix(files), name))
        except (StorageError, OSError) as error:
            get_logger().warning("tracking_files_upload_delayed", error=str(error))

    def close(self) -> None:
        """End the run in this process, and save its files unless W&B has all of them."""
        self._tracker.finish()
        files, info = self._tracker.files, self._tracker.info
        if info is not None and info.mode == "online" and not self._tracker.uploaded:
            self._report_info(replace(info, fault="W&B did not confirm the end of the run"))
        if files is None or not self._tracker.uploaded:
            self.save()
            return
        try:
            self._store.delete_prefix(self._make_upload_prefix(files))
        except StorageError as error:  # they are deleted with the job's other tracking files
            get_logger().warning("tracking_files_not_deleted", error=str(error))

    def _make_upload_prefix(self, directory: Path) -> str:
        return join_object_key(self._request.attempt_id.tracking_prefix, directory.name)


def _try_to_report_run(on_info: Callable[[TrackingInfo], None], info: TrackingInfo) -> bool:
    """Call `on_info`; return whether it succeeded."""
    try:
        on_info(info)
    except StorageError as error:
        get_logger().warning("tracking_location_delayed", error=error.message)
        return False
    return True


def _build_tables(report: Mapping[str, Any]) -> dict[str, Table]:
    stages = [("teacher", report["teacher"]["perplexity"], 0.0, 1.0)]
    stages += [
        (name, report[name]["perplexity"], report[name]["kl"], report[name]["top1_agreement"])
        for name in STAGES
        if report.get(name) is not None
    ]
    tables = {"quality": Table(("model", "perplexity", "kl", "top1_agreement"), tuple(stages))}
    if report["tasks"]:
        columns = ("task", "metric", "num_fewshot", "num_samples", "teacher", "student")
        tables["task_scores"] = Table(columns, tuple(tuple(task[name] for name in columns) for task in report["tasks"]))
    return tables


class LossCurve:
    """Loss curve of an attempt, thinned to the points of a chart. Steps do not wait for the store. Thread-safe."""

    def __init__(self, store: ObjectStore, attempt: AttemptId) -> None:
        self._store = store
        self._attempt = attempt
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._every = 1
        """Steps between points."""
        self._last: Point | None = None

    def resume(self, step: int) -> None:
        """Continue the stored curve of this attempt after `step`, if there is a readable one."""
        try:
            stored = _read_stored_curve(self._store, self._attempt)
        except StorageError as error:
            get_logger().warning("loss_curve_restarted", step=step, error=error.message)
            return
        with self._lock:
            self._points = [point for point in stored if point["step"] <= step]
            self._halve_points()

    def add_point(self, point: Point) -> None:
        """Add the losses of a step. A long run keeps only every second, fourth, ... step, and always the last one."""
        losses = {key: value for key, value in point.items() if key in ("step", "tokens", "loss") or "_loss" in key}
        with self._lock:
            self._last = losses
            if losses["step"] % self._every == 0:
                self._points.append(losses)
                self._halve_points()

    def save(self) -> None:
        with self._lock:
            points = list(self._points)
            if self._last is not None and (not points or points[-1] is not self._last):
                points.append(self._last)
        try:
            self._store.put_bytes(self._attempt.curve_key, json.dumps(points).encode())
        except StorageError as error:
            get_logger().warning("loss_curve_upload_delayed", num_points=len(points), error=error.message)

    def _halve_points(self) -> None:
        while len(self._points) > _MAX_LOSS_CURVE_POINTS:
            self._every *= 2
            self._points = [point for point in self._points if point["step"] % self._every == 0]


def read_loss_curve(store: ObjectStore, attempts: Iterable[AttemptId]) -> list[Point]:
    """Join the curves of a job's attempts, given in order. Where they overlap, the later attempt wins."""
    points: list[Point] = []
    for attempt in attempts:
        later = _read_stored_curve(store, attempt)
        if later:
            points = [point for point in points if point["step"] < later[0]["step"]] + later
    return points


def _read_stored_curve(store: ObjectStore, attempt: AttemptId) -> list[Point]:
    try:
        points: list[Point] = json.loads(store.get_bytes(attempt.curve_key))
    except ObjectNotFoundError:
        return []
    return points
