"""Rows of jobs, events and metrics. `job.py` decides which status may follow another."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import InstrumentedAttribute, Session

from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies, TenantPolicy
from swiftkv_platform.control_plane.access.usage import (
    check_count_quota,
    check_storage_quota,
    sum_demand,
    sum_deployment_demand,
    sum_job_demand,
)
from swiftkv_platform.control_plane.base import FencingToken, Page, PageQuery
from swiftkv_platform.control_plane.database.session import (
    Database,
    Repository,
    fetch_page,
    fetch_rows,
    get_tenant_row,
    make_cursor_error,
    make_deployments_lock_key,
    make_unreadable_row_error,
    parse_readable_rows,
    split_into_batches,
    to_dataclass,
)
from swiftkv_platform.control_plane.database.tables import (
    EventRow,
    IdempotencyRow,
    JobReferenceRow,
    JobRow,
    MetricRow,
    ModelRow,
)
from swiftkv_platform.control_plane.deployments.rollout import add_rollout
from swiftkv_platform.control_plane.files.repository import (
    check_files_exist,
    check_publication,
    find_references,
    lock_tenant_files,
)
from swiftkv_platform.control_plane.jobs.job import (
    LIVE_STATUSES,
    STATUSES_ON_CLUSTER,
    Event,
    Job,
    JobStatus,
    MetricPoint,
)
from swiftkv_platform.control_plane.loops import check_fence, make_lease_condition
from swiftkv_platform.control_plane.models.repository import Model
from swiftkv_platform.control_plane.webhooks import (
    fail_excess_deliveries,
    make_delivery_rows,
    make_recipient_finder,
    make_restored_points_bytes_expression,
    restore_metric_points,
    strip_metric_points,
)
from swiftkv_platform.errors import (
    IdempotencyConflictError,
    QuotaExceededError,
    StaleVersionError,
)
from swiftkv_platform.sources.names import list_file_ids
from swiftkv_platform.specs.base import STORED_CONTEXT


@dataclass(frozen=True)
class JobFilter:
    status: JobStatus | None = None
    model: str | None = None
    """The teacher's `name_or_path`."""
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Pairs that a job must all have."""


ALL_JOBS_FILTER = JobFilter()


@dataclass(frozen=True)
class IdempotencyKey:
    """IdempotencyKey key of a request: requests with the same key count as one."""

    key: str
    body_hash: str

    def check_body(self, body_hash: str, job_id: str) -> None:
        """Raise `IdempotencyConflictError` if the key was used for a job with another body."""
        if body_hash != self.body_hash:
            raise IdempotencyConflictError(
                f"Idempotency-Key {self.key!r} was used for job {job_id} with another body; send the same body, or use "
                "a new key",
                field="Idempotency-Key",
                value=self.key,
            )


PRIORITIES = {"high": 0, "normal": 1, "low": 2}
"""Ranks of `limits.priority`; the lowest goes first."""


@dataclass(frozen=True)
class ClusterJob:
    """Columns of a job that may have an attempt on the cluster."""

    id: str
    status: JobStatus
    version: int
    watched_until: float
    """Unix seconds until which clients count as following the job."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of the queue."""

    id: str
    demand: Demand


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue, and the cluster resources that each tenant uses."""

    used: Mapping[str, Demand]
    """Sum over each tenant's jobs on the cluster and deployments."""
    total: Demand
    """Sum over all deployments, and jobs on the cluster and in the queue."""
    waiting: Mapping[str, Sequence[QueuedJob]]
    """First jobs of each tenant that may start now: by priority, then by age."""


QuotaCheck = Callable[[str, Demand, Demand], bool]
"""(tenant, used, demand) -> whether a tenant that uses `used` may have `demand` in addition."""
T = TypeVar("T")
_JOB_ADAPTER = TypeAdapter(Job)
_COLUMNS: Sequence[InstrumentedAttribute[Any]] = (
    JobRow.id,
    JobRow.tenant,
    JobRow.created_by,
    JobRow.created_at,
    JobRow.status,
    JobRow.spec,
    JobRow.version,
)
"""Fields of `Job` that have a column of their own; the others are in `state`."""
_STATUSES_OFF_CLUSTER = [status.value for status in JobStatus if not status.is_on_cluster]
_MAX_STEP_DIGITS = 18
"""Max digits of a step; a column holds every number of this length."""


