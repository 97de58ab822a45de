"""Engine, migrations and transactions. Knows what each database needs to be safe, nothing of what tables mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_TIMEOUT_S = 10.0
_LONGEST_IDLE_S = 60
"""Seconds after which PostgreSQL ends a transaction in which nothing is asked."""
_WRITES = "swiftkv_writes"

ALONGSIDE: ContextVar[Callable[[Session], Callable[[], None]] | None] = ContextVar("alongside", default=None)
"""Joins each transaction that writes, for the request under way; what it returns is called before the commit."""


class Database:
    """Transactions on one database.

    SQLite gets a write-ahead log, foreign keys, a busy timeout, and its directory if that is missing.

    Args:
        url: any SQLAlchemy URL. Raises `InvalidInputError` for one that no installed driver understands.
    """

    def __init__(self, url: str) -> None:
        self._engine = _open_engine(url)
        self._writing_engine = self._engine.execution_options(**{_WRITES: True})
        self.is_sqlite = self._engine.dialect.name == "sqlite"

    def reading(self) -> AbstractContextManager[Session]:
        """A consistent view. Raises `DatabaseUnavailableError` when the database does not answer."""
        return _transaction(self._engine)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction, committed at the end. Raises `DatabaseUnavailableError` when the database does not answer."""
        with _transaction(self._writing_engine) as session:
            join = ALONGSIDE.get()
            write = None if join is None else join(session)
            yield session
            if write is not None:
                write()

    def take_turns(self, session: Session, what: str) -> None:
        """Wait until no other transaction that has asked for the same is open; SQLite's writers take turns anyway."""
        if not self.is_sqlite:
            session.execute(select(func.pg_advisory_xact_lock(func.hashtext(what))))

    def check(self) -> None:
        """Returns if the database answers, else raises `DatabaseUnavailableError`."""
        with self.reading() as session:
            session.execute(text("SELECT 1"))

    def upgrade(self) -> None:
        """Bring the schema to the newest revision, all of it or nothing."""
        with self.writing() as session:
            command.upgrade(alembic_config(session.connection()), "head")

    def downgrade(self, revision: str) -> None:
        """Take the schema back to an earlier revision, all of the way or none. What later ones brought is lost.

        Raises `InvalidInputError` for a revision that there is not.
        """
        try:
            with self.writing() as session:
                command.downgrade(alembic_config(session.connection()), revision)
        except CommandError as error:
            raise InvalidInputError(
                f"revision is {revision!r}: {error}; expected the number of an earlier migration, such as 0005",
                field="revision",
                value=revision,
            ) from error

    def check_schema(self) -> None:
        """Raises `InvalidInputError` unless the schema is at the newest revision."""
        with self.reading() as session:
            present = current_revision(session.connection())
        wanted = newest_revision()
        if present != wanted:
            raise InvalidInputError(
                f"the database is at schema revision {present or 'none'}, this program needs {wanted}; "
                "run `python -m swiftkv_platform.database`",
                field="database_url",
                value=present,
            )

    def close(self) -> None:
        self._engine.dispose()


def current_revision(connection: Connection) -> str | None:
    """The schema's Alembic revision; None for an empty database."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str:
    """The Alembic revision that this program needs."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None, "the package holds its migrations"
    return head


def known_revisions() -> set[str]:
    """All Alembic revisions that this program knows, up to the newest."""
    return {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _transaction(engine: Engine) -> Iterator[Session]:
    try:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        # The driver's own text, not SQLAlchemy's: the latter repeats the statement with its parameters.
        cause = getattr(error, "orig", None) or error
        raise DatabaseUnavailableError(f"the database does not answer: {cause}") from error


def _open_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            engine = create_engine(parsed, pool_pre_ping=True, json_serializer=_to_json, json_deserializer=_from_json)
            if parsed.get_backend_name() == "postgresql":
                event.listen(engine, "connect", _configure_postgresql)
            return engine
        engine = create_engine(
            parsed, connect_args={"timeout": _BUSY_TIMEOUT_S}, json_serializer=_to_json, json_deserializer=_from_json
        )
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InvalidInputError(
            f"the database address cannot be used: {error}; sqlite:///FILE and postgresql+psycopg://USER@HOST/NAME can",
            field="database_url",
        ) from error
    if parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _to_json(value: Any) -> str:
    """Write JSON without escapes: SQLite compares keys as they are written, and text that cannot be encoded stays
    outside."""
    return json.dumps(value, ensure_ascii=False)


def _from_json(text: str) -> Any:
    """Read JSON, a damaged document as None: its row then fails where it is understood, and no other row does."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _configure_postgresql(connection: Any, _: object) -> None:
    # A process that is frozen in a transaction holds its locks: another control plane would wait for it for ever.
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{_LONGEST_IDLE_S}s'")
    connection.commit()


def _configure_sqlite(connection: Any, _: object) -> None:
    # Python's driver would open transactions by itself, too late for reads and for DDL; `_begin_sqlite` does it.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then wants to write fails at once, without the busy timeout, if another one has
    # written in between; so those that will write take the write lock at their start.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
