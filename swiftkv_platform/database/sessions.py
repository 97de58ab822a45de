"""Sessions of browsers as rows. Knows neither session ids nor keys: one is hashed, the other sealed."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, insert

from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import SessionRow


@dataclass(frozen=True)
class StoredSession:
    """A session as the database holds it."""

    id_sha256: str
    key_name: str
    sealed_key: str
    created_at: float
    expires_at: float


class SqlSessions:
    """Sessions in a database that several control planes share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, session: StoredSession, *, now: float) -> None:
        """Store a session; those that have ended make room."""
        with self._database.writing() as transaction:
            transaction.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
            transaction.execute(insert(SessionRow).values(**vars(session)))

    def get(self, id_sha256: str) -> StoredSession | None:
        with self._database.reading() as transaction:
            row = transaction.get(SessionRow, id_sha256)
            if row is None:
                return None
            return StoredSession(**{name: getattr(row, name) for name in StoredSession.__dataclass_fields__})

    def remove(self, id_sha256: str) -> None:
        with self._database.writing() as transaction:
            transaction.execute(delete(SessionRow).where(SessionRow.id_sha256 == id_sha256))
