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
    """Reason that the tracker lacks what it was to be given."""


@dataclass(frozen=True)
class Table:
    """A table for people to sort and compare."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


class Tracker(Protocol):
    """One run: `start`, any number of records, `finish`. Used by one process and thread."""

    @property
    def info(self) -> TrackingInfo | None:
        """Run at the tracker; None before `start`, and while nothing is recorded."""

    @property
    def files(self) -> Path | None:
        """Directory that the run is recorded in, also after `finish`; None where there is none."""

    @property
    def uploaded(self) -> bool:
        """Whether the tracker has taken everything, so that `files` need not be kept; False before `finish`."""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin the run, or go on with it: every attempt of a job starts the same `run_id`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of an optimizer step."""

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        """Record final figures, tables and PNG images, at a step after the last one trained."""

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        """Record where the model is; nothing is copied."""

    def finish(self) -> None:
        """Hand everything over."""


class NullTracker:
    """Records nothing."""

    info: TrackingInfo | None = None
    files: Path | None = None
    uploaded = False

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin nothing."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record nothing."""

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        """Record nothing."""

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        """Record nothing."""

    def finish(self) -> None:
        """Hand over nothing."""
