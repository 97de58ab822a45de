"""Rules on how long the data of jobs is kept. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swiftkv_platform.settings import Settings

DAY_S = 86400.0
SWEEPER = "retention"
"""Author of deletions that no request caused."""


class Kind(StrEnum):
    """Kinds of an ended job's data that are removed, while the job's own record stays."""

    EVENTS = "events"
    METRICS = "metrics"
    EVENT_OBJECTS = "event_objects"
    PREPARED_DATA = "prepared_data"
    CHECKPOINTS = "checkpoints"
    LOGS = "logs"
    TRACKING = "tracking"

    @property
    def bit(self) -> int:
        """Bit that marks the kind as removed in a job's row. It is stored, so the order of kinds must not change."""
        return 1 << list(Kind).index(self)


@dataclass(frozen=True)
class Retention:
    """Days for which data is kept; 0 keeps it for ever."""

    ended_jobs: Mapping[Kind, float] = field(default_factory=dict)
    """Days from a job's end, by kind of data."""
    metric_points: int = 500
    """Points that remain of a job's time series once `Kind.METRICS` is due."""
    deliveries: float = 0.0
    """Days from the creation of a webhook's delivery, once it is delivered or given up."""
    idempotency_keys: float = 0.0
    """Days from the submission of the key's job."""
    promotions: float = 0.0
    """Days of history of an alias; models that it can be rolled back to stay longer."""
    rollbacks: int = 5
    """Models, including the present one, that stay in the history of an alias however old they are."""
    audit: float = 0.0
    """Days from an entry of the audit trail."""
    models: float = 0.0
    """Days from the creation of a newer model of the same name."""
    jobs: float = 0.0
    """Days from a job's end to the removal of its record."""

    def days(self, kind: Kind) -> float:
        return self.ended_jobs.get(kind, 0.0)


@dataclass(frozen=True)
class Swept:
    """Amount of one kind of data that was removed, or would be."""

    kind: str
    rows: int = 0
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(self.kind, self.rows + other.rows, self.objects + other.objects, self.bytes + other.bytes)


@dataclass(frozen=True)
class Counts:
    """Size of database and store when they were last counted."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """By table."""
    objects: Mapping[str, int] = field(default_factory=dict)
    """By kind of object."""
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectBatch:
    """Totals of a batch of objects below a prefix."""

    objects: int
    bytes: int
    next: str | None
    """Key to continue after; None if there are no more."""


def retention(settings: Settings) -> Retention:
    """Return the retention that the settings configure."""
    days = ("deliveries", "idempotency_keys", "promotions", "audit", "models", "jobs")
    return Retention(
        ended_jobs={kind: getattr(settings, f"retention_{kind}_days") for kind in Kind},
        metric_points=settings.retention_metric_points,
        rollbacks=settings.retention_rollbacks,
        **{name: getattr(settings, f"retention_{name}_days") for name in days},
    )
