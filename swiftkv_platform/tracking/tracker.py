"""Interface of a run to an experiment tracker. Tracking is a convenience: no method of a tracker ever fails a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class TrackingInfo:
    """Location of the run at the tracker; the `data` of an attempt's `tracking` event."""

    provider: Literal["wandb"]
    run_id: str
    mode: Literal["online", "offline"]
    url: str | None
    """Page of the run; None offline."""
    fault: str | None = None
    """Reason why data is missing at the tracker."""


@dataclass(frozen=True)
class Table:
    """Table of results to sort and compare in the tracker."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


class Tracker(Protocol):
    """One run: `start`, any number of records, `finish`. Used by one process and thread."""

    @property
    def info(self) -> TrackingInfo | None:
        """Location of the run; None before `start`, and if nothing is being recorded."""

    @property
    def files(self) -> Path | None:
        """Directory where the run is recorded, also after `finish`; None if there is none."""

    @property
    def uploaded(self) -> bool:
        """Whether the tracker has taken everything, so that `files` need not be kept; False before `finish`."""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Start the run or resume it: every attempt of a job has the same `run_id`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of an optimizer step."""

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        """Record final figures, tables and PNG images, at a step after the last trained one."""

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        """Record the location of the model; nothing is copied."""

    def finish(self) -> None:
        """Send everything that is left."""


class NullTracker:
    """Records nothing."""

    info: TrackingInfo | None = None
    files: Path | None = None
    uploaded = False

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Do nothing."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing."""

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        """Do nothing."""

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
