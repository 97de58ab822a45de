"""Engine, migrations and transactions of each database; and queries for a tenant's rows and pages of rows."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy import (
    JSON,
    URL,
    ColumnElement,
    Connection,
    Engine,
    LargeBinary,
    Select,
    String,
    cast,
    create_engine,
    event,
    func,
    literal,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.functions import GenericFunction

from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.tables import Base, DeploymentRow, FileRow, JobRow, ModelRow
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError, NotFoundError, UnreadableRowError
from swiftkv_platform.limits import PAGE_BYTES as _PAGE
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings

_IDLE_TIMEOUT_S = 60
"""Seconds after which PostgreSQL ends an idle transaction."""
_CLIENT_GRACE_S = 10.0
"""Seconds after the statement timeout at which the client gives up; the server's timeout comes first."""
_READ_ONLY_SQLSTATE = "25006"
"""SQLSTATE `read_only_sql_transaction`."""
_LIBPQ_DRIVERS = ("psycopg", "psycopg2")


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of PostgreSQL in seconds; SQLite ignores them. Options in the database's URL (`?connect_timeout=3`)
    take precedence."""

    connect_s: int = 10
    """Max seconds to connect."""
    statement_s: float = 30.0
    """Max seconds per statement; migrations have no limit."""
    tcp_s: int = 30
    """Seconds without acknowledged packets after which a connection is closed."""
    recycle_s: int = 1800
    """Age at which a pooled connection is replaced."""


def make_engine_options(url: URL, timeouts: Timeouts) -> dict[str, Any]:
    """Return options of `create_engine` that detect a lost server."""
    options: dict[str, Any] = {"pool_pre_ping": True, "pool_recycle": timeouts.recycle_s}
    if url.get_backend_name() == "postgresql" and url.get_driver_name() in _LIBPQ_DRIVERS:
        interval = max(timeouts.tcp_s // 4, 1)
        wanted = {
            "connect_timeout": timeouts.connect_s,
            "keepalives": 1,
            "keepalives_idle": interval,
            "keepalives_interval": interval,
            "keepalives_count": 3,
            "tcp_user_timeout": 1000 * timeouts.tcp_s,
        }
        arguments: dict[str, Any] = {name: value for name, value in wanted.items() if name not in url.query}
        if url.get_driver_name() == "psycopg":
            # By itself it prepares statements, which a pooler in transaction mode leaves on another's connection.
            arguments["prepare_threshold"] = None
        options["connect_args"] = arguments
    return options


def set_connection_timeouts(engine: Engine, timeouts: Timeouts) -> None:
    """Set server and client timeouts on every connection of a PostgreSQL engine."""

    def configure(connection: Any, _: object) -> None:
        # A process frozen in a transaction holds its locks: without a limit, another control plane would wait for ever.
        with connection.cursor() as cursor:
            cursor.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_TIMEOUT_S}s'")
            cursor.execute(f"SET statement_timeout = {round(1000 * timeouts.statement_s)}")
        connection.commit()

    event.listen(engine, "connect", configure)
    if engine.dialect.driver == "psycopg":

        def connect(_dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
            connection = _make_connection_class().connect(*arguments, **options)
            connection.response_timeout_s = timeouts.statement_s + _CLIENT_GRACE_S
            return connection

        event.listen(engine, "do_connect", connect)


def disable_statement_timeout(session: Session) -> Callable[[], None]:
    """Remove the statement timeouts from this transaction, for a migration. Returns a function that restores them."""
    connection = session.connection()
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
    driver = connection.connection.driver_connection
    before = getattr(driver, "response_timeout_s", None)
    if before is None:
        return lambda: None
    driver.response_timeout_s = None  # type: ignore[union-attr]
    return lambda: setattr(driver, "response_timeout_s", before)


def is_read_only_error(error: BaseException) -> bool:
    """Whether a driver's error says that the server is read-only, such as a standby or a demoted primary."""
    return _READ_ONLY_SQLSTATE in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None))


def accepts_writes(session: Session) -> bool:
    """Whether the session's server accepts writes."""
    return bool(session.connection().exec_driver_sql("SHOW transaction_read_only").scalar_one() == "off")


