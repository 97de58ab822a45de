"""Removal of data that is kept no longer, in bounded steps, and counts of what is stored.

First a row records the removal, then the objects are removed, then the row: each step may be repeated, by this process
after a crash or by another one at the same time.

    ended jobs: the data of a kind ─▶ the job's mark
    deleted jobs and models: their rows, replaced by a `deletions` row ─▶ their objects ─▶ the `deletions` row
    interrupted imports: a `deletions` row that is due in a day, unless the model is registered ─▶ as above
    captured traffic: what exceeds a deployment's settings, deleted rows, all of deployments without capture
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Select, String, cast, delete, func, insert, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from swiftkv_platform.contract.attempts import MANIFEST, attempts_prefix, trials_prefix
from swiftkv_platform.contract.traffic import TRAFFIC_PREFIX, make_traffic_prefix
from swiftkv_platform.control_plane.base import Clock, is_due
from swiftkv_platform.control_plane.database.session import (
    Repository,
    get_tenant_row,
    make_deployments_lock_key,
    to_dataclass,
)
from swiftkv_platform.control_plane.database.tables import (
    PENDING,
    AuditRow,
    Base,
    DeletionRow,
    DeliveryRow,
    DeploymentRow,
    EventRow,
    IdempotencyRow,
    JobReferenceRow,
    JobRow,
    MetricRow,
    ModelRow,
    PromotionRow,
    RolloutRow,
    SessionRow,
)
from swiftkv_platform.control_plane.files.repository import find_referencing_jobs
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.models.registry import count_superseded_promotions
from swiftkv_platform.control_plane.models.repository import IMPORTED_MODELS_PREFIX, Model, select_promotions
from swiftkv_platform.errors import ConflictError, NotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.base import STORED_CONTEXT
from swiftkv_platform.specs.deployment import ResolvedCapture
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore, join_object_key
from swiftkv_platform.storage.traffic import TrafficStore

_TERMINAL_STATUSES = [status.value for status in JobStatus if status.is_terminal]
_PARENT_NAME = JobRow.spec["training"]["from"].as_string()
"""Name of the checkpoint or model that a job is trained from."""
_BATCH_ROWS = 500
"""Rows of a job that are deleted per transaction."""
_TABLES_OF_JOB = (DeliveryRow, EventRow, MetricRow, IdempotencyRow, JobReferenceRow, RolloutRow, ModelRow)
"""Tables with rows of a job, in order of removal."""


class JobDataKind(StrEnum):
    """Kinds of an ended job's data that retention removes; the job's record remains."""

    EVENTS = "events"
    METRICS = "metrics"
    EVENT_OBJECTS = "event_objects"
    PREPARED_DATA = "prepared_data"
    CHECKPOINTS = "checkpoints"
    LOGS = "logs"
    TRACKING = "tracking"

    @property
    def swept_bit(self) -> int:
        """Bit of the kind in `JobRow.swept`. It is stored, so the order of kinds must not change."""
        return 1 << list(JobDataKind).index(self)


_DueConditions = Callable[[float], Sequence[ColumnElement[bool]]]
_OLD_ROWS: Mapping[str, tuple[type[Base], InstrumentedAttribute[Any], _DueConditions]] = {
    "deliveries": (
        DeliveryRow,
        DeliveryRow.sequence,
        lambda before: (DeliveryRow.status != PENDING, DeliveryRow.created_at <= before),
    ),
    "idempotency_keys": (
        IdempotencyRow,
        IdempotencyRow.job_id,
        lambda before: (IdempotencyRow.job_id.in_(select(JobRow.id).where(JobRow.created_at <= before)),),
    ),
    "audit": (AuditRow, AuditRow.id, lambda before: (AuditRow.created_at <= before,)),
    "sessions": (SessionRow, SessionRow.id_sha256, lambda before: (SessionRow.expires_at <= before,)),
}
"""Tables whose rows are removed after a time, with their keys and conditions: finished deliveries and audit entries
by age, idempotency keys by their job's age, and expired sessions."""