class JobRepository(Repository):
    """Jobs with their events and metrics. Each method is one transaction. `policies`: name the tenants' webhooks, and
    limit their pending deliveries."""

    def __init__(self, database: Database, policies: TenantPolicies) -> None:
        super().__init__(database)
        self._policies = policies
        self._recipients = make_recipient_finder(policies)

    def create(
        self, job: Job, event: Event, *, idempotency: IdempotencyKey | None = None, policy: TenantPolicy | None = None
    ) -> Job:
        """Store a new job; with a key the tenant has used before, return that key's job and store nothing.

        Args:
            policy: says how many jobs the tenant may have, this one included, and how many bytes its files and models;
                None sets no limit.

        Raises:
            IdempotencyConflictError: the key was used with another body.
            QuotaExceededError: the tenant is at its limit.
            InvalidInputError: the spec names an uploaded file that was deleted.
            ConflictError: it publishes where another tenant does.
        """
        if idempotency is not None and (known := self.find_by_idempotency_key(job.tenant, idempotency)) is not None:
            return known
        try:
            with self._database.begin_write() as session:
                self._check_quotas(session, job.tenant, policy)
                if ids := list_file_ids(job.spec):
                    lock_tenant_files(self._database, session, job.tenant)
                    check_files_exist(session, ids, job.tenant)
                columns = make_job_columns(job)
                if job.spec.publish.to is not None:
                    self._database.lock(session, "publish targets")
                    check_publication(session, columns["spec"], job.tenant)
                session.add(JobRow(**columns))
                session.flush()
                session.add_all(
                    JobReferenceRow(used=used, job_id=job.id) for used in sorted(find_references(columns["spec"]))
                )
                self._add_events(session, job, [event])
                if idempotency is not None:
                    session.add(IdempotencyRow(tenant=job.tenant, job_id=job.id, **vars(idempotency)))
        except (IntegrityError, QuotaExceededError):
            # Another request with the same key may have been faster.
            known = self.find_by_idempotency_key(job.tenant, idempotency) if idempotency is not None else None
            if known is None:
                raise
            return known
        return job

    def find_by_idempotency_key(self, tenant: str, idempotency: IdempotencyKey) -> Job | None:
        """Return the job that the tenant's key was used for. Raises `IdempotencyConflictError` for another body."""
        with self._database.begin_read() as session:
            known = session.get(IdempotencyRow, (tenant, idempotency.key))
            if known is None:
                return None
            idempotency.check_body(known.body_hash, known.job_id)
            return _parse_job(session.get_one(JobRow, known.job_id))

    def get(self, job_id: str, *, tenant: str) -> Job:
        """Return a job. Raises `NotFoundError`, also for another tenant's job, and `UnreadableRowError`."""
        with self._database.begin_read() as session:
            return _parse_job(get_tenant_row(session, JobRow, job_id, tenant))

    def list(self, page: PageQuery, *, tenant: str, where: JobFilter = ALL_JOBS_FILTER) -> Page[Job]:
        """Return a page of jobs. Raises `InvalidInputError` if `page.after` names
        no job of the tenant."""
        wanted = [JobRow.labels[key].as_string() == value for key, value in where.metadata.items()]
        if where.status is not None:
            wanted.append(JobRow.status == where.status.value)
        if where.model is not None:
            wanted.append(JobRow.model == where.model)
        if where.name is not None:
            wanted.append(JobRow.spec["name"].as_string() == where.name)
        with self._database.begin_read() as session:
            rows = fetch_page(session, JobRow, page, tenant, *wanted)
            jobs, left_out = parse_readable_rows(rows.items, _parse_job)
            return Page(jobs, rows.has_more, left_out)

    def list_cluster_jobs(self) -> Sequence[ClusterJob]:
        """Return all jobs that may have an attempt on the cluster, oldest first; no spec is read."""
        query = select(JobRow.id, JobRow.status, JobRow.version, JobRow.watched_until)
        with self._database.begin_read() as session:
            rows = session.execute(query.where(JobRow.status.in_(STATUSES_ON_CLUSTER)).order_by(JobRow.id))
            return [ClusterJob(row.id, JobStatus(row.status), row.version, row.watched_until) for row in rows]

    def load_jobs(self, ids: Sequence[str]) -> Sequence[Job]:
        """Return these jobs, in this order; one that is gone, or unreadable, is left out."""
        found: dict[str, Job] = {}
        with self._database.begin_read() as session:
            for part in split_into_batches(ids):
                rows = session.scalars(select(JobRow).where(JobRow.id.in_(part)))
                found |= {job.id: job for job in parse_readable_rows(rows, _parse_job)[0]}
        return [found[job_id] for job_id in ids if job_id in found]

    def find_live_jobs(self, ids: Collection[str]) -> set[str]:
        """Return those of the ids whose jobs have not ended."""
        found: set[str] = set()
        with self._database.begin_read() as session:
            for part in split_into_batches(sorted(ids)):
                live = select(JobRow.id).where(JobRow.id.in_(part), JobRow.status.in_(LIVE_STATUSES))
                found.update(session.scalars(live))
        return found

    def read_queue(self, *, most: int, now: float, without: Collection[str] = ()) -> QueueSnapshot:
        """Return the present queue, computed from columns alone.

        Args:
            most: most jobs of each tenant to return.
            now: Unix seconds; retries that are due later are left out.
            without: ids of jobs to leave out.
        """
        queued = [JobStatus.QUEUED.value]
        ready = select(JobRow.id, JobRow.gpus, JobRow.cpus).where(
            JobRow.status.in_(queued), JobRow.not_before <= now, JobRow.tenant == bindparam("of")
        )
        if without:
            ready = ready.where(JobRow.id.not_in(without))
        first = ready.order_by(JobRow.priority, JobRow.id).limit(most)
        waiting: dict[str, builtins.list[QueuedJob]] = {}
        with self._database.begin_read() as session:
            used, asked = sum_job_demand(session, STATUSES_ON_CLUSTER), sum_job_demand(session, queued)
            for tenant, demand in sum_deployment_demand(session).items():
                used[tenant] = used.get(tenant, Demand()) + demand
            total = sum((*used.values(), *asked.values()), Demand())
            for tenant in asked:  # each one's first jobs are adjacent in the index
                rows = session.execute(first, {"of": tenant})
                if jobs := [QueuedJob(row.id, Demand(1, row.gpus, row.cpus)) for row in rows]:
                    waiting[tenant] = jobs
        return QueueSnapshot(used, total, waiting)

    def list_queue_positions(self, tenant: str) -> Mapping[str, int]:
        """Return the position of each of the tenant's queued jobs, by priority, then by age; the first has 1."""
        queued = select(JobRow.id).where(JobRow.tenant == tenant, JobRow.status == JobStatus.QUEUED.value)
        with self._database.begin_read() as session:
            ids = session.scalars(queued.order_by(JobRow.priority, JobRow.id))
            return {job_id: place for place, job_id in enumerate(ids, 1)}

    def sum_tenant_demand(self, tenant: str) -> Demand:
        """Return the demand of the tenant's jobs on the cluster and of its deployments."""
        with self._database.begin_read() as session:
            return sum_demand(session, tenant)

    def claim_slots(
        self, starts: Sequence[tuple[Job, Event]], *, most: int, fits: QuotaCheck, fence: FencingToken | None = None
    ) -> Sequence[Job]:
        """Claim slots on the cluster for queued jobs, under a lock that all control planes share.

        Args:
            starts: jobs in the status `starting`, at the version that was read, with the event that reports it.
            most: max jobs on the cluster at the same time.
            fits: whether a tenant may hold a demand in addition to that of its jobs and deployments.

        Returns the jobs that got a slot. Jobs that have changed since are left out. If a job exceeds its tenant's
        quota, the tenant's later jobs get no slot. Raises `LeaseLostError`.
        """
        # 1. Lock the slots and the tenants' deployments.
        tenants = sorted({job.tenant for job, _ in starts})
        claimed: list[Job] = []
        refused: set[str] = set()
        with self._database.begin_write() as session:
            self._database.lock(session, "cluster slots")
            for tenant in tenants:
                self._database.lock(session, make_deployments_lock_key(tenant))
            check_fence(session, fence)
            # 2. Count what jobs and deployments use.
            used = sum_job_demand(session, STATUSES_ON_CLUSTER)
            room = most - sum(demand.jobs for demand in used.values())
            deployments = sum_deployment_demand(session, tenants=tenants)
            for tenant in tenants:
                used[tenant] = used.get(tenant, Demand()) + deployments.get(tenant, Demand())
            # 3. Claim slot by slot, in the order of the queue.
            for job, event in starts:
                demand = Demand.for_job(job.spec)
                if room <= 0 or job.tenant in refused:
                    continue
                if not fits(job.tenant, used[job.tenant], demand):
                    refused.add(job.tenant)
                    continue
                updated = replace(job, version=job.version + 1)
                guarded = update(JobRow).where(JobRow.id == job.id, JobRow.version == job.version)
                if session.scalar(guarded.values(**make_job_columns(updated)).returning(JobRow.id)) is None:
                    continue  # cancelled, or paused, since it was chosen
                self._add_events(session, updated, [event])
                claimed.append(updated)
                room -= 1
                used[job.tenant] += demand
        return claimed

    def mark_watched(self, job_id: str, until: float) -> None:
        """Mark a job as followed until a time, so that its events are polled often. The job keeps its version."""
        with self._database.begin_write() as session:
            live = update(JobRow).where(JobRow.id == job_id, JobRow.status.in_(LIVE_STATUSES))
            session.execute(live.values(watched_until=until))

    def count_by_status(self) -> Mapping[JobStatus, int]:
        query = select(JobRow.status, func.count()).group_by(JobRow.status)
        with self._database.begin_read() as session:
            found = {str(status): int(count) for status, count in session.execute(query)}
        return {status: found.get(status.value, 0) for status in JobStatus}

    def list_attempts_on_cluster(self) -> Mapping[str, int | None]:
        """Return the attempt number, or None if unreadable, of each job that may have an attempt on the cluster."""
        # An unknown status, stored by another version of this program, counts as one with an attempt.
        query = select(JobRow.id, JobRow.state).where(JobRow.status.not_in(_STATUSES_OFF_CLUSTER))
        with self._database.begin_read() as session:
            return {job_id: _read_attempt_number(state) for job_id, state in session.execute(query)}

    def update(
        self,
        job: Job,
        *,
        events: Sequence[Event] = (),
        points: Sequence[MetricPoint] = (),
        model: Model | None = None,
        fence: FencingToken | None = None,
    ) -> Job:
        """Replace the row at the version that `job` was read at, and add events, points and model, in one transaction.

        Returns the job with its new version. Raises `StaleVersionError` if the row has changed since, and
        `LeaseLostError` if another holder has the lease of `fence`.
        """
        updated = replace(job, version=job.version + 1)
        guarded = update(JobRow).where(JobRow.id == job.id, JobRow.version == job.version)
        if fence is not None:
            guarded = guarded.where(make_lease_condition(fence))
        with self._database.begin_write() as session:
            changed = session.execute(guarded.values(**make_job_columns(updated)).returning(JobRow.id))
            if changed.scalar_one_or_none() is None:
                check_fence(session, fence)
                message = f"job {job.id} has been changed since version {job.version} was read; read it again"
                raise StaleVersionError(message, field="version", value=job.version)
            steps = {point.step for point in points}
            self._add_events(session, updated, [strip_metric_points(event, steps) for event in events])
            _replace_points(session, job.id, points)
            if model is not None:
                session.add(ModelRow(**vars(model)))
                if job.spec.rollout is not None:
                    add_rollout(session, job.spec.rollout, job.id, job.tenant, model.id, model.created_at)
        return updated

    def list_events(self, job_id: str, page: PageQuery) -> Page[Event]:
        """Return a job's events in the order they were stored. Raises `InvalidInputError` for an unknown `after`."""
        with self._database.begin_read() as session:
            after = None
            if page.after is not None:
                seen = session.scalar(select(EventRow).where(EventRow.id == page.after, EventRow.job_id == job_id))
                if seen is None:
                    raise make_cursor_error(page.after)
                after = seen.sequence
            query = select(EventRow).where(EventRow.job_id == job_id)
            rows = fetch_rows(
                session,
                query,
                EventRow.sequence,
                page,
                after=after,
                extra_bytes=make_restored_points_bytes_expression(job_id),
            )
            # The data of a damaged row is no object.
            events = [
                to_dataclass(Event, row, data=row.data if isinstance(row.data, dict) else {}) for row in rows.items
            ]
            return Page(restore_metric_points(session, job_id, events), rows.has_more)

    def list_points(self, job_id: str, page: PageQuery) -> Page[MetricPoint]:
        """Metrics by step; `page.after` is a step in decimal. Raises `InvalidInputError` if it is not."""
        after = None if page.after is None else _parse_step_cursor(page.after)
        with self._database.begin_read() as session:
            rows = fetch_rows(
                session, select(MetricRow).where(MetricRow.job_id == job_id), MetricRow.step, page, after=after
            )
            return Page([to_dataclass(MetricPoint, row) for row in rows.items], rows.has_more)

    def _add_events(self, session: Session, job: Job, events: Sequence[Event]) -> None:
        session.add_all([EventRow(**vars(event)) for event in events])
        deliveries = make_delivery_rows(job, events, self._recipients)
        if deliveries:
            session.flush()
            most = self._policies.get(job.tenant).max_pending_deliveries
            fail_excess_deliveries(session, deliveries, job.tenant, most)
            session.add_all(deliveries)

    def _check_quotas(self, session: Session, tenant: str, policy: TenantPolicy | None) -> None:
        """Raise `QuotaExceededError` if the tenant has reached a quota of jobs or bytes. Concurrent submissions of the
        tenant wait."""
        if policy is None:
            return
        self._database.lock(session, f"jobs of {tenant}")
        for limit in ("max_queued_jobs", "max_unfinished_jobs", "max_stored_jobs"):
            check_count_quota(session, limit, tenant, policy)
        check_storage_quota(session, tenant, 0, policy)  # the job will add a model, whose size is not known yet


