"""Webhooks of a job's changes: allowed addresses, signing secrets, and delivery from the outbox until it succeeds.

A change and its deliveries are stored in one transaction, so none is forgotten; a process that dies after sending may
send again. Receivers recognize repetitions by `webhook-id`, the event's id. Deliveries of one job to one address are
sent in order. Deliveries to different receivers do not wait for each other.

Messages are signed as in standardwebhooks.com, version 1: the header `webhook-signature` is `v1,` and the base64 of
HMAC-SHA256 over `{id}.{timestamp}.{body}`. The timestamp is signed, so receivers can refuse old messages.

Rows of metric events are stored without their points. A job's points are stored once, in its time series, and added
when events are read; a repeated step has its newest values in every event that reports it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from sqlalchemy import ColumnElement, and_, case, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.access.usage import count_objects
from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.database.session import Repository, make_row_bytes_expression, to_dataclass
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
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.limits import EVENT_POINTS
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.names import matches_origin
from swiftkv_platform.specs.job import WebhookSpec

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


def strip_metric_points(event: Event, stored: Collection[int]) -> Event:
    """Return the event for the outbox: without metric points if the steps of all points are in `stored`."""
    points = event.data.get(_POINTS_KEY)
    if event.type != "metrics" or not points:
        return event
    steps = [point.get("step") for point in points]
    if not all(step in stored for step in steps):
        return event
    data = {name: value for name, value in event.data.items() if name != _POINTS_KEY}
    return replace(event, data={**data, _STEPS_KEY: [min(steps), max(steps)]})


def make_restored_points_bytes_expression(job_id: str) -> ColumnElement[int]:
    """Return an SQL expression for the bytes that `restore_metric_points` adds to an event's row."""
    # Other events may have anything as their `steps`, which could not be cast.
    lacks_points = and_(EventRow.type == "metrics", EventRow.data[_POINTS_KEY].as_string().is_(None))
    first, last = (case((lacks_points, EventRow.data[_STEPS_KEY][index].as_integer())) for index in (0, 1))
    of_event = select(func.sum(make_row_bytes_expression(MetricRow))).where(
        MetricRow.job_id == job_id, MetricRow.step.between(first, last)
    )
    return of_event.correlate(EventRow).scalar_subquery()


def restore_metric_points(session: Session, job_id: str, events: Sequence[Event]) -> list[Event]:
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


_ID_HEADER = "webhook-id"
_TIMESTAMP_HEADER = "webhook-timestamp"
_SIGNATURE_HEADER = "webhook-signature"
_SIGNATURE_VERSION = "v1"
_BASE64_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 16