def make_read_only_error(engine: Engine) -> DatabaseUnavailableError:
    """Return the error for a read-only server. Closes all pooled connections, since another server may be the
    primary now."""
    engine.dispose()
    return DatabaseUnavailableError(
        "the database is read-only (a standby or a demoted primary); set database_url to the primary"
    )


@cache
def _make_connection_class() -> Any:
    """Return a subclass of psycopg's connection with a client-side timeout. A frozen server, or a stalled proxy,
    still acknowledges packets, so that neither TCP's nor the server's timeouts end the wait."""
    import psycopg

    class _Connection(psycopg.Connection[Any]):
        response_timeout_s: float | None = None

        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            if self.response_timeout_s is not None:
                gen = _wait_with_timeout(gen, self.response_timeout_s, self._abort)
            return super().wait(gen, *arguments, **options)

        def _abort(self) -> None:
            self.pgconn.finish()  # in an unknown state
            raise psycopg.OperationalError(f"no answer within {self.response_timeout_s:g} s")

    return _Connection


def _wait_with_timeout(
    gen: Generator[Any, Any, Any], seconds: float, abort: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """Run psycopg's wait generator, and call `abort` after `seconds` without data. Values sent to the generator
    say what is ready on the socket; 0 means nothing yet."""
    try:
        wanted, last = next(gen), time.monotonic()
        while True:
            ready = yield wanted
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last >= seconds:
                abort()
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value


DEFAULT_TIMEOUTS = Timeouts()
_MIGRATIONS_DIRECTORY = Path(__file__).parent / "migrations"
_BUSY_TIMEOUT_S = 10.0
_WRITES_OPTION = "swiftkv_writes"

TRANSACTION_HOOK: ContextVar[Callable[[Session], Callable[[], None]] | None] = ContextVar("alongside", default=None)
"""Hook of the current request, called with each write transaction. The function it returns is called before the
commit."""


class Database:
    """Transactions on one database.

    SQLite gets a write-ahead log, foreign keys, a busy timeout, and its directory if that is missing.

    Args:
        url: any SQLAlchemy URL. Raises `InvalidInputError` for one that no installed driver understands.
        timeouts: used for PostgreSQL only.
    """

    def __init__(self, url: str, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        self._engine = _open_engine(url, timeouts)
        self._writing_engine = self._engine.execution_options(**{_WRITES_OPTION: True})
        self.is_sqlite = self._engine.dialect.name == "sqlite"

    def begin_read(self) -> AbstractContextManager[Session]:
        """Open a read transaction. Raises `DatabaseUnavailableError`."""
        return _begin_transaction(self._engine)

    @contextmanager
    def begin_write(self) -> Iterator[Session]:
        """Open a write transaction, committed at the end. Raises `DatabaseUnavailableError`, also for a read-only
        database."""
        with _begin_transaction(self._writing_engine) as session:
            join = TRANSACTION_HOOK.get()
            write = None if join is None else join(session)
            yield session
            if write is not None:
                write()

    def lock(self, session: Session, key: str) -> None:
        """Hold the advisory lock `key` until the transaction ends. SQLite needs none: it runs one write transaction
        at a time."""
        if not self.is_sqlite:
            session.execute(select(func.pg_advisory_xact_lock(func.hashtext(key))))

    def check_available(self) -> None:
        """Raise `DatabaseUnavailableError` unless the database responds and accepts writes."""
        with self.begin_read() as session:
            session.execute(text("SELECT 1"))
            if self._engine.dialect.name == "postgresql" and not accepts_writes(session):
                raise make_read_only_error(self._engine)
        file = self._engine.url.database if self.is_sqlite else None
        if file and not os.access(file, os.W_OK):
            raise DatabaseUnavailableError(f"the database is read-only: {file} cannot be written")

    def upgrade(self) -> None:
        """Upgrade the schema to the newest revision, in one transaction. A compatible schema of a later version is
        unchanged. Concurrent upgrades wait for each other. Raises as `check_schema`."""
        with self._begin_migration() as session:
            # 1. a later compatible schema stays  2. a former revision is stamped as its predecessor  3. upgrade
            config = make_alembic_config(session.connection())
            known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
            present = get_current_revision(session.connection())
            if present is not None and present > get_newest_revision():
                _check_revision(present)
                return
            if present is not None and present not in known:
                # A former revision, such as 0014: the migration that has replaced it adds only what is missing.
                earlier = max((each for each in known if each < present), default="base")
                command.stamp(config, earlier, purge=True)
            command.upgrade(config, "head")

    @contextmanager
    def _begin_migration(self) -> Iterator[Session]:
        """Open a transaction without statement timeouts: building an index on a large table may take long."""
        restore = None
        try:
            with self.begin_write() as session:
                if self._engine.dialect.name == "postgresql":
                    restore = disable_statement_timeout(session)
                self.lock(session, "migrations")
                yield session
        finally:
            if restore is not None:
                restore()

    def downgrade(self, revision: str) -> None:
        """Downgrade the schema to an earlier revision, in one transaction. Data of later revisions is lost.

        Raises `InvalidInputError` for an unknown revision.
        """
        try:
            with self._begin_migration() as session:
                command.downgrade(make_alembic_config(session.connection()), revision)
        except CommandError as error:
            message = f"revision is {revision!r}: {error}; expected the number of an earlier migration, such as 0005"
            raise InvalidInputError(message, field="revision", value=revision) from error

    def check_schema(self) -> None:
        """Raise `InvalidInputError` unless this program can use the schema."""
        with self.begin_read() as session:
            _check_revision(get_current_revision(session.connection()))

    def close(self) -> None:
        self._engine.dispose()


def get_current_revision(connection: Connection) -> str | None:
    """Return the schema's Alembic revision; None for an empty database."""
    return MigrationContext.configure(connection).get_current_revision()


def get_newest_revision() -> str:
    """Return the Alembic revision that this program needs."""
    head = ScriptDirectory.from_config(make_alembic_config()).get_current_head()
    assert head is not None, "the package holds its migrations"
    return head


def can_use_revision(present: str | None) -> bool:
    """Whether this program can use a schema: its own newest revision, or a compatible later one.

    Migrations only add things that earlier programs can ignore. An incompatible migration starts the next thousand,
    such as 1001 after 0015.
    """
    wanted = get_newest_revision()
    return present is not None and present >= wanted and present[:-3] == wanted[:-3]


def _check_revision(present: str | None) -> None:
    if can_use_revision(present):
        return
    wanted = get_newest_revision()
    way_out = "run `python -m swiftkv_platform.control_plane.database`"
    if present is not None and present > wanted:
        way_out = "a newer version of the control plane has made incompatible migrations; run that version"
    message = f"the database is at schema revision {present or 'none'}, this program needs {wanted}; {way_out}"
    raise InvalidInputError(message, field="database_url", value=present)


def make_alembic_config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS_DIRECTORY).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@contextmanager
def _begin_transaction(engine: Engine) -> Iterator[Session]:
    try:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session
    except (DBAPIError, PoolTimeoutError) as error:
        # The driver's own text, not SQLAlchemy's: the latter repeats the statement with its parameters.
        cause = getattr(error, "orig", None) or error
        if is_read_only_error(cause):
            raise make_read_only_error(engine) from error
        is_away = isinstance(error, (OperationalError, InterfaceError, PoolTimeoutError))
        # A server also closes connections with errors of other kinds, for example when a process was frozen.
        if is_away or getattr(error, "connection_invalidated", False):
            raise DatabaseUnavailableError(f"the database does not answer: {cause}") from error
        raise


def open_database(settings: Settings) -> Database:
    """Open the database of the settings. Raises `InvalidInputError` for an address that cannot be used."""
    timeouts = Timeouts(
        connect_s=settings.database_connect_timeout_s,
        statement_s=settings.database_statement_timeout_s,
        tcp_s=settings.database_tcp_timeout_s,
        recycle_s=settings.database_pool_recycle_s,
    )
    return Database(settings.resolved_database_url, timeouts)


def _open_engine(url: str, timeouts: Timeouts) -> Engine:
    try:
        # 1. PostgreSQL and others, with timeouts  2. SQLite, with its own transactions
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            options = make_engine_options(parsed, timeouts)
            engine = create_engine(parsed, json_serializer=_to_json, json_deserializer=_from_json, **options)
            if parsed.get_backend_name() == "postgresql":
                set_connection_timeouts(engine, timeouts)
            return engine
        engine = create_engine(
            parsed, connect_args={"timeout": _BUSY_TIMEOUT_S}, json_serializer=_to_json, json_deserializer=_from_json
        )
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InvalidInputError(
            f"the database address cannot be used: {error}; use sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME",
            field="database_url",
        ) from error
    if parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _to_json(value: Any) -> str:
    """Write JSON without escapes: SQLite compares keys as they are written, and invalid Unicode must not be stored."""
    return json.dumps(value, ensure_ascii=False)


def _from_json(text: str) -> Any:
    """Read JSON. A damaged document becomes None, so that only its own row is unreadable."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _configure_sqlite(connection: Any, _: object) -> None:
    # Python's driver would open transactions by itself, too late for reads and for DDL; `_begin_sqlite` does it.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then wants to write fails at once, without the busy timeout, if another one has
    # written in between; so those that will write take the write lock at their start.
    writes = connection.get_execution_options().get(_WRITES_OPTION, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def make_deployments_lock_key(tenant: str) -> str:
    """Return the key of the lock that changes of a tenant's wanted deployments hold."""
    return f"deployments of {tenant}"


PAGE_BYTES = _PAGE.default
"""Max bytes of texts and documents in the rows of a page. A page is built while other requests wait, and takes about
ten times as much memory."""
_ROW_OVERHEAD_BYTES = 256
"""Bytes counted per row in addition to its texts and documents."""
_MAX_PARAMETERS = 500
"""Max parameters of a statement; databases limit them."""
Row = TypeVar("Row")
Owned = TypeVar("Owned", JobRow, ModelRow, DeploymentRow, FileRow)
Item = TypeVar("Item")
_TABLE_NAMES: dict[type[Base], tuple[str, str, str]] = {
    JobRow: ("job", "/jobs", "job_id"),
    ModelRow: ("model", "/models", "model"),
    DeploymentRow: ("deployment", "/deployments", "deployment_id"),
    FileRow: ("file", "/v1/files", "file_id"),
}
"""By table: (name of a row's object, route that lists the objects, field that contains an object's id)."""


class Repository:
    """Base class of repositories of a `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database


def get_tenant_row(
    session: Session, table: type[Owned], row_id: str, tenant: str | None, *, lock: bool = False
) -> Owned:
    """Return a tenant's row; any tenant's if `tenant` is None. Raises `NotFoundError`, also for another tenant's
    row."""
    row = session.get(table, row_id, with_for_update=lock)
    if row is None or tenant not in (None, row.tenant):
        kind, route, field = _TABLE_NAMES[table]
        raise NotFoundError(f"there is no {kind} {row_id}; GET {route} lists them", field=field, value=row_id)
    return row


def fetch_page(
    session: Session,
    table: type[Owned],
    page: PageQuery,
    tenant: str,
    *where: ColumnElement[bool],
) -> Page[Owned]:
    """Return a page of a tenant's rows. Raises `InvalidInputError` if the cursor is not a row of the tenant."""
    if page.after is not None:
        seen = session.get(table, page.after)
        if seen is None or seen.tenant != tenant:
            raise make_cursor_error(page.after)
    query: Select[Any] = select(table).where(table.tenant == tenant, *where)
    return fetch_rows(session, query, table.id, page, after=page.after)


class _OctetLength(GenericFunction[int]):
    """SQL function: bytes of a text."""

    inherit_cache = True
    name = "octet_length"


@compiles(_OctetLength, "sqlite")  # has `octet_length` since 3.43
def _compile_on_sqlite(function: _OctetLength, compiler: Any, **options: Any) -> str:
    return str(compiler.process(func.length(cast(next(iter(function.clauses)), LargeBinary)), **options))


def make_row_bytes_expression(table: Any) -> ColumnElement[int]:
    """Return an SQL expression for the bytes of a row's texts and documents."""
    sizes: ColumnElement[int] = literal(_ROW_OVERHEAD_BYTES)
    for column in table.__table__.columns:
        if isinstance(column.type, String | JSON):
            sizes = sizes + func.coalesce(_OctetLength(cast(column, String)), 0)
    return sizes


def count_fitting_rows(sizes: Iterable[int]) -> int:
    """Return how many of the first rows fit into `PAGE_BYTES`, at least 1. Stops reading sizes after the first that
    does not fit."""
    totals = itertools.accumulate(sizes)
    return max(sum(1 for _ in itertools.takewhile(lambda total: total <= PAGE_BYTES, totals)), 1)


def to_dataclass(kind: type[Item], row: Base, **changes: Any) -> Item:
    """Build a dataclass from the row's columns with the names of its fields; `changes` override them."""
    names = {field.name for field in fields(kind)} - changes.keys()  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: getattr(row, name) for name in names}, **changes)


