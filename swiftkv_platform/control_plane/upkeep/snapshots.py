"""Export of a database's rows as JSON lines, and import into any supported database. Knows no table's meaning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Table, func, insert, select
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.database.session import Database, current_revision
from swiftkv_platform.control_plane.database.tables import Base, LeaseRow, SessionRow
from swiftkv_platform.errors import ConflictError

_BATCH = 500
_OF_A_PROCESS = {LeaseRow.__tablename__, SessionRow.__tablename__}
"""Tables whose rows are of no use to another control plane, or at another time."""


def tables() -> Sequence[str]:
    """Return the names of the exported tables, each after those that it refers to."""
    return [table.name for table in _tables()]


@contextmanager
def snapshot(database: Database) -> Iterator[Session]:
    """Open a consistent view of all tables. Raises `DatabaseUnavailableError`."""
    with database.reading() as session:
        if not database.is_sqlite:
            session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        yield session


def revision(session: Session) -> str | None:
    """The schema's revision."""
    return current_revision(session.connection())


def write_rows(session: Session, name: str, path: Path) -> int:
    """Write a table's rows to a file, one JSON object a line. Returns how many."""
    table, number = Base.metadata.tables[name], 0
    query = select(table).order_by(*table.primary_key.columns).execution_options(yield_per=_BATCH)
    with path.open("w", encoding="utf-8") as file:
        for row in session.execute(query):
            file.write(json.dumps(dict(row._mapping), ensure_ascii=False) + "\n")
            number += 1
    return number


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that `write_rows` wrote."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def load_rows(database: Database, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Insert rows by table into an empty database, all or none. Raises `ConflictError` if it is not empty."""
    with database.writing() as session:
        for table in _tables():
            _check_empty(session, table)
        for table in _tables():
            left = iter(rows.get(table.name, ()))
            while batch := [dict(row) for row in islice(left, _BATCH)]:
                session.execute(insert(table), batch)
            if not database.is_sqlite:
                _continue_numbers(session, table)


def _tables() -> list[Table]:
    return [table for table in Base.metadata.sorted_tables if table.name not in _OF_A_PROCESS]


def _check_empty(session: Session, table: Table) -> None:
    number = session.scalar(select(func.count()).select_from(table)) or 0
    if number:
        message = f"the database is not empty, it has {number} rows in {table.name}; restore into an empty one"
        raise ConflictError(message, field="database_url")


def _continue_numbers(session: Session, table: Table) -> None:
    """Set PostgreSQL's sequence to the greatest inserted number; SQLite does so by itself."""
    counted = table.autoincrement_column
    if counted is None:
        return
    greatest = session.scalar(select(func.max(counted)))
    if greatest is not None:
        session.execute(select(func.setval(func.pg_get_serial_sequence(table.name, counted.name), greatest)))
