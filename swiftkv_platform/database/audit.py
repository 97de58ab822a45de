"""The audit trail in SQL: written in the transaction of what it tells of, where there is one. Knows no route."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from swiftkv_platform.database.paging import fetch, unknown_cursor
from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import AuditRow, DeploymentRow, FileRow, JobRow
from swiftkv_platform.orchestration.audit import AuditEntry, AuditFilter
from swiftkv_platform.orchestration.ports import Page, Slice

_EQUAL = ("tenant", "actor", "credential", "address", "route", "object", "request_id", "status")


class SqlAudit:
    """`AuditTrail` on a `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self, page: Page, wanted: AuditFilter) -> Slice[AuditEntry]:
        query = select(AuditRow)
        for name in _EQUAL:
            value = getattr(wanted, name)
            if value is not None:
                query = query.where(getattr(AuditRow, name) == value)
        if wanted.since is not None:
            query = query.where(AuditRow.created_at >= wanted.since)
        if wanted.until is not None:
            query = query.where(AuditRow.created_at < wanted.until)
        with self._database.reading() as session:
            if page.after is not None:
                seen = session.get(AuditRow, page.after)
                if seen is None or wanted.tenant not in (None, seen.tenant):
                    raise unknown_cursor(page.after)
            rows = fetch(session, query, AuditRow.id, page, after=page.after)
            return Slice([_entry(row) for row in rows.items], rows.has_more)

    def store(self, entry: AuditEntry) -> None:
        """Write an entry, or what has become of it since it was added to a transaction."""
        with self._database.writing() as session:
            changed = update(AuditRow).where(AuditRow.id == entry.id)
            done = session.connection().execute(changed.values(status=entry.status, object=entry.object))
            if not done.rowcount:
                add(session, entry)


def add(session: Session, entry: AuditEntry) -> None:
    """Write an entry as a part of the session's transaction."""
    session.execute(insert(AuditRow).values(**asdict(entry)))


def made_in(session: Session) -> str | None:
    """Id of the job, deployment or file that the session is about to insert."""
    made = (row.id for row in session.new if isinstance(row, JobRow | DeploymentRow | FileRow))
    return next(made, None)


def _entry(row: AuditRow) -> AuditEntry:
    return AuditEntry(**{name: getattr(row, name) for name in AuditEntry.__dataclass_fields__})
