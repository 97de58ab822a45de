"""What a run tells an experiment tracker. Tracking is a convenience: no method of a tracker ever fails a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from swiftkv_platform.specs import TrackingSpec


@dataclass(frozen=True)
class TrackingInfo:
    """Where the run can be looked at; the `data` of an attempt's `tracking` event."""

    provider: Literal["wandb"]
    run_id: str
    mode: Literal["online", "offline"]
    url: str | None
    """Page of the run; None offline."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tracker(Protocol):
    """One run: `start`, any number of `log`, `finish`. Used by one process and thread."""

    @property
    def info(self) -> TrackingInfo | None:
        """None before `start`, and while nothing is recorded."""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin the run, or go on with it: every attempt of a job starts the same `run_id`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of an optimizer step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Record the final figures and hand everything over."""


class NullTracker:
    """Records nothing."""

    @property
    def info(self) -> TrackingInfo | None:
        return None

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Nothing to begin."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Nothing to record."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing to hand over."""


def create_tracker(spec: TrackingSpec, directory: Path, *, name: str) -> Tracker:
    """The tracker that `spec` asks for, its files below `directory`; `name` is the run's display name."""
    if spec.wandb.mode == "disabled":
        return NullTracker()
    from swiftkv_platform.tracking.wandb_tracker import WandbTracker

    return WandbTracker(spec.wandb, directory, name=name)