def fetch_rows(
    session: Session,
    query: Select[Row],
    key_column: InstrumentedAttribute[Any],
    page: PageQuery,
    *,
    after: Any,
    extra_bytes: ColumnElement[int] | None = None,
) -> Page[Row]:
    """Fetch up to `page.limit` rows, ordered by the unique `key_column`, after its value `after`. The page ends before
    its rows exceed `PAGE_BYTES`, but has at least one; other rows are not loaded.

    Args: `extra_bytes`: SQL expression for bytes to load in addition to each row.
    """
    ordered = _order_after(query, key_column, page, after)
    size = make_row_bytes_expression(key_column.class_) + (0 if extra_bytes is None else func.coalesce(extra_bytes, 0))
    sizes = session.execute(
        ordered.with_only_columns(size, maintain_column_froms=True).limit(page.limit).execution_options(yield_per=100)
    )
    limit = min(count_fitting_rows(each[0] for each in sizes), page.limit)
    sizes.close()
    rows = session.scalars(ordered.limit(limit)).all()
    # A query for the key alone, since the next row may be the largest.
    beyond = ordered.with_only_columns(key_column).offset(limit).limit(1)
    return Page(rows, has_more=len(rows) == limit and session.execute(beyond).first() is not None)


def fetch_column(
    session: Session, query: Select[str], key_column: InstrumentedAttribute[Any], page: PageQuery, *, after: Any
) -> Page[str]:
    """Fetch up to `page.limit` values of the short column `key_column`, which `query` selects, ordered by it."""
    found = session.scalars(_order_after(query, key_column, page, after).limit(page.limit + 1)).all()
    return Page(found[: page.limit], has_more=len(found) > page.limit)


