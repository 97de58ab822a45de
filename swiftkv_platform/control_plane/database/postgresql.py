"""Connections to PostgreSQL with timeouts, so that none waits forever for a silent server or network."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import URL, Engine, event
from sqlalchemy.orm import Session

from swiftkv_platform.errors import DatabaseUnavailableError

_IDLE_TIMEOUT_S = 60
"""Seconds after which PostgreSQL ends an idle transaction."""
_GRACE_S = 10.0
"""Seconds after the statement timeout at which the client gives up; the server's timeout comes first."""
_READ_ONLY = "25006"
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
            connection.response_timeout_s = timeouts.statement_s + _GRACE_S
            return connection

        event.listen(engine, "do_connect", connect)


def lift_statement_timeout(session: Session) -> Callable[[], None]:
    """Remove the statement timeouts from this transaction, for a migration. Returns a function that restores them."""
    connection = session.connection()
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
    driver = connection.connection.driver_connection
    before = getattr(driver, "response_timeout_s", None)
    if before is None:
        return lambda: None
    driver.response_timeout_s = None  # type: ignore[union-attr]
    return lambda: setattr(driver, "response_timeout_s", before)


def is_read_only(error: BaseException) -> bool:
    """Whether a driver's error says that the server is read-only, such as a standby or a demoted primary."""
    return getattr(error, "sqlstate", None) == _READ_ONLY or getattr(error, "pgcode", None) == _READ_ONLY


def accepts_writes(session: Session) -> bool:
    """Whether the session's server accepts writes."""
    return bool(session.connection().exec_driver_sql("SHOW transaction_read_only").scalar_one() == "off")


def read_only_error(engine: Engine) -> DatabaseUnavailableError:
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
                gen = _wait_with_timeout(gen, self.response_timeout_s, self._give_up)
            return super().wait(gen, *arguments, **options)

        def _give_up(self) -> None:
            self.pgconn.finish()  # in an unknown state
            raise psycopg.OperationalError(f"no answer within {self.response_timeout_s:g} s")

    return _Connection


def _wait_with_timeout(
    gen: Generator[Any, Any, Any], seconds: float, give_up: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """Run psycopg's wait generator, and call `give_up` after `seconds` without data. Values sent to the generator
    say what is ready on the socket; 0 means nothing yet."""
    try:
        wanted, last = next(gen), time.monotonic()
        while True:
            ready = yield wanted
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last >= seconds:
                give_up()
            wanted = gen.send(ready)
    except StopIteration as end:
        return end.value
