"""Rows of webhook deliveries. Each is stored with its event, and claimed by one process at a time.

Also rows of metric events, without their points. A job's points are stored once, in its time series, and added when
events are read; a repeated step has its newest values in every event that reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from swiftkv_platform.control_plane.access.usage import count_objects
from swiftkv_platform.control_plane.database.paging import Repository, make_row_bytes_expression, to_dataclass
from swiftkv_platform.control_plane.database.tables import (
    DELIVERED,
    FAILED,
    PENDING,
    DeliveryRow,
    EventRow,
    JobRow,
    MetricRow,
)
from swiftkv_platform.control_plane.jobs.job import Event, Job
from swiftkv_platform.limits import EVENT_POINTS
from swiftkv_platform.specs.publish import WebhookSpec

FindRecipients = Callable[[Job], Sequence[WebhookSpec]]


@dataclass(frozen=True)
class Delivery:
    """Delivery of one event to one address."""

    sequence: int
    webhook: WebhookSpec
    event: Event
    tenant: str
    job_name: str
    metadata: Mapping[str, str]
    created_at: float
    attempts: int
    """Number of failed attempts."""


def make_delivery_rows(job: Job, events: Sequence[Event], recipients: FindRecipients) -> list[DeliveryRow]:
    """Return deliveries of a job's status events, one for each webhook that wants the status."""
    told = [event for event in events if event.type == "status"]
    return [
        DeliveryRow(
            event_id=event.id,
            job_id=job.id,
            tenant=job.tenant,
            webhook=hook.model_dump(mode="json"),
            url=hook.url,
            status=PENDING,
            created_at=float(event.created_at),
            not_before=0.0,
            attempts=0,
        )
        for event in told
        for hook in recipients(job)
        if hook.includes_status(event.data["status"])
    ]


def fail_excess_deliveries(
    session: Session, deliveries: Sequence[DeliveryRow], tenant: str, max_pending: int | None
) -> None:
    """Mark new deliveries beyond `max_pending` as failed. None: no limit."""
    if max_pending is None:
        return
    room = max(max_pending - count_objects(session, "max_pending_deliveries", tenant), 0)
    for row in deliveries[room:]:
        row.status = FAILED
        row.error = f"not sent: {max_pending} deliveries of tenant {tenant!r} are pending (max_pending_deliveries)"


class Outbox(Repository):
    """Stored webhook deliveries. Every method raises `DatabaseUnavailableError`."""

    def claim(
        self, *, now: float, until: float, limit: int, excluded_origins: Collection[str] = ()
    ) -> Sequence[Delivery]:
        """Claim due deliveries, only the oldest per job and address; no other process gets them before `until`.
        `excluded_origins`: skipped origins (`https://host:port`, lower case)."""
        # 1. find the oldest due delivery per job and address  2. lock those still due, and claim them
        earlier = aliased(DeliveryRow)
        waits_for_another = (
            select(earlier.sequence)
            .where(
                earlier.status == PENDING,
                earlier.job_id == DeliveryRow.job_id,
                earlier.url == DeliveryRow.url,
                earlier.sequence < DeliveryRow.sequence,
            )
            .exists()
        )
        due = (DeliveryRow.status == PENDING, DeliveryRow.not_before <= now, ~waits_for_another)
        # The search among all pending ones comes before the transaction that writes, which it would make last longer.
        oldest = select(DeliveryRow.sequence).where(*due, *(~_is_sent_to_origin(origin) for origin in excluded_origins))
        with self._database.begin_read() as session:
            chosen = session.scalars(oldest.order_by(DeliveryRow.sequence).limit(limit)).all()
        if not chosen:
            return []
        query = (
            select(DeliveryRow, EventRow, JobRow.tenant, JobRow.spec["name"].as_string(), JobRow.labels)
            .join(EventRow, EventRow.id == DeliveryRow.event_id)
            .join(JobRow, JobRow.id == DeliveryRow.job_id)
            .where(DeliveryRow.sequence.in_(chosen), *due)
            .order_by(DeliveryRow.sequence)
            .with_for_update(skip_locked=True, of=DeliveryRow)
        )
        with self._database.begin_write() as session:
            found = []
            for row, event, tenant, job_name, labels in session.execute(query):
                row.not_before = until
                found.append(_make_delivery(row, event, tenant=tenant, job_name=job_name, metadata=labels))
            return found

    def mark_delivered(self, sequence: int, now: float) -> None:
        self._update_pending(sequence, status=DELIVERED, delivered_at=now, error=None)

    def reschedule(self, sequence: int, error: str, not_before: float) -> None:
        self._update_pending(sequence, attempts=DeliveryRow.attempts + 1, error=error, not_before=not_before)

    def mark_failed(self, sequence: int, error: str) -> None:
        self._update_pending(sequence, attempts=DeliveryRow.attempts + 1, error=error, status=FAILED)

    def count_by_status(self) -> Mapping[str, int]:
        query = select(DeliveryRow.status, func.count().label("number")).group_by(DeliveryRow.status)
        with self._database.begin_read() as session:
            found = {row.status: row.number for row in session.execute(query)}
            return {status: found.get(status, 0) for status in (PENDING, DELIVERED, FAILED)}

    def _update_pending(self, sequence: int, **values: object) -> None:
        pending = update(DeliveryRow).where(DeliveryRow.sequence == sequence, DeliveryRow.status == PENDING)
        with self._database.begin_write() as session:
            session.execute(pending.values(**values))


