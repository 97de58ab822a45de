"""The tracked run of a process of an attempt, and its files in the object store: a worker's disk may be gone when
what W&B has not taken is to be synced (`swiftkv jobs wandb-sync`). Knows no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.errors import StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.reports.charts import as_png
from swiftkv_platform.reports.pages import STAGES, evaluation_charts
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.object_store import ObjectStore, join_key
from swiftkv_platform.tracking.background import BackgroundTracker
from swiftkv_platform.tracking.tracker import Table, TrackingInfo
from swiftkv_platform.tracking.wandb_tracker import create_tracker


class TrackedRun:
    """Tracked run of an attempt, begun or continued. Its errors do not fail the job, and only `save` and `close` wait.

    Args:
        on_info: told, on another thread, where the run is; again some seconds later after a `StorageError`.
    """

    def __init__(
        self, store: ObjectStore, request: AttemptRequest, on_info: Callable[[TrackingInfo], None] | None = None
    ) -> None:
        spec, self._store, self._request = request.spec, store, request
        directory = Settings().home / "tracking" / request.job_id
        tracker = create_tracker(spec.tracking, directory, name=spec.name)
        self._tracker = BackgroundTracker(tracker, on_info=partial(_told, on_info or _ignore))
        self._tracker.start(request.run_id, spec.model_dump(mode="json"))

    @property
    def info(self) -> TrackingInfo | None:
        return self._tracker.info

    def log(self, point: Mapping[str, float], step: int) -> None:
        self._tracker.log(point, step)

    def log_report(self, report: Mapping[str, Any], step: int) -> None:
        """An evaluation's figures, tables and plots, after the optimizer step `step`."""
        images = {name: as_png(chart) for name, chart in evaluation_charts(report).items()}
        self._tracker.log_report({"evaluation": report}, _tables(report), images, step + 1)

    def log_artifact(self, manifest: Manifest) -> None:
        uri = join_key(self._store.uri, self._request.attempt_id.artifact_prefix)
        self._tracker.log_artifact(self._request.spec.name, uri, manifest_digest(manifest))

    def save(self) -> None:
        """Upload what the run has recorded so far; while the store is away it stays for the next time."""
        files = self._tracker.files
        if files is None:
            return
        try:
            for path in sorted(files.rglob("*")):
                if path.is_file():
                    self._store.upload_file(path, join_key(self._prefix(files), path.relative_to(files).as_posix()))
        except (StorageError, OSError) as error:
            get_logger().warning("tracking_files_delayed", error=str(error))

    def close(self) -> None:
        """End the run in this process, and save its files unless W&B has everything."""
        self._tracker.finish()
        files = self._tracker.files
        if files is None or not self._tracker.uploaded:
            self.save()
            return
        try:
            self._store.delete_prefix(self._prefix(files))
        except StorageError as error:  # they go with the job's other tracking files
            get_logger().warning("tracking_files_left", error=str(error))

    def _prefix(self, files: Path) -> str:
        return join_key(self._request.attempt_id.tracking_prefix, files.name)


def _ignore(_info: TrackingInfo) -> None:
    """Tell nothing."""


def _told(on_info: Callable[[TrackingInfo], None], info: TrackingInfo) -> bool:
    """Whether `on_info` could say where the run is."""
    try:
        on_info(info)
    except StorageError as error:
        get_logger().warning("tracking_told_later", error=error.message)
        return False
    return True


def _tables(report: Mapping[str, Any]) -> dict[str, Table]:
    stages = [("teacher", report["teacher"]["perplexity"], 0.0, 1.0)]
    stages += [
        (name, report[name]["perplexity"], report[name]["kl"], report[name]["top1_agreement"])
        for name in STAGES
        if report[name] is not None
    ]
    tables = {"quality": Table(("model", "perplexity", "kl", "top1_agreement"), tuple(stages))}
    if report["tasks"]:
        columns = ("task", "metric", "num_fewshot", "num_samples", "teacher", "student")
        tables["task_scores"] = Table(columns, tuple(tuple(task[name] for name in columns) for task in report["tasks"]))
    return tables