class RetentionRepository(Repository):
    """Queries for, and removal of, rows that have exceeded their retention. Bulk removals are bounded by `limit`.
    Every method raises `DatabaseUnavailableError`."""

    def list_ended_jobs(self, kind: JobDataKind, *, before: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ids of jobs that ended by `before` and still have data of this kind, in ascending order after
        `after`."""
        query = _select_ended(before).where(JobRow.swept.op("&")(kind.swept_bit) == 0)
        if kind is JobDataKind.CHECKPOINTS:
            query = query.where(JobRow.id.not_in(self._list_parent_jobs()))
        return self._fetch_ids(query, JobRow.id, limit, after)

    def _list_parent_jobs(self) -> set[str]:
        """Return ids of jobs whose checkpoints unfinished jobs are trained from."""
        query = select(_PARENT_NAME).where(
            JobRow.status.not_in(_TERMINAL_STATUSES), _PARENT_NAME.startswith("job_", autoescape=True)
        )
        with self._database.begin_read() as session:
            return {name.partition(":")[0] for name in session.scalars(query.distinct()) if name is not None}

    def mark_removed(self, job_id: str, kind: JobDataKind) -> None:
        """Record that the job's data of this kind is removed."""
        swept = JobRow.swept.op("|")(kind.swept_bit)
        with self._database.begin_write() as session:
            session.execute(update(JobRow).where(JobRow.id == job_id).values(swept=swept))

    def remove_events(self, job_id: str, *, limit: int, dry_run: bool = False) -> int:
        """Remove up to `limit` events of a job, except status events; with `dry_run`, only count all of them.
        Returns their number."""
        where = EventRow.job_id == job_id, EventRow.type != "status"
        return self._remove_matching(EventRow, EventRow.sequence, *where, limit=limit, dry_run=dry_run)

    def downsample_points(self, job_id: str, *, max_points: int, limit: int, dry_run: bool = False) -> int:
        """Remove up to `limit` points of a job's time series, until `max_points` evenly spread points remain; with
        `dry_run`, only count all of them. Returns their number."""
        of_job = MetricRow.job_id == job_id
        summary = select(func.count(), func.min(MetricRow.step), func.max(MetricRow.step)).where(of_job)
        with self._database.begin_read() as session:
            number, first, last = session.execute(summary).one()
        if number <= max_points or dry_run:
            return max(number - max_points, 0)
        # The first and last point stay, so that the ranges are the same after some points are removed.
        share = (MetricRow.step - first) * max(max_points - 1, 1) // (last - first + 1)
        kept = select(func.min(MetricRow.step)).where(of_job).group_by(share)
        spare = select(MetricRow.step).where(of_job, MetricRow.step != last, MetricRow.step.not_in(kept)).limit(limit)
        return self._remove_selected(MetricRow, MetricRow.step, spare, of_job)

    def remove_old_rows(self, kind: str, *, before: float, limit: int, dry_run: bool) -> int:
        """Remove up to `limit` rows of a kind of `_OLD_ROWS`. With `dry_run`, only count all that are due."""
        table, key, are_due = _OLD_ROWS[kind]
        return self._remove_matching(table, key, *are_due(before), limit=limit, dry_run=dry_run)

    def trim_promotions(self, *, before: float, keep: int, dry_run: bool) -> int:
        """Remove the oldest promotions of all aliases, as `registry.count_superseded_promotions` decides."""
        with self._database.begin_read() as session:
            oldest = select(PromotionRow.tenant, PromotionRow.alias).where(PromotionRow.created_at <= before)
            aliases = [(tenant, alias) for tenant, alias in session.execute(oldest.distinct())]
        return sum(self._trim_alias(tenant, alias, before, keep, dry_run=dry_run) for tenant, alias in aliases)

    def _trim_alias(self, tenant: str, alias: str, before: float, keep: int, *, dry_run: bool) -> int:
        with self._database.begin_write() as session:
            self._lock_tenant(session, tenant)
            history = select_promotions(session, tenant, alias)
            number = count_superseded_promotions(history, before=before, keep=keep)
            if not dry_run:
                of_alias = (PromotionRow.tenant == tenant, PromotionRow.alias == alias)
                _delete_rows(
                    session,
                    PromotionRow,
                    *of_alias,
                    PromotionRow.version.in_([each.version for each in history[:number]]),
                )
            return number

    def list_superseded_models(self, *, before: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ascending ids of models that are in no alias's history and have a newer model of the same name."""
        newer = aliased(ModelRow)
        came = select(newer.id).where(
            newer.tenant == ModelRow.tenant,
            newer.name == ModelRow.name,
            newer.id > ModelRow.id,
            newer.created_at <= before,
        )
        promoted = select(PromotionRow.sequence).where(PromotionRow.model == ModelRow.id)
        return self._fetch_ids(select(ModelRow.id).where(came.exists(), ~promoted.exists()), ModelRow.id, limit, after)

    def list_expired_jobs(self, *, before: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ascending ids of jobs that ended by `before` and have no model."""
        has_model = select(ModelRow.id).where(ModelRow.job_id == JobRow.id).exists()
        return self._fetch_ids(_select_ended(before).where(~has_model), JobRow.id, limit, after)

    def preview_job_deletion(self, job_id: str) -> tuple[int, str]:
        """Return (number of rows to delete with a job, prefix of the job's objects). Raises as `delete_job`."""
        with self._database.begin_read() as session:
            _check_job_deletable(session, get_tenant_row(session, JobRow, job_id, None))
        return 1 + sum(self._count_rows(table, table.job_id == job_id) for table in _TABLES_OF_JOB), f"jobs/{job_id}"

    def preview_model_deletion(self, model_id: str) -> tuple[int, str]:
        """Return (number of rows to delete with a model, prefix of the model's objects)."""
        with self._database.begin_read() as session:
            model = get_tenant_row(session, ModelRow, model_id, None)
            _check_model_deletable(session, model)
            return 1, to_dataclass(Model, model).prefix

    def delete_job(self, job_id: str, *, by: str, now: float, tenant: str | None = None) -> int:
        """Delete a job with its model and all their rows, and record that its objects must be removed. Returns the
        number of rows.

        Raises `NotFoundError`, also for another tenant's job, and `ConflictError` with the object that uses it.
        """
        with self._database.begin_read() as session:
            _check_job_deletable(session, get_tenant_row(session, JobRow, job_id, tenant))
        # 1. history, in batches  2. all other rows and the record of the objects, in one transaction
        number = self._remove_history(job_id)
        with self._database.begin_write() as session:
            row = get_tenant_row(session, JobRow, job_id, tenant, lock=True)
            self._lock_tenant(session, row.tenant)
            _check_job_deletable(session, row)
            size = session.scalar(select(ModelRow.size).where(ModelRow.job_id == job_id)) or 0
            number += sum(_delete_rows(session, table, table.job_id == job_id) for table in _TABLES_OF_JOB)
            number += _delete_rows(session, JobRow, JobRow.id == job_id)
            _record_deletion(session, f"jobs/{job_id}", by, now, tenant=row.tenant, size=size)
            return number

    def _remove_history(self, job_id: str) -> int:
        """Remove most events and the time series of a job in batches before its deletion, since one large
        transaction would block other writers. Returns the number of rows."""
        number = 0
        remove_points = partial(self._remove_matching, MetricRow, MetricRow.step, MetricRow.job_id == job_id)
        for remove in (partial(self.remove_events, job_id), remove_points):
            while removed := remove(limit=_BATCH_ROWS):
                number += removed
        return number

    def delete_model(self, model_id: str, *, by: str, now: float, tenant: str | None = None) -> int:
        """Delete a model, and record that its objects must be removed; its job remains. Returns and raises as
        `delete_job`."""
        with self._database.begin_write() as session:
            model = get_tenant_row(session, ModelRow, model_id, tenant)
            self._lock_tenant(session, model.tenant)
            _check_model_deletable(session, model)
            if model.job_id is not None:
                job = session.get_one(JobRow, model.job_id, with_for_update=True)
                job.state = {**job.state, "distilled_model": None, "artifact_uri": None}
                job.version += 1
            _record_deletion(session, to_dataclass(Model, model).prefix, by, now, tenant=model.tenant, size=model.size)
            return _delete_rows(session, ModelRow, ModelRow.id == model_id)

    def list_due_deletions(self, *, now: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ascending prefixes whose objects are due for removal."""
        due = select(DeletionRow.prefix).where(DeletionRow.created_at <= now)
        return self._fetch_ids(due, DeletionRow.prefix, limit, after)

    def finish_deletion(self, prefix: str) -> None:
        """Remove the record of a deletion after the prefix's objects have been removed."""
        with self._database.begin_write() as session:
            session.execute(delete(DeletionRow).where(DeletionRow.prefix == prefix))

    def list_capture_settings(self) -> Mapping[tuple[str, str], Any]:
        """Return the unparsed `capture` of each deployment, by tenant and deployment id."""
        query = select(DeploymentRow.tenant, DeploymentRow.id, DeploymentRow.spec["capture"])
        with self._database.begin_read() as session:
            return {(tenant, deployment_id): capture for tenant, deployment_id, capture in session.execute(query)}

    def count_rows(self) -> Mapping[str, int]:
        """Return the number of rows by table."""
        with self._database.begin_read() as session:
            return {
                table.name: session.scalar(select(func.count()).select_from(table)) or 0
                for table in Base.metadata.sorted_tables
            }

    def _lock_tenant(self, session: Session, tenant: str) -> None:
        """Lock the tenant's deployments and aliases until the transaction ends."""
        self._database.lock(session, make_deployments_lock_key(tenant))

    def _fetch_ids(
        self, query: Select[str], key: InstrumentedAttribute[str], limit: int, after: str | None
    ) -> Sequence[str]:
        if after is not None:
            query = query.where(key > after)
        with self._database.begin_read() as session:
            return session.scalars(query.order_by(key).limit(limit)).all()

    def _count_rows(self, table: type[Base], *where: ColumnElement[bool]) -> int:
        with self._database.begin_read() as session:
            return session.scalar(select(func.count()).select_from(table).where(*where)) or 0

    def _remove_matching(
        self,
        table: type[Base],
        key: InstrumentedAttribute[Any],
        *where: ColumnElement[bool],
        limit: int,
        dry_run: bool = False,
    ) -> int:
        if dry_run:
            return self._count_rows(table, *where)
        return self._remove_selected(table, key, select(key).where(*where).order_by(key).limit(limit), *where)

    def _remove_selected(
        self, table: type[Base], key: InstrumentedAttribute[Any], query: Select[Any], *where: ColumnElement[bool]
    ) -> int:
        """Remove the rows whose keys the query returns. The query runs first, to keep the write transaction short."""
        with self._database.begin_read() as session:
            keys = session.scalars(query).all()
        if not keys:
            return 0
        with self._database.begin_write() as session:
            return _delete_rows(session, table, key.in_(keys), *where)


def _select_ended(before: float) -> Select[str]:
    return select(JobRow.id).where(JobRow.status.in_(_TERMINAL_STATUSES), JobRow.finished_at <= before)


def _delete_rows(session: Session, table: type[Base], *where: ColumnElement[bool]) -> int:
    return session.connection().execute(delete(table).where(*where)).rowcount


def _record_deletion(session: Session, prefix: str, by: str, now: float, *, tenant: str, size: int) -> None:
    """Record that a prefix's objects must be removed. `size`: bytes that the tenant's quota counts until then."""
    known = session.get(DeletionRow, prefix)
    if known is None:
        values = {"prefix": prefix, "created_at": int(now), "by": by, "tenant": tenant, "size": size}
        session.execute(insert(DeletionRow).values(values))


def _check_job_deletable(session: Session, job: JobRow) -> None:
    model = session.scalar(select(ModelRow.id).where(ModelRow.job_id == job.id))
    _raise_if_blocked(f"job {job.id}", _find_blocker(session, job, model, job.tenant), field="job_id")


def _check_model_deletable(session: Session, model: ModelRow) -> None:
    job = None if model.job_id is None else session.get_one(JobRow, model.job_id)
    _raise_if_blocked(f"model {model.id}", _find_blocker(session, job, model.id, model.tenant), field="model")


def _raise_if_blocked(subject: str, blocker: str | None, *, field: str) -> None:
    if blocker is not None:
        raise ConflictError(f"{subject} cannot be deleted: {blocker}", field=field, value=subject)


def _find_blocker(session: Session, job: JobRow | None, model: str | None, tenant: str) -> str | None:
    """Return why a tenant's job or model must not be deleted; None if it may be. Only the tenant's own objects
    count. `job`: None for an imported model."""
    job_id, status = ("", JobStatus.SUCCEEDED) if job is None else (job.id, JobStatus(job.status))
    if status is JobStatus.PAUSED:
        return "its job is paused and can be resumed; cancel it first"
    if not status.is_terminal:
        return f"its job is {status}; cancel it, and delete it when it has ended"
    if model is not None:
        as_adapter = cast(DeploymentRow.spec["adapters"], String).contains(f'"{model}"', autoescape=True)
        serves = or_(DeploymentRow.model == model, DeploymentRow.candidate == model, as_adapter)
        deployment = session.scalar(select(DeploymentRow.id).where(DeploymentRow.tenant == tenant, serves).limit(1))
        if deployment is not None:
            return f"deployment {deployment} serves {model}; delete that deployment, or give it another model"
        promoted = PromotionRow.tenant == tenant, PromotionRow.model == model
        alias = session.scalar(select(PromotionRow.alias).where(*promoted).limit(1))
        if alias is not None:
            return (
                f"{model} is in the history of alias {alias!r}, which points to it or can be rolled back to it; "
                "promote other models until retention has trimmed that history"
            )
    names = [name for name in (job_id, model) if name]
    children = find_referencing_jobs(session, names, tenant=tenant, limit=1, without=job_id)
    return f"job {children[0]} reads it; wait for that job's end, or cancel it" if children else None


_NAMES_OF_KIND: Mapping[JobDataKind, Sequence[str]] = {
    JobDataKind.EVENT_OBJECTS: ("events", "control"),
    JobDataKind.PREPARED_DATA: ("data", "answers", "starts", "evaluation"),
    JobDataKind.CHECKPOINTS: ("checkpoints",),
    JobDataKind.LOGS: ("logs.txt", "logs.json"),
    JobDataKind.TRACKING: ("tracking",),
}
"""Names of objects and directories below an attempt's prefix."""
_KIND_OF_NAME = {name: kind for kind, names in _NAMES_OF_KIND.items() for name in names}
_ATTEMPT_OBJECT = re.compile(r"jobs/[^/]+/(?:trials/[^/]+/jobs/[^/]+/)?attempts/\d+/([^/]+)")


@dataclass(frozen=True)
class RemovedAmount:
    """Amount of one kind of data that was removed, or would be in a dry run."""

    kind: str
    rows: int = 0
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: RemovedAmount) -> RemovedAmount:
        return RemovedAmount(self.kind, self.rows + other.rows, self.objects + other.objects, self.bytes + other.bytes)


@dataclass(frozen=True)
class StoredAmounts:
    """Size of database and object store at the last count."""

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


class RetentionStore:
    """Objects that have exceeded their retention. Every method raises `StorageError`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def list_locations(self, job_id: str, kind: JobDataKind) -> Sequence[str]:
        """Return prefixes and keys of one kind of a job's data, including those of a sweep's trials, which have
        attempts of their own."""
        own, trials = attempts_prefix(job_id), trials_prefix(job_id)
        roots = [own, *(f"{trials}/{name}/{own}" for name in self._store.list_directories(trials))]
        attempts = [f"{root}/{number}" for root in roots for number in self._store.list_directories(root)]
        return [f"{attempt}/{name}" for attempt in attempts for name in _NAMES_OF_KIND[kind]]

    def remove_objects(self, place: str, *, limit: int) -> ObjectBatch:
        """Remove up to `limit` objects at a location, manifests first, so that no directory looks complete."""
        if (itself := self._store.head(place)) is not None:
            self._store.delete(place)
            return ObjectBatch(1, itself.size, None)
        found, last = self.list_objects(place, limit=limit, after=None)
        if found:
            self._remove_manifests(place)
        if last is None:
            self._store.delete_prefix(place)  # with what a process that died was writing there, which is not listed
        else:
            self._store.delete_many([info.key for info in found])
        return ObjectBatch(len(found), sum(info.size for info in found), last)

    def _remove_manifests(self, place: str) -> None:
        """Remove the manifests of the directory and its subdirectories, so that none looks complete during removal."""
        directories = [place, *(join_object_key(place, name) for name in self._store.list_directories(place))]
        for directory in directories:
            self._store.delete(join_object_key(directory, MANIFEST))

    def count_objects(self, place: str, *, limit: int, after: str | None) -> ObjectBatch:
        """Count the objects that `remove_objects` would remove."""
        if after is None and (itself := self._store.head(place)) is not None:
            return ObjectBatch(1, itself.size, None)
        found, last = self.list_objects(place, limit=limit, after=after)
        return ObjectBatch(len(found), sum(info.size for info in found), last)

    def list_traffic(self) -> Sequence[tuple[str, str]]:
        """Return tenant and id of the deployments with captured traffic."""
        tenants = self._store.list_directories(TRAFFIC_PREFIX)
        return [(each, name) for each in tenants for name in self._store.list_directories(f"{TRAFFIC_PREFIX}/{each}")]

    def open_traffic(self, tenant: str, deployment_id: str) -> TrafficStore:
        return TrafficStore(self._store, make_traffic_prefix(tenant, deployment_id))

    def remove_traffic_parts(
        self, tenant: str, deployment_id: str, settings: ResolvedCapture, *, now: float, dry_run: bool
    ) -> Iterator[ObjectBatch]:
        """Remove the parts that exceed a deployment's settings, in batches."""
        expired = self.open_traffic(tenant, deployment_id).list_expired_parts(
            now=now, retention_days=settings.retention_days, max_bytes=settings.max_bytes
        )
        while batch := [*islice(expired, _MAX_OBJECTS_PER_STEP)]:
            if not dry_run:
                self._store.delete_many([part.key for part in batch])
            yield ObjectBatch(len(batch), sum(part.size for part in batch), batch[-1].key)

    def list_objects(self, prefix: str, *, limit: int, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return (up to `limit` objects, key of the last object); the key is None if there are no more."""
        found = list(islice(self._store.list(prefix, start_after=after), limit + 1))
        return (found, None) if len(found) <= limit else (found[:limit], found[limit - 1].key)


def classify_object(key: str) -> str:
    """Return the kind of an object for the counts."""
    if key.startswith(f"{IMPORTED_MODELS_PREFIX}/"):
        return "artifacts"
    if key.startswith(f"{TRAFFIC_PREFIX}/"):
        return "traffic"
    match = _ATTEMPT_OBJECT.match(key)
    if match is None:
        return "other"
    name = match.group(1)
    return _KIND_OF_NAME.get(name, "artifacts" if name == "artifact" else "other")


DAY_S = 86400.0
RETENTION_AUTHOR = "retention"
"""Author of deletions by retention."""
_IDS_PER_QUERY = 100
_MAX_ROWS_PER_TRANSACTION = 2000
_MAX_OBJECTS_PER_STEP = 500
_MAX_COUNTED_PER_STEP = 2000
_DELETIONS_INTERVAL_S = 60.0
"""Seconds between two removals of the objects of deleted jobs and models."""
_MAX_TICK_S = 1.0
"""Seconds after which a tick starts no further step."""
_MAX_STORE_FAILURES = 3
"""Consecutive failures of the object store after which a round ends."""


@dataclass
class RetentionSweeper:
    """Removes data that has exceeded its retention, in rounds; each tick runs a bounded part of a round."""

    rows: RetentionRepository
    objects: RetentionStore
    settings: Settings
    """Has the retention periods; 0 days means forever."""
    clock: Clock
    _: KW_ONLY
    monotonic: Callable[[], float] = time.monotonic
    """Clock that limits a tick's time."""
    stored: StoredAmounts = field(default=StoredAmounts(), init=False)
    """Empty until the first count of this process."""
    removed: dict[str, RemovedAmount] = field(default_factory=dict, init=False)
    """Amounts removed by this process, by kind."""
    _round: Iterator[RemovedAmount] | None = field(default=None, init=False)
    _next_round: float = field(default=0.0, init=False)
    _next_deletions: float = field(default=0.0, init=False)
    _failures: int = field(default=0, init=False)

    def tick(self) -> None:
        """Continue the round for about a second. Raises `DatabaseUnavailableError` and `StorageError`."""
        # 1. start a round if one is due  2. run its steps until the time is up
        if self._round is None:
            now = self.clock()
            if is_due(self._next_round, now, within=self.settings.sweep_interval_s):
                self._round = self._run_full_round()
            elif is_due(self._next_deletions, now, within=_DELETIONS_INTERVAL_S):
                self._round = self._run_deletions()
            else:
                return
        until = self.monotonic() + _MAX_TICK_S
        try:
            for swept in self._round:
                self.removed[swept.kind] = self.removed.get(swept.kind, RemovedAmount(swept.kind)) + swept
                if self.monotonic() >= until:
                    return
        except Exception:
            self._round = None  # a generator that has raised is finished; the next tick starts a new round
            raise
        self._round = None

    def _run_full_round(self) -> Iterator[RemovedAmount]:
        yield from self.run_round()
        yield from self._count_stored_data()
        self._next_round = self.clock() + self.settings.sweep_interval_s

    def _run_deletions(self) -> Iterator[RemovedAmount]:
        """Remove objects of recently deleted jobs and models, which count toward their tenant's quota until then, and
        deleted rows of captured traffic."""
        self._failures = 0
        yield from self._sweep_deletions(dry_run=False)
        yield from self._sweep_traffic(dry_run=False)
        self._next_deletions = self.clock() + _DELETIONS_INTERVAL_S

    def run_round(self, *, dry_run: bool = False) -> Iterator[RemovedAmount]:
        """Remove all data that has exceeded its retention, in bounded steps, and yield each step's amount.
        `dry_run`: remove nothing, and yield what would be removed. Raises `DatabaseUnavailableError`, and
        `StorageError` if the store fails several times in a row."""
        # 1. objects of earlier deletions  2. data of ended jobs  3. old rows  4. unused models and jobs  5. traffic
        now, rows = self.clock(), self.rows
        self._failures = 0
        yield from self._sweep_deletions(dry_run=dry_run)
        for kind in JobDataKind:
            if (before := self._get_cutoff(kind, now)) is not None:
                yield from self._sweep_ended_jobs(kind, before, dry_run=dry_run)
        yield from self._sweep_old_rows(now, dry_run=dry_run)
        if (before := self._get_cutoff("models", now)) is not None:
            superseded = _iterate_ids(partial(rows.list_superseded_models, before=before))
            yield from self._sweep_unused(
                "model", superseded, rows.preview_model_deletion, rows.delete_model, dry_run=dry_run
            )
        if (before := self._get_cutoff("jobs", now)) is not None:
            expired = _iterate_ids(partial(rows.list_expired_jobs, before=before))
            yield from self._sweep_unused("job", expired, rows.preview_job_deletion, rows.delete_job, dry_run=dry_run)
        if not dry_run:
            yield from self._sweep_deletions(dry_run=False)
        yield from self._sweep_traffic(dry_run=dry_run, may_expire=True)

    def _get_cutoff(self, kind: str, now: float) -> float | None:
        """Return the time up to which data of this kind is due; None if it is kept forever."""
        days: float = getattr(self.settings, f"retention_{kind}_days")
        return now - days * DAY_S if days else None

    def _sweep_ended_jobs(self, kind: JobDataKind, before: float, *, dry_run: bool) -> Iterator[RemovedAmount]:
        for job_id in _iterate_ids(partial(self.rows.list_ended_jobs, kind, before=before)):
            try:
                yield from self._sweep_job(job_id, kind, dry_run=dry_run)
            except StorageError as error:
                self._record_failure(job_id, error)
                continue
            self._failures = 0
            if not dry_run:
                self.rows.mark_removed(job_id, kind)
            yield RemovedAmount(kind)

    def _sweep_job(self, job_id: str, kind: JobDataKind, *, dry_run: bool) -> Iterator[RemovedAmount]:
        if kind is JobDataKind.EVENTS:
            yield from _remove_rows(
                kind, partial(self.rows.remove_events, job_id, limit=_MAX_ROWS_PER_TRANSACTION), dry_run=dry_run
            )
        elif kind is JobDataKind.METRICS:
            most = self.settings.retention_metric_points
            yield from _remove_rows(
                kind,
                partial(self.rows.downsample_points, job_id, max_points=most, limit=_MAX_ROWS_PER_TRANSACTION),
                dry_run=dry_run,
            )
        else:
            for place in self.objects.list_locations(job_id, kind):
                yield from self._sweep_prefix(place, kind, dry_run=dry_run)

    def _sweep_prefix(self, place: str, kind: str, *, dry_run: bool) -> Iterator[RemovedAmount]:
        after: str | None = None
        while True:
            if dry_run:
                batch = self.objects.count_objects(place, limit=_MAX_OBJECTS_PER_STEP, after=after)
            else:
                batch = self.objects.remove_objects(place, limit=_MAX_OBJECTS_PER_STEP)
            yield RemovedAmount(kind, objects=batch.objects, bytes=batch.bytes)
            after = batch.next
            if after is None:
                return

    def _sweep_old_rows(self, now: float, *, dry_run: bool) -> Iterator[RemovedAmount]:
        """Remove old rows in batches. Sessions have their own expiry."""
        trim = partial(self.rows.trim_promotions, keep=self.settings.retention_rollbacks)
        removals: dict[str, Callable[..., int]] = {"promotions": trim}
        for kind in ("sessions", "deliveries", "idempotency_keys", "audit"):
            removals[kind] = partial(self.rows.remove_old_rows, kind, limit=_MAX_ROWS_PER_TRANSACTION)
        for kind, remove in removals.items():
            before = now if kind == "sessions" else self._get_cutoff(kind, now)
            if before is not None:
                yield from _remove_rows(kind, partial(remove, before=before), dry_run=dry_run)

    def _sweep_unused(
        self,
        object_kind: str,
        ids: Iterator[str],
        preview: Callable[[str], tuple[int, str]],
        remove: Callable[..., int],
        *,
        dry_run: bool,
    ) -> Iterator[RemovedAmount]:
        """Remove the unused ones of these jobs or models."""
        kind = f"{object_kind}s"
        for each in ids:
            try:
                if dry_run:
                    number, prefix = preview(each)
                    yield RemovedAmount(kind, rows=number)
                    yield from self._sweep_prefix(prefix, kind, dry_run=True)
                else:
                    yield RemovedAmount(kind, rows=remove(each, by=RETENTION_AUTHOR, now=self.clock()))
            except (ConflictError, NotFoundError) as error:
                get_logger(loop=RETENTION_AUTHOR).debug(
                    f"unused {object_kind} not deleted", **{f"{object_kind}_id": each}, reason=error.message
                )

    def _sweep_deletions(self, *, dry_run: bool) -> Iterator[RemovedAmount]:
        """Remove the objects of deleted jobs and models. A prefix that fails is retried in the next round."""
        for prefix in _iterate_ids(partial(self.rows.list_due_deletions, now=self.clock())):
            try:
                yield from self._sweep_prefix(prefix, "deleted", dry_run=dry_run)
            except StorageError as error:
                self._record_failure(prefix, error)
                continue
            self._failures = 0
            if not dry_run:
                self.rows.finish_deletion(prefix)

    def _sweep_traffic(self, *, dry_run: bool, may_expire: bool = False) -> Iterator[RemovedAmount]:
        """Remove deleted rows of captured traffic, and that of deployments without capture. `may_expire`: also remove
        what exceeds a deployment's settings, for which all parts are listed."""
        found = self.objects.list_traffic()  # first: a deployment that is created meanwhile has none in it
        settings = self.rows.list_capture_settings() if found else {}
        for tenant, deployment_id in found:
            try:
                capture = settings.get((tenant, deployment_id))
                yield from self._sweep_captured(tenant, deployment_id, capture, dry_run=dry_run, may_expire=may_expire)
            except StorageError as error:
                self._record_failure(make_traffic_prefix(tenant, deployment_id), error)
                continue
            except ValidationError as error:  # stored by another version of this program
                get_logger(loop=RETENTION_AUTHOR).warning(
                    "traffic settings unreadable", deployment_id=deployment_id, reason=str(error)
                )
            self._failures = 0

    def _sweep_captured(
        self, tenant: str, deployment_id: str, capture: Any, *, dry_run: bool, may_expire: bool
    ) -> Iterator[RemovedAmount]:
        """Remove a deployment's captured traffic. `capture`: its settings; None: remove all."""
        if capture is None:
            yield from self._sweep_prefix(make_traffic_prefix(tenant, deployment_id), "traffic", dry_run=dry_run)
            return
        settings, now = ResolvedCapture.model_validate(capture, context=STORED_CONTEXT), self.clock()
        if may_expire:
            for batch in self.objects.remove_traffic_parts(tenant, deployment_id, settings, now=now, dry_run=dry_run):
                yield RemovedAmount("traffic", objects=batch.objects, bytes=batch.bytes)
        if not dry_run:
            for part in self.objects.open_traffic(tenant, deployment_id).apply_deletions(now):
                yield RemovedAmount("traffic", rows=part.rows, bytes=part.bytes)

    def _record_failure(self, subject: str, error: StorageError) -> None:
        """Log a failure of the store; raise it after several consecutive failures."""
        self._failures += 1
        get_logger(loop=RETENTION_AUTHOR).warning("expired data not deleted", subject=subject, reason=error.message)
        if self._failures >= _MAX_STORE_FAILURES:
            raise error

    def _count_stored_data(self) -> Iterator[RemovedAmount]:
        rows, objects, sizes = self.rows.count_rows(), Counter[str](), Counter[str]()
        found, after = self.objects.list_objects("", limit=_MAX_COUNTED_PER_STEP, after=None)
        while found:
            for info in found:
                objects[classify_object(info.key)] += 1
                sizes[classify_object(info.key)] += info.size
            if after is None:
                break
            yield RemovedAmount("counted")
            found, after = self.objects.list_objects("", limit=_MAX_COUNTED_PER_STEP, after=after)
        self.stored = StoredAmounts(rows, objects, sizes)


def _remove_rows(kind: str, remove: Callable[..., int], *, dry_run: bool) -> Iterator[RemovedAmount]:
    """Remove rows in bounded transactions; a dry run counts them all at once."""
    while removed := remove(dry_run=dry_run):
        yield RemovedAmount(kind, rows=removed)
        if dry_run:
            return


def _iterate_ids(page: Callable[..., Sequence[str]]) -> Iterator[str]:
    """Yield the ids of all pages."""
    after: str | None = None
    while ids := page(limit=_IDS_PER_QUERY, after=after):
        yield from ids
        after = ids[-1]
