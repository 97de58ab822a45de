"""Rows of uploaded files, which are training data of a tenant, and of the jobs that use them. Knows no object store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.attempts import file_key, is_file_id
from swiftkv_platform.control_plane.access.tenants import DEFAULT_POLICY, TenantPolicy
from swiftkv_platform.control_plane.access.usage import check_count_quota, check_storage_quota
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.session import (
    Database,
    Repository,
    fetch_page,
    get_tenant_row,
    to_dataclass,
)
from swiftkv_platform.control_plane.database.tables import FileRow, JobReferenceRow, JobRow
from swiftkv_platform.control_plane.jobs.job import LIVE_STATUSES, JobStatus
from swiftkv_platform.data.checks import UploadedRows
from swiftkv_platform.errors import ConflictError, InvalidInputError

_TARGET_HOLDING_STATUSES = [*LIVE_STATUSES, JobStatus.SUCCEEDED.value]
"""Statuses of jobs whose publish target no other tenant may use."""
_OBJECT_ADDRESS = re.compile(r"(?:^|/)(?:jobs/(job_[0-9A-Za-z]{1,36})|models/(mdl_[0-9A-Za-z]{1,36}))(?=/|$)")
"""Part of the address, in any store, of the objects of a job or of an imported model."""
_PARENT_REFERENCE = re.compile(r"(mdl_[0-9A-Za-z]{1,36})$|(job_[0-9A-Za-z]{1,36}):")
"""`training.from`: a model, or the beginning of the name of a checkpoint."""


def find_references(spec: Any) -> set[str]:
    """Return the ids of files, models and jobs that a spec names as its parent, sources or publish target.

    Ids in other text, such as `metadata`, do not count. The spec is a plain document, which this version need not be
    able to parse.
    """
    found: set[str] = set()
    for name in _list_source_names(spec):
        if is_file_id(name):
            found.add(name)
        found.update(job or model for job, model in _OBJECT_ADDRESS.findall(name))
    parent = _get_part(spec, "training", "from")
    if isinstance(parent, str) and (match := _PARENT_REFERENCE.match(parent)):
        found.add(match[1] or match[2])
    if (place := hash_publish_target(spec)) is not None:
        found.add(place)
    return found


def hash_publish_target(spec: Any) -> str | None:
    """Return a digest, as long as an id, of the target that a job publishes to; None without a target."""
    place = _get_part(spec, "publish", "to")
    if not isinstance(place, str):
        return None
    place = place.rstrip("/")
    if place.startswith("hf://"):  # names on the hub are not case-sensitive
        place = place.lower()
    return f"pub_{hashlib.sha256(place.encode()).hexdigest()[:36]}"


def check_publication(session: Session, spec: Any, tenant: str) -> None:
    """Raise `ConflictError` if a job of another tenant publishes, or has published, to the same target: neither may
    overwrite the other's. A job that failed or was cancelled holds no target."""
    place = hash_publish_target(spec)
    if place is None:
        return
    others = select(JobRow.id).join(JobReferenceRow, JobReferenceRow.job_id == JobRow.id)
    others = others.where(
        JobReferenceRow.used == place, JobRow.tenant != tenant, JobRow.status.in_(_TARGET_HOLDING_STATUSES)
    )
    if session.scalar(others.limit(1)) is not None:
        to = spec["publish"]["to"]
        raise ConflictError.for_field("publish.to", to, ", where another tenant publishes; use another name")


def find_referencing_jobs(
    session: Session, names: Sequence[str], *, tenant: str, limit: int, without: str = ""
) -> Sequence[str]:
    """Return the first `limit` ids of the tenant's unfinished jobs that use one of these objects of the tenant.

    `without`: a job that does not count.
    """
    named = select(JobReferenceRow.job_id).where(JobReferenceRow.used.in_(names))
    jobs = select(JobRow.id).where(
        JobRow.id.in_(named), JobRow.tenant == tenant, JobRow.status.in_(LIVE_STATUSES), JobRow.id != without
    )

    def references_object(job_id: str) -> bool:
        # Rows of earlier versions also name ids that other text of a spec holds, so the spec decides.
        spec = session.scalar(select(JobRow.spec).where(JobRow.id == job_id))
        return not find_references(spec).isdisjoint(names)

    return list(islice(filter(references_object, session.scalars(jobs.order_by(JobRow.id)).all()), limit))


def _list_source_names(spec: Any) -> Iterator[str]:
    """Yield the names of the models, data sets and tasks that a spec reads."""
    yield from _filter_strings(_get_part(spec, "model", "name_or_path"))
    for source in _as_list(_get_part(spec, "data", "sources")):
        yield from _filter_strings(source.get("name_or_path") if isinstance(source, dict) else None)
    for task in _as_list(_get_part(spec, "evaluation", "tasks")):
        yield from _filter_strings(*((task.get("name"), task.get("data_dir")) if isinstance(task, dict) else (task,)))


