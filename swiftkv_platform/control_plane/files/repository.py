"""Rows of uploaded files, which are training data of a tenant, and of the jobs that use them. Knows no object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.attempts import file_key
from swiftkv_platform.control_plane.access.tenants import DEFAULT_POLICY, TenantPolicy
from swiftkv_platform.control_plane.access.usage import check_count_quota, check_storage_quota
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.paging import Repository, fetch_page, get_tenant_row, to_dataclass
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import FileRow
from swiftkv_platform.control_plane.references import find_referencing_jobs
from swiftkv_platform.data.checks import UploadedRows
from swiftkv_platform.errors import ConflictError, InvalidInputError

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
            lock_tenant_files(
                self._database, session, file.tenant
            )  # so that no other upload or import adds to it meanwhile
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
