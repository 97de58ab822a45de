"""Last uses of API keys as rows. Knows ids of keys, nothing that opens anything."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import insert, select, update

from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import KeyUseRow


class SqlKeyUses:
    """Last uses in a database that several control planes share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, key_id: str, now: float, *, at_least_s: float) -> None:
        """Store a use, unless one is stored that is less than `at_least_s` seconds older."""
        with self._database.writing() as session:
            self._database.take_turns(session, f"uses of {key_id}")
            seen = session.scalar(select(KeyUseRow.last_used_at).where(KeyUseRow.key_id == key_id))
            if seen is None:
                session.execute(insert(KeyUseRow).values(key_id=key_id, last_used_at=int(now)))
            elif seen <= now - at_least_s:
                session.execute(update(KeyUseRow).where(KeyUseRow.key_id == key_id).values(last_used_at=int(now)))

    def all(self) -> Mapping[str, int]:
        """Unix seconds by key id."""
        with self._database.reading() as session:
            return {row.key_id: row.last_used_at for row in session.scalars(select(KeyUseRow))}