def _get_part(spec: Any, section: str, name: str) -> Any:
    found = spec.get(section) if isinstance(spec, dict) else None
    return found.get(name) if isinstance(found, dict) else None


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _filter_strings(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str))


Purpose = Literal["fine-tune"]


@dataclass(frozen=True)
class File(UploadedRows):
    """An uploaded file. Times are Unix seconds."""

    id: str
    tenant: str
    created_by: str
    created_at: int
    filename: str
    """Name of the upload, for display."""
    purpose: Purpose
    expires_at: int | None = None
    """Time from which no new job may use the file; the file is deleted once no job uses it."""

    @property
    def object_key(self) -> str:
        return file_key(self.tenant, self.id)


_MAX_NAMED_JOBS = 3
"""Max jobs that an error message names."""


class FileRepository(Repository):
    """Rows of files. Each method is one transaction."""

    def add(self, file: File, *, policy: TenantPolicy = DEFAULT_POLICY) -> File:
        """Store a new file. `policy`: says how many files, and bytes, the tenant may store, this file included. Raises
        `QuotaExceededError`."""
        with self._database.begin_write() as session:
            # so that no other upload or import adds to it meanwhile
            lock_tenant_files(self._database, session, file.tenant)
            check_storage_quota(session, file.tenant, file.size, policy)
            check_count_quota(session, "max_files", file.tenant, policy)
            session.add(FileRow(**{**vars(file), "columns": list(file.columns)}))
        return file

    def get(self, file_id: str, *, tenant: str) -> File:
        """Return a file. Raises `NotFoundError`, also for another tenant's file."""
        with self._database.begin_read() as session:
            return _parse_file(get_tenant_row(session, FileRow, file_id, tenant))

    def list(self, page: PageQuery, *, tenant: str) -> Page[File]:
        """Return a page of files. Raises `InvalidInputError` if `page.after` names no file of the tenant."""
        with self._database.begin_read() as session:
            rows = fetch_page(session, FileRow, page, tenant)
            return Page([_parse_file(row) for row in rows.items], rows.has_more)

    def find_existing(self, ids: Sequence[str], *, tenant: str) -> Mapping[str, File]:
        """Return the tenant's files among `ids`, by id."""
        query = select(FileRow).where(FileRow.id.in_(ids), FileRow.tenant == tenant)
        with self._database.begin_read() as session:
            return {row.id: _parse_file(row) for row in session.scalars(query)}

    def check_quota(self, tenant: str, size: int, policy: TenantPolicy) -> None:
        """Raise `QuotaExceededError` if the tenant may not store another file, of `size` bytes."""
        with self._database.begin_read() as session:
            check_count_quota(session, "max_files", tenant, policy)
            check_storage_quota(session, tenant, size, policy)

    def remove(self, file_id: str, *, tenant: str) -> File:
        """Remove a file's row. Raises `NotFoundError`, and `ConflictError` while an unfinished job uses it."""
        with self._database.begin_write() as session:
            lock_tenant_files(self._database, session, tenant)
            row = get_tenant_row(session, FileRow, file_id, tenant)
            users = find_referencing_jobs(session, [file_id], tenant=tenant, limit=_MAX_NAMED_JOBS + 1)
            if users:
                shown = ", ".join(users[:_MAX_NAMED_JOBS]) + (", ..." if len(users) > _MAX_NAMED_JOBS else "")
                message = (
                    f"file {file_id} is used by {shown}; cancel the jobs that use it, or wait until they have ended"
                )
                raise ConflictError(message, field="file_id", value=file_id)
            session.delete(row)
            return _parse_file(row)

    def list_expired(self, now: float, *, limit: int) -> Sequence[File]:
        """Return expired files of all tenants, ordered by expiry."""
        query = select(FileRow).where(FileRow.expires_at <= int(now)).order_by(FileRow.expires_at).limit(limit)
        with self._database.begin_read() as session:
            return [_parse_file(row) for row in session.scalars(query)]

    def list_existing_ids(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that have a row, of any tenant."""
        with self._database.begin_read() as session:
            return set(session.scalars(select(FileRow.id).where(FileRow.id.in_(ids))))


def lock_tenant_files(database: Database, session: Session, tenant: str) -> None:
    """Lock the tenant's files until the end of this transaction."""
    database.lock(session, f"files of {tenant}")


def check_files_exist(session: Session, ids: Sequence[str], tenant: str) -> None:
    """Raise `InvalidInputError` for a file that was deleted after the job was checked."""
    present = set(session.scalars(select(FileRow.id).where(FileRow.id.in_(ids), FileRow.tenant == tenant)))
    for file_id in ids:
        if file_id not in present:
            message = f"data.sources names {file_id}, which has been deleted; upload the file again"
            raise InvalidInputError(message, field="data.sources", value=file_id)


def _parse_file(row: FileRow) -> File:
    return to_dataclass(File, row, columns=tuple(row.columns))