class Secret:
    """A signing secret, hidden in `repr`."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def parse(cls, text: str, *, name: str) -> Self:
        """Parse a secret file: `whsec_` and base64, or plain text.

        Raises `InvalidInputError`, without the secret's value, if it is invalid or too short.
        """
        text = text.strip()
        try:
            value = (
                base64.b64decode(text.removeprefix(_BASE64_PREFIX), validate=True)
                if text.startswith(_BASE64_PREFIX)
                else None
            )
        except binascii.Error as error:
            raise InvalidInputError(
                f"secret {name!r} is not base64 after {_BASE64_PREFIX!r}", field="secret_ref"
            ) from error
        value = text.encode() if value is None else value
        if len(value) < _MIN_SECRET_BYTES:
            raise InvalidInputError(
                f"secret {name!r} has {len(value)} bytes; use {_MIN_SECRET_BYTES} or more",
                field="secret_ref",
                value=name,
            )
        return cls(value)

    def __repr__(self) -> str:
        return "Secret(...)"

    def sign(self, message_id: str, timestamp: int, body: bytes) -> str:
        """Return the `webhook-signature` header of a message."""
        signed = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.new(self._value, signed, hashlib.sha256).digest()
        return f"{_SIGNATURE_VERSION},{base64.b64encode(digest).decode()}"


def make_recipient_finder(policies: TenantPolicies) -> FindRecipients:
    """Return a function that returns the webhooks of a job: from the job's spec and from the tenant's policy."""

    def find(job: Job) -> Sequence[WebhookSpec]:
        found = [job.spec.webhook, policies.get(job.tenant).webhook]
        return list({hook.url: hook for hook in found if hook is not None}.values())

    return find


@dataclass(frozen=True)
class WebhookRules:
    """Allowed webhook addresses and their signing secrets."""

    origins: Sequence[str] = ()
    """`https://host`, `https://*.domain` or `http://host:port`; without any, webhooks are refused."""
    secrets_dir: Path | None = None
    """Secrets as files `{tenant}/{name}`, such as a mounted Kubernetes secret."""

    def get_secret(self, webhook: WebhookSpec, tenant: str) -> Secret:
        """Return the webhook's signing secret. Raises `InvalidInputError` for an address that is not allowed, or a
        missing or invalid secret. Messages never contain the secret."""
        if not any(matches_origin(webhook.url, allowed) for allowed in self.origins):
            opened = ", ".join(self.origins) or "none (SWIFTKV_WEBHOOK_ORIGINS)"
            raise InvalidInputError.for_field(
                "webhook.url", webhook.url, f", which the operator does not allow; allowed origins are: {opened}"
            )
        name = webhook.secret_ref
        where = f"tenant {tenant!r} has no secret {name!r}"
        if self.secrets_dir is None:
            message = f"{where}: SWIFTKV_SECRETS_DIR is not set on the control plane"
            raise InvalidInputError(message, field="webhook.secret_ref", value=name)
        try:
            text = (self.secrets_dir / tenant / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{where}; ask the operator to create the file {tenant}/{name} below SWIFTKV_SECRETS_DIR"
            raise InvalidInputError(message, field="webhook.secret_ref", value=name) from error
        return Secret.parse(text, name=name)


def make_webhook_rules(settings: Settings) -> WebhookRules:
    return WebhookRules(settings.webhook_origins, settings.secrets_dir)


SendRequest = Callable[[str, Mapping[str, str], bytes], int]
"""(url, headers, body) -> HTTP status. Raises `OSError` without a response."""

_MIN_DELAY_S = 5.0
_MAX_DELAY_S = 3600.0
_MAX_AGE_S = 24 * 3600.0
_CLAIM_TIMEOUT_S = 60.0
"""Seconds of a claim, during which no other control plane sends the delivery; longer than a request may take."""
_MAX_CONCURRENT = 32
"""Max concurrent deliveries."""
_MAX_PER_ORIGIN = 4

_TOTAL_TIMEOUT_S = 15.0
"""Max seconds for connecting, writing and reading together, so that a receiver cannot stretch them byte by byte."""
_STEP_TIMEOUTS = httpx.Timeout(10.0, connect=5.0)
"""Timeouts of each step of a request."""


def send_webhook(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """Send a webhook and return the HTTP status. Follows no redirects, uses no proxy from the environment, and reads
    no body. Raises `ConnectionError` without a response in time."""
    try:
        return asyncio.run(_send(url, headers, body))
    except (httpx.HTTPError, TimeoutError) as error:
        raise ConnectionError(type(error).__name__) from error


async def _send(url: str, headers: Mapping[str, str], body: bytes) -> int:
    sent = {"Content-Type": "application/json", "User-Agent": "swiftkv-platform", **headers}
    async with (
        asyncio.timeout(_TOTAL_TIMEOUT_S),
        httpx.AsyncClient(timeout=_STEP_TIMEOUTS, follow_redirects=False, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=sent) as response,
    ):
        return response.status_code


def _get_origin(url: str) -> str:
    """Return scheme, host and port of a URL in lower case."""
    parts = urlsplit(url.lower())
    return f"{parts.scheme}://{parts.netloc}"


class WebhookDeliverer:
    """Sends due deliveries, each in its own thread.

    A tick starts deliveries and does not wait for them: up to `_MAX_CONCURRENT`, and up to `_MAX_PER_ORIGIN` to one
    origin.
    """

    def __init__(self, outbox: Outbox, rules: WebhookRules, send: SendRequest, clock: Clock) -> None:
        self._outbox = outbox
        self._rules = rules
        self._send = send
        self._clock = clock
        self._log = get_logger(loop="webhooks")
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT, thread_name_prefix="webhook")
        self._active: Counter[str] = Counter()
        """Active deliveries by origin."""
        self._changed = threading.Condition()

    def tick(self) -> None:
        """Start due deliveries. Raises `DatabaseUnavailableError`."""
        while (full := self._find_full_origins()) is not None:
            now = self._clock()
            # One at a time: each claim decides whether its receiver has room for another.
            claimed = self._outbox.claim(now=now, until=now + _CLAIM_TIMEOUT_S, limit=1, excluded_origins=full)
            if not claimed:
                return
            [delivery] = claimed
            receiver = _get_origin(delivery.webhook.url)
            with self._changed:
                self._active[receiver] += 1
            self._pool.submit(self._run_delivery, delivery, receiver)

    def wait_until_idle(self) -> None:
        """Wait until no delivery is active."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active.total())

    def close(self) -> None:
        """Finish active deliveries within their timeouts, and start no new delivery."""
        self._pool.shutdown()

    def _find_full_origins(self) -> Sequence[str] | None:
        """Return the origins at their limit of active deliveries; None if the total limit is reached."""
        with self._changed:
            if self._active.total() >= _MAX_CONCURRENT:
                return None
            return [origin for origin, count in self._active.items() if count >= _MAX_PER_ORIGIN]

    def _run_delivery(self, delivery: Delivery, receiver: str) -> None:
        """Send a delivery and store its outcome in the outbox."""
        try:
            self._store_outcome(delivery, self._deliver(delivery))
        except DatabaseUnavailableError as error:
            # Nothing is lost: the claim runs out, and the delivery is sent again.
            self._log.warning("webhook outcome not stored", event_id=delivery.event.id, reason=error.message)
        finally:
            with self._changed:
                self._active[receiver] -= 1
                self._active += Counter()  # drops origins that have none left
                self._changed.notify_all()

    def _deliver(self, delivery: Delivery) -> str | None:
        """Send a delivery. Returns None on success, else the problem, without content from the receiver."""
        try:
            secret = self._rules.get_secret(delivery.webhook, delivery.tenant)
            body, timestamp = _make_body(delivery), int(self._clock())
            headers = {
                _ID_HEADER: delivery.event.id,
                _TIMESTAMP_HEADER: str(timestamp),
                _SIGNATURE_HEADER: secret.sign(delivery.event.id, timestamp, body),
            }
            status = self._send(delivery.webhook.url, headers, body)
        except InvalidInputError as error:
            return error.message
        except OSError as error:
            return f"no response: {error or type(error).__name__}"
        except Exception:
            self._log.exception("unexpected error", job_id=delivery.event.job_id, event_id=delivery.event.id)
            return "not sent: unexpected error; see the control plane's log"
        return None if 200 <= status < 300 else f"receiver returned HTTP {status}"

    def _store_outcome(self, delivery: Delivery, problem: str | None) -> None:
        # delivered, too old to retry, or retried with exponential backoff
        now, log = self._clock(), self._log.bind(job_id=delivery.event.job_id, event_id=delivery.event.id)
        if problem is None:
            self._outbox.mark_delivered(delivery.sequence, now)
        elif now - delivery.created_at > _MAX_AGE_S:
            log.error("webhook failed; no further retries", reason=problem, attempts=delivery.attempts + 1)
            self._outbox.mark_failed(delivery.sequence, problem)
        else:
            delay = min(_MIN_DELAY_S * 2.0 ** min(delivery.attempts, 16), _MAX_DELAY_S)
            log.warning("webhook not delivered", reason=problem, retry_in_s=delay)
            self._outbox.reschedule(delivery.sequence, problem, now + delay)


def _make_body(delivery: Delivery) -> bytes:
    """Return the body of a delivery. It is the same in every attempt, since events never change."""
    event = delivery.event
    document: dict[str, Any] = {
        "type": f"distillation.job.{event.data['status']}",
        "timestamp": event.created_at,
        "data": {
            **event.data,
            "id": event.id,
            "job_id": event.job_id,
            "name": delivery.job_name,
            "tenant": delivery.tenant,
            "metadata": dict(delivery.metadata),
            "message": event.message,
        },
    }
    return json.dumps(document, separators=(",", ":")).encode()
