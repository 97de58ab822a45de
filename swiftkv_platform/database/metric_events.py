"""Events of metrics as rows: their points are stored once, in the job's time series, and put back when they are read.

A step that was repeated after a restart has its newest values in every event that tells of it, and an event whose
points have been thinned out tells of those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.database.tables import PointRow
from swiftkv_platform.orchestration.job import Event

_POINTS = "points"
_STEPS = "steps"
"""First and last step of the points that were left out."""


def without_points(event: Event, stored: Collection[int]) -> Event:
    """The event as its row holds it: without points whose steps are all `stored` with it."""
    points = event.data.get(_POINTS)
    if event.type != "metrics" or not points:
        return event
    steps = [point.get("step") for point in points]
    if not all(step in stored for step in steps):
        return event
    data = {name: value for name, value in event.data.items() if name != _POINTS}
    return replace(event, data={**data, _STEPS: [min(steps), max(steps)]})


def with_points(session: Session, job_id: str, events: Sequence[Event]) -> list[Event]:
    """The events of a job as they were told."""
    ranges = [event.data[_STEPS] for event in events if _lacks_points(event)]
    if not ranges:
        return list(events)
    first, last = min(steps[0] for steps in ranges), max(steps[1] for steps in ranges)
    query = select(PointRow).where(PointRow.job_id == job_id, PointRow.step.between(first, last))
    rows = session.scalars(query.order_by(PointRow.step)).all()
    points = [{"step": row.step, **row.values} for row in rows]
    return [_filled(event, points) if _lacks_points(event) else event for event in events]


def _lacks_points(event: Event) -> bool:
    return event.type == "metrics" and _POINTS not in event.data and _STEPS in event.data


def _filled(event: Event, points: Sequence[Mapping[str, Any]]) -> Event:
    first, last = event.data[_STEPS]
    data = {name: value for name, value in event.data.items() if name != _STEPS}
    return replace(event, data={**data, _POINTS: [point for point in points if first <= point["step"] <= last]})