def make_job_columns(job: Job) -> dict[str, Any]:
    state = _JOB_ADAPTER.dump_python(job, mode="json")
    columns = {column.key: state.pop(column.key) for column in _COLUMNS}
    demand = Demand.for_job(job.spec)
    return {
        **columns,
        "model": job.spec.model.name_or_path,
        "labels": dict(job.spec.metadata),
        "state": state,
        "finished_at": job.finished_at,
        "priority": PRIORITIES[job.spec.limits.priority],
        "not_before": job.not_before,
        "gpus": demand.gpus,
        "cpus": demand.cpus,
    }


def _parse_job(row: JobRow) -> Job:
    """Return the row's job. Raises `UnreadableRowError`."""
    try:
        columns = {column.key: getattr(row, column.key) for column in _COLUMNS}
        return _JOB_ADAPTER.validate_python({**row.state, **columns}, context=STORED_CONTEXT)
    except (ValidationError, TypeError) as error:
        raise make_unreadable_row_error("job", row.id, error) from error


def _read_attempt_number(state: Any) -> int | None:
    attempt = state.get("attempt") if isinstance(state, dict) else None
    number = attempt.get("number") if isinstance(attempt, dict) else None
    return number if isinstance(number, int) else None


def _parse_step_cursor(cursor: str) -> int:
    """Return the step of a cursor. Raises `InvalidInputError` if it cannot be one."""
    if not cursor.isdecimal() or len(cursor) > _MAX_STEP_DIGITS:
        raise make_cursor_error(cursor)
    return int(cursor)


def _replace_points(session: Session, job_id: str, points: Sequence[MetricPoint]) -> None:
    newest = {point.step: point for point in points}
    for part in split_into_batches(builtins.list(newest)):
        session.execute(delete(MetricRow).where(MetricRow.job_id == job_id, MetricRow.step.in_(part)))
    session.add_all([MetricRow(job_id=job_id, **vars(point)) for point in newest.values()])
