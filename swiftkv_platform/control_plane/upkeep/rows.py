"""Rows that are kept for a time, and deletion of jobs and models that nothing uses. Knows no objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, insert, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from swiftkv_platform.control_plane.database.paging import Store, owned, value_of
from swiftkv_platform.control_plane.database.tables import (
    AuditRow,
    Base,
    DeletionRow,
    DeliveryRow,
    DeploymentRow,
    EventRow,
    IdempotencyRow,
    JobRow,
    ModelRow,
    PointRow,
    PromotionRow,
    SessionRow,
    UseRow,
)
from swiftkv_platform.control_plane.deployments.rows import deployments_turn
from swiftkv_platform.control_plane.hooks.rows import PENDING
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.jobs.uses import live_users
from swiftkv_platform.control_plane.models.model import Model
from swiftkv_platform.control_plane.models.registry import superseded
from swiftkv_platform.control_plane.models.rows import promotions_of
from swiftkv_platform.errors import ConflictError

_ENDED = [status.value for status in JobStatus if status.is_terminal]
_PARENT = JobRow.spec["training"]["from"].as_string()
"""Name of the checkpoint or model that a job continues from."""
_PART = 500
"""Rows of a job that are deleted at once."""
_OF_A_JOB = (DeliveryRow, EventRow, PointRow, IdempotencyRow, UseRow, ModelRow)
"""Tables with rows of a job, in the order in which they can be removed."""


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


_AreDue = Callable[[float], Sequence[ColumnElement[bool]]]
_OLD_ROWS: Mapping[str, tuple[type[Base], InstrumentedAttribute[Any], _AreDue]] = {
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
"""Tables whose rows are removed after a time, with their keys and the rows that are due: finished deliveries and audit
entries by their own age, idempotency keys by their job's, and sessions that have ended."""