def _is_sent_to_origin(origin: str) -> ColumnElement[bool]:
    url = func.lower(DeliveryRow.url)
    return or_(url == origin, url.startswith(f"{origin}/", autoescape=True))


def _make_delivery(row: DeliveryRow, event: EventRow, **of_job: Any) -> Delivery:
    webhook, told = WebhookSpec.model_validate(row.webhook), to_dataclass(Event, event)
    return to_dataclass(Delivery, row, webhook=webhook, event=told, **of_job)


_POINTS_KEY = "points"
_STEPS_KEY = "steps"
"""Key of (first step, last step) of the removed metric points."""


def strip_points(event: Event, stored: Collection[int]) -> Event:
    """Return the event for the outbox: without metric points if the steps of all points are in `stored`."""
    points = event.data.get(_POINTS_KEY)
    if event.type != "metrics" or not points:
        return event
    steps = [point.get("step") for point in points]
    if not all(step in stored for step in steps):
        return event
    data = {name: value for name, value in event.data.items() if name != _POINTS_KEY}
    return replace(event, data={**data, _STEPS_KEY: [min(steps), max(steps)]})


def make_stripped_bytes_expression(job_id: str) -> ColumnElement[int]:
    """Return an SQL expression for the bytes that `restore_points` adds to an event's row."""
    # Other events may have anything as their `steps`, which could not be cast.
    lacks_points = and_(EventRow.type == "metrics", EventRow.data[_POINTS_KEY].as_string().is_(None))
    first, last = (case((lacks_points, EventRow.data[_STEPS_KEY][index].as_integer())) for index in (0, 1))
    of_event = select(func.sum(make_row_bytes_expression(MetricRow))).where(
        MetricRow.job_id == job_id, MetricRow.step.between(first, last)
    )
    return of_event.correlate(EventRow).scalar_subquery()


def restore_points(session: Session, job_id: str, events: Sequence[Event]) -> list[Event]:
    """Add the stripped metric points to a job's events, at most `EVENT_POINTS` per event."""
    points: list[Mapping[str, Any]] = []
    for first, last in _merge_ranges(event.data[_STEPS_KEY] for event in events if _lacks_points(event)):
        query = select(MetricRow).where(MetricRow.job_id == job_id, MetricRow.step.between(first, last))
        rows = session.scalars(query.order_by(MetricRow.step).limit(EVENT_POINTS.default * len(events)))
        points += [{"step": row.step, **row.values} for row in rows]
    return [_fill_points(event, points) if _lacks_points(event) else event for event in events]


def _merge_ranges(ranges: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Join overlapping or adjacent ranges (first step, last step), e.g. [(2, 3), (0, 1)] -> [(0, 3)]."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(map(tuple, ranges)):
        if merged and first <= merged[-1][1] + 1:
            before = merged.pop()
            merged.append((before[0], max(before[1], last)))
        else:
            merged.append((first, last))
    return merged


def _lacks_points(event: Event) -> bool:
    return event.type == "metrics" and _POINTS_KEY not in event.data and _STEPS_KEY in event.data


def _fill_points(event: Event, points: Sequence[Mapping[str, Any]]) -> Event:
    first, last = event.data[_STEPS_KEY]
    data = {name: value for name, value in event.data.items() if name != _STEPS_KEY}
    kept = list(islice((point for point in points if first <= point["step"] <= last), EVENT_POINTS.default))
    return replace(event, data={**data, _POINTS_KEY: kept})
