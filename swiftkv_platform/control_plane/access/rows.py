"""Rows of browser sessions, last uses of API keys, and the audit trail. No row holds a usable credential."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import Query
from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.base import Page, Slice
from swiftkv_platform.control_plane.database.paging import Store, fetch, unknown_cursor, value_of
from swiftkv_platform.control_plane.database.tables import (
    AuditRow,
    DeploymentRow,
    FileRow,
    JobRow,
    KeyUseRow,
    SessionRow,
)
from swiftkv_platform.limits import SESSIONS

_MOST_ENDED = 100
"""Most excess sessions of a key that a new one ends; earlier versions did not limit them."""


class SqlSessions(Store):
    """Sessions in a database that several control planes share."""

    def add(self, session: SessionRow, *, now: float) -> None:
        """Store a session; delete those that have ended, and the key's oldest ones beyond `SESSIONS`."""
        of_key = select(SessionRow.id_sha256).where(SessionRow.key_name == session.key_name)
        with self._database.writing() as transaction:
            self._database.take_turns(transaction, f"sessions of {session.key_name}")
            transaction.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
            excess = of_key.order_by(SessionRow.expires_at.desc()).offset(SESSIONS.default - 1).limit(_MOST_ENDED)
            if oldest := transaction.scalars(excess).all():
                transaction.execute(delete(SessionRow).where(SessionRow.id_sha256.in_(oldest)))
            transaction.add(session)

    def get(self, id_sha256: str) -> SessionRow | None:
        with self._database.reading() as transaction:
            return transaction.get(SessionRow, id_sha256)

    def remove(self, id_sha256: str) -> None:
        with self._database.writing() as transaction:
            transaction.execute(delete(SessionRow).where(SessionRow.id_sha256 == id_sha256))


class SqlKeyUses(Store):
    """Last uses in a database that several control planes share."""

    def note(self, key_id: str, now: float, *, at_least_s: float) -> None:
        """Store a use, unless the stored one is less than `at_least_s` seconds older."""
        with self._database.writing() as session:
            self._database.take_turns(session, f"uses of {key_id}")
            seen = session.scalar(select(KeyUseRow.last_used_at).where(KeyUseRow.key_id == key_id))
            if seen is None:
                session.execute(insert(KeyUseRow).values(key_id=key_id, last_used_at=int(now)))
            elif seen <= now - at_least_s:
                session.execute(update(KeyUseRow).where(KeyUseRow.key_id == key_id).values(last_used_at=int(now)))

    def all(self) -> Mapping[str, int]:
        """Return Unix seconds of the last use by key id."""
        with self._database.reading() as session:
            return {row.key_id: row.last_used_at for row in session.scalars(select(KeyUseRow))}


_EQUAL = ("tenant", "actor", "credential", "address", "route", "object", "request_id", "status")


class SqlAudit(Store):
    """Audit entries, which do not change once their request is answered."""

    def list(self, page: Page, wanted: AuditFilter) -> Slice[AuditEntry]:
        """Return a page of matching entries in order of time. Raises `InvalidInputError` for an unknown cursor."""
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
            return Slice([value_of(AuditEntry, row) for row in rows.items], rows.has_more)

    def store(self, entry: AuditEntry) -> None:
        """Write an entry; if a transaction has already added it, update its status and object."""
        with self._database.writing() as session:
            changed = update(AuditRow).where(AuditRow.id == entry.id)
            done = session.connection().execute(changed.values(status=entry.status, object=entry.object))
            if not done.rowcount:
                add(session, entry)


def add(session: Session, entry: AuditEntry) -> None:
    """Write an entry as a part of the session's transaction."""
    session.execute(insert(AuditRow).values(**asdict(entry)))


def made_in(session: Session) -> str | None:
    """Return the id of the job, deployment or file that the session is about to insert, if any."""
    made = (row.id for row in session.new if isinstance(row, JobRow | DeploymentRow | FileRow))
    return next(made, None)


@dataclass(frozen=True)
class AuditEntry:
    """A request that changed something, tried to, or was refused access."""

    id: str
    created_at: float
    """Unix seconds."""
    request_id: str
    """Value of the answer's `X-Request-ID`."""
    actor: str | None
    """Name of the caller; None where none was known."""
    credential: str | None
    """Id of the key, or issuer and subject of the token."""
    tenant: str | None
    address: str
    method: str
    route: str
    """Template of the route, such as `/jobs/{job_id}/cancel`."""
    object: str | None
    """Id of what the request was about."""
    status: int
    """HTTP status of the answer."""
    left_out: int = 0
    """Number of earlier refusals that were not recorded because there were too many."""


_Value = Annotated[str | None, Query(max_length=300)]
_Time = Annotated[float | None, Query(ge=0.0, le=1e12, allow_inf_nan=False, description="Unix seconds")]


@dataclass(frozen=True)
class AuditFilter:
    """Values that entries must have, as the query of a request names them; None matches any."""

    tenant: _Value = None
    actor: _Value = None
    credential: _Value = None
    address: _Value = None
    route: _Value = None
    object: Annotated[_Value, Query(alias="about")] = None
    request_id: _Value = None
    status: Annotated[int | None, Query(ge=100, le=599)] = None
    since: _Time = None
    """Inclusive."""
    until: _Time = None
    """Exclusive."""