class RetainedRows(Store):
    """Rows that retention removes. Transactions that remove rows in bulk are bounded by `limit`. Every method raises
    `DatabaseUnavailableError`."""

    def ended_jobs(self, kind: Kind, *, before: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ascending ids after `after` of jobs that ended by `before` and still have data of this kind."""
        query = _ended(before).where(JobRow.swept.op("&")(kind.bit) == 0)
        if kind is Kind.CHECKPOINTS:
            query = query.where(JobRow.id.not_in(self._read_jobs()))
        return self._page(query, JobRow.id, limit, after)

    def _read_jobs(self) -> set[str]:
        """Ids of the jobs from whose checkpoints unfinished jobs continue."""
        query = select(_PARENT).where(JobRow.status.not_in(_ENDED), _PARENT.startswith("job_", autoescape=True))
        with self._database.reading() as session:
            return {name.partition(":")[0] for name in session.scalars(query.distinct()) if name is not None}

    def mark_swept(self, job_id: str, kind: Kind) -> None:
        """Record that the job has no such data any more."""
        swept = JobRow.swept.op("|")(kind.bit)
        with self._database.writing() as session:
            session.execute(update(JobRow).where(JobRow.id == job_id).values(swept=swept))

    def remove_events(self, job_id: str, *, limit: int) -> int:
        """Remove events of a job, except changes of status. Returns how many were removed."""
        query = select(EventRow.sequence).where(*_telling(job_id)).order_by(EventRow.sequence).limit(limit)
        return self._remove_found(EventRow, EventRow.sequence, query)

    def count_events(self, job_id: str) -> int:
        """Return the number of events that repeated `remove_events` would remove."""
        return self._count(EventRow, *_telling(job_id))

    def thin_points(self, job_id: str, *, most: int, limit: int) -> int:
        """Remove up to `limit` points of the time series until `most` evenly spread ones are left. Returns how many."""
        of_job = PointRow.job_id == job_id
        summary = select(func.count(), func.min(PointRow.step), func.max(PointRow.step)).where(of_job)
        with self._database.reading() as session:
            number, first, last = session.execute(summary).one()
        if number <= most:
            return 0
        # The first and last point stay, so that the ranges are the same after some points are removed.
        share = (PointRow.step - first) * max(most - 1, 1) // (last - first + 1)
        kept = select(func.min(PointRow.step)).where(of_job).group_by(share)
        spare = select(PointRow.step).where(of_job, PointRow.step != last, PointRow.step.not_in(kept)).limit(limit)
        return self._remove_found(PointRow, PointRow.step, spare, of_job)

    def count_points(self, job_id: str) -> int:
        return self._count(PointRow, PointRow.job_id == job_id)

    def remove_old(self, kind: str, *, before: float, limit: int, dry_run: bool) -> int:
        """Remove up to `limit` rows of a kind of `_OLD_ROWS`. With `dry_run`, only count all that are due."""
        table, key, are_due = _OLD_ROWS[kind]
        if dry_run:
            return self._count(table, *are_due(before))
        return self._remove_found(table, key, select(key).where(*are_due(before)).limit(limit))

    def trim_promotions(self, *, before: float, keep: int, dry_run: bool) -> int:
        """Trim the beginning of the aliases' histories, as `registry.superseded` decides."""
        with self._database.reading() as session:
            oldest = select(PromotionRow.tenant, PromotionRow.alias).where(PromotionRow.created_at <= before)
            aliases = [(tenant, alias) for tenant, alias in session.execute(oldest.distinct())]
        return sum(self._trim_alias(tenant, alias, before, keep, dry_run=dry_run) for tenant, alias in aliases)

    def _trim_alias(self, tenant: str, alias: str, before: float, keep: int, *, dry_run: bool) -> int:
        with self._database.writing() as session:
            self._await_turn(session, tenant)
            history = promotions_of(session, tenant, alias)
            number = superseded(history, before=before, keep=keep)
            if not dry_run:
                of_alias = (PromotionRow.tenant == tenant, PromotionRow.alias == alias)
                _delete(
                    session,
                    PromotionRow,
                    *of_alias,
                    PromotionRow.version.in_([each.version for each in history[:number]]),
                )
            return number

    def superseded_models(self, *, before: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ids, ascending, of models that are in no alias's history and have a newer model of the same name."""
        newer = aliased(ModelRow)
        came = select(newer.id).where(
            newer.tenant == ModelRow.tenant,
            newer.name == ModelRow.name,
            newer.id > ModelRow.id,
            newer.created_at <= before,
        )
        promoted = select(PromotionRow.sequence).where(PromotionRow.model == ModelRow.id)
        return self._page(select(ModelRow.id).where(came.exists(), ~promoted.exists()), ModelRow.id, limit, after)

    def expired_jobs(self, *, before: float, limit: int, after: str | None) -> Sequence[str]:
        """Return ids, ascending, of jobs that ended by `before` and have no model."""
        has_model = select(ModelRow.id).where(ModelRow.job_id == JobRow.id).exists()
        return self._page(_ended(before).where(~has_model), JobRow.id, limit, after)

    def foresee_job(self, job_id: str) -> tuple[int, str]:
        """Return the number of rows that deleting a job removes, and the prefix of its objects. Raises as
        `delete_job`."""
        with self._database.reading() as session:
            _check_job(session, owned(session, JobRow, job_id, None))
        return 1 + sum(self._count(table, table.job_id == job_id) for table in _OF_A_JOB), f"jobs/{job_id}"

    def foresee_model(self, model_id: str) -> tuple[int, str]:
        """Return the same for a model."""
        with self._database.reading() as session:
            model = owned(session, ModelRow, model_id, None)
            _check_model(session, model)
            return 1, value_of(Model, model).prefix

    def delete_job(self, job_id: str, *, by: str, now: float, tenant: str | None = None) -> int:
        """Delete a job with its model and all their rows, and record that its objects are to be deleted. Returns the
        number of rows.

        Raises `NotFoundError`, also for another tenant's job, and `ConflictError` that names the holder.
        """
        with self._database.reading() as session:
            _check_job(session, owned(session, JobRow, job_id, tenant))
        number = self._remove_history(job_id)
        with self._database.writing() as session:
            row = owned(session, JobRow, job_id, tenant, lock=True)
            self._await_turn(session, row.tenant)
            _check_job(session, row)
            size = session.scalar(select(ModelRow.size).where(ModelRow.job_id == job_id)) or 0
            number += sum(_delete(session, table, table.job_id == job_id) for table in _OF_A_JOB)
            number += _delete(session, JobRow, JobRow.id == job_id)
            _note_deletion(session, f"jobs/{job_id}", by, now, tenant=row.tenant, size=size)
            return number

    def _remove_history(self, job_id: str) -> int:
        """Remove most events and the time series of a job that is being deleted, in parts: all at once would keep other
        writers waiting. Returns how many rows."""
        number, of_job = 0, PointRow.job_id == job_id
        while removed := self.remove_events(job_id, limit=_PART):
            number += removed
        while removed := self._remove_found(
            PointRow, PointRow.step, select(PointRow.step).where(of_job).limit(_PART), of_job
        ):
            number += removed
        return number

    def delete_model(self, model_id: str, *, by: str, now: float, tenant: str | None = None) -> int:
        """Delete a model, and record that its objects are to be deleted; its job stays. Returns and raises as
        `delete_job`."""
        with self._database.writing() as session:
            model = owned(session, ModelRow, model_id, tenant)
            self._await_turn(session, model.tenant)
            _check_model(session, model)
            if model.job_id is not None:
                job = session.get_one(JobRow, model.job_id, with_for_update=True)
                job.state = {**job.state, "distilled_model": None, "artifact_uri": None}
                job.version += 1
            _note_deletion(session, value_of(Model, model).prefix, by, now, tenant=model.tenant, size=model.size)
            return _delete(session, ModelRow, ModelRow.id == model_id)

    def deletions(self, *, now: float, limit: int, after: str | None) -> Sequence[str]:
        """Return prefixes, ascending, whose objects are due for deletion."""
        due = select(DeletionRow.prefix).where(DeletionRow.created_at <= now)
        return self._page(due, DeletionRow.prefix, limit, after)

    def forget_deletion(self, prefix: str) -> None:
        """Remove the record of a deletion, once the prefix's objects are gone."""
        with self._database.writing() as session:
            session.execute(delete(DeletionRow).where(DeletionRow.prefix == prefix))

    def count_rows(self) -> Mapping[str, int]:
        """Return the number of rows by table."""
        with self._database.reading() as session:
            return {
                table.name: session.scalar(select(func.count()).select_from(table)) or 0
                for table in Base.metadata.sorted_tables
            }

    def _await_turn(self, session: Session, tenant: str) -> None:
        """Wait until no other transaction changes the tenant's deployments or aliases."""
        self._database.take_turns(session, deployments_turn(tenant))

    def _page(
        self, query: Select[str], key: InstrumentedAttribute[str], limit: int, after: str | None
    ) -> Sequence[str]:
        if after is not None:
            query = query.where(key > after)
        with self._database.reading() as session:
            return session.scalars(query.order_by(key).limit(limit)).all()

    def _count(self, table: type[Base], *where: ColumnElement[bool]) -> int:
        with self._database.reading() as session:
            return session.scalar(select(func.count()).select_from(table).where(*where)) or 0

    def _remove_found(
        self, table: type[Base], key: InstrumentedAttribute[Any], query: Select[Any], *where: ColumnElement[bool]
    ) -> int:
        """Remove the rows whose keys the query finds; it runs before the transaction that writes, which it would make
        last longer."""
        with self._database.reading() as session:
            keys = session.scalars(query).all()
        if not keys:
            return 0
        with self._database.writing() as session:
            return _delete(session, table, key.in_(keys), *where)


def _ended(before: float) -> Select[str]:
    return select(JobRow.id).where(JobRow.status.in_(_ENDED), JobRow.finished_at <= before)


def _telling(job_id: str) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for events of a job other than changes of status."""
    return EventRow.job_id == job_id, EventRow.type != "status"


def _delete(session: Session, table: type[Base], *where: ColumnElement[bool]) -> int:
    return session.connection().execute(delete(table).where(*where)).rowcount


def _note_deletion(session: Session, prefix: str, by: str, now: float, *, tenant: str, size: int) -> None:
    """Record that a prefix's objects are to be deleted. `size`: bytes that the tenant's quota counts until then."""
    known = session.get(DeletionRow, prefix)
    if known is None:
        values = {"prefix": prefix, "created_at": int(now), "by": by, "tenant": tenant, "size": size}
        session.execute(insert(DeletionRow).values(values))


def _check_job(session: Session, job: JobRow) -> None:
    model = session.scalar(select(ModelRow.id).where(ModelRow.job_id == job.id))
    _check_unheld(f"job {job.id}", _hold(session, job, model, job.tenant), field="job_id")


def _check_model(session: Session, model: ModelRow) -> None:
    job = None if model.job_id is None else session.get_one(JobRow, model.job_id)
    _check_unheld(f"model {model.id}", _hold(session, job, model.id, model.tenant), field="model")


def _check_unheld(what: str, hold: str | None, *, field: str) -> None:
    if hold is not None:
        raise ConflictError(f"{what} cannot be deleted: {hold}", field=field, value=what)


def _hold(session: Session, job: JobRow | None, model: str | None, tenant: str) -> str | None:
    """Return what protects a tenant's job or model from deletion; None if nothing does. Only objects of the same tenant
    do. `job`: None for an imported model, which needs no ended job."""
    job_id, status = ("", JobStatus.SUCCEEDED) if job is None else (job.id, JobStatus(job.status))
    if status is JobStatus.PAUSED:
        return "its job is paused and can be resumed; cancel it first"
    if not status.is_terminal:
        return f"its job is {status}; cancel it, and delete it when it has ended"
    if model is not None:
        serves = or_(DeploymentRow.model == model, DeploymentRow.candidate == model)
        deployment = session.scalar(select(DeploymentRow.id).where(DeploymentRow.tenant == tenant, serves).limit(1))
        if deployment is not None:
            return f"deployment {deployment} serves {model}; delete that deployment, or give it another model"
        promoted = PromotionRow.tenant == tenant, PromotionRow.model == model
        alias = session.scalar(select(PromotionRow.alias).where(*promoted).limit(1))
        if alias is not None:
            return (
                f"{model} is in the history of alias {alias!r}, which stands for it or can be rolled back to it; "
                "promote other models until retention has trimmed that history"
            )
    names = [name for name in (job_id, model) if name]
    children = live_users(session, names, tenant=tenant, limit=1, without=job_id)
    return f"job {children[0]} reads it; wait for that job's end, or cancel it" if children else None
