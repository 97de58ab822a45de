"""The tracker that a spec asks for."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.specs import TrackingSpec
from swiftkv_platform.tracking.tracker import NullTracker, Tracker


def create_tracker(spec: TrackingSpec, directory: Path, *, name: str) -> Tracker:
    """The tracker that `spec` asks for, its files below `directory`; `name` is the run's display name."""
    if spec.wandb.mode == "disabled":
        return NullTracker()
    from swiftkv_platform.tracking.wandb_tracker import WandbTracker

    return WandbTracker(spec.wandb, directory, name=name)