def _order_after(
    query: Select[Any], key_column: InstrumentedAttribute[Any], page: PageQuery, after: Any
) -> Select[Any]:
    """Order the query by the column `key_column` in the page's order, beginning after the value `after`."""
    ascending = page.order == "asc"
    if after is not None:
        query = query.where(key_column > after if ascending else key_column < after)
    return query.order_by(key_column.asc() if ascending else key_column.desc())


def split_into_batches(values: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield the values in batches that fit into one statement."""
    for start in range(0, len(values), _MAX_PARAMETERS):
        yield values[start : start + _MAX_PARAMETERS]


def parse_readable_rows(rows: Iterable[Row], read: Callable[[Row], Item]) -> tuple[list[Item], list[str]]:
    """Return (rows converted by `read`, ids of unreadable rows)."""
    items: list[Item] = []
    left_out: list[str] = []
    for row in rows:
        try:
            items.append(read(row))
        except UnreadableRowError as error:
            get_logger().error("unreadable row skipped", row=error.value, reason=error.message)
            left_out.append(str(error.value))
    return items, left_out


def make_unreadable_row_error(kind: str, row_id: str, error: ValidationError | TypeError) -> UnreadableRowError:
    """Return the error for a row that does not have the format of this version of the program."""
    why = "its state is not a JSON object"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return UnreadableRowError(
        f"{kind} {row_id} cannot be read: {why}; if another version of the control plane stored this {kind}, use that "
        "version to read or delete it",
        field=f"{kind}_id",
        value=row_id,
    )


def make_cursor_error(value: str) -> InvalidInputError:
    return InvalidInputError.for_field(
        "after", value, ", which is not in this list; pass the `last_id` of an earlier page"
    )
