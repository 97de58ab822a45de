"""PostgreSQL that is silent, slow or read-only: nothing waits for ever, and without writes it is not ready."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, make_url, text

from swiftkv_platform.control_plane.database import session as database_session
from swiftkv_platform.control_plane.database.session import (
    Database,
    Timeouts,
    get_current_revision,
    make_engine_options,
)
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.components import make_components
from tests.support.postgres import emptied
from tests.unit.control_plane.routes.conftest import SPEC, control_plane


class Wire:
    """A proxy before the server that can be cut: packets are still acknowledged, but nothing is forwarded."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        host = parsed.host or str(parsed.query["host"])
        self._target = f"{host}/.s.PGSQL.{parsed.port or 5432}" if host.startswith("/") else (host, parsed.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = parsed.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
        self.forwards = threading.Event()
        self.forwards.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                family = socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
                server = socket.socket(family)
                server.connect(self._target)
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.forwards.wait()
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(postgres_url: str) -> Iterator[Wire]:
    with closing(Wire(postgres_url)) as wire:
        yield wire


def ask(database: Database, between: Callable[[], None] = lambda: None) -> None:
    with database.begin_write() as session:
        session.execute(text("SELECT 1"))
        between()
        session.execute(text("SELECT 2"))


def test_a_connection_that_goes_silent_is_given_up(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent connection is given up in the pool, in a transaction and while connecting; later ones work again."""
    monkeypatch.setattr(database_session, "_CLIENT_GRACE_S", 0.0)
    with closing(Database(wire.url, Timeouts(connect_s=2, statement_s=0.5))) as database:
        ask(database)
        with pytest.raises(DatabaseUnavailableError, match="no answer within"):
            ask(database, between=wire.forwards.clear)
        with pytest.raises(DatabaseUnavailableError):
            ask(database)
        wire.forwards.set()
        ask(database)
        wire.forwards.clear()  # the pool has a connection, which is checked first
        with pytest.raises(DatabaseUnavailableError):
            ask(database)
        wire.forwards.set()
        ask(database)


def test_a_statement_ends_in_time_and_a_migration_takes_its_own(postgres_url: str) -> None:
    with closing(Database(postgres_url, Timeouts(statement_s=0.2))) as database:
        for _ in range(2):
            with pytest.raises(DatabaseUnavailableError, match="statement timeout"), database.begin_write() as session:
                session.execute(text("SELECT pg_sleep(30)"))
            with database._begin_migration() as session:
                session.execute(text("SELECT pg_sleep(0.4)"))
        with database.begin_read() as session:
            assert session.execute(text("SHOW statement_timeout")).scalar_one() == "200ms"


def test_a_process_that_was_frozen_in_a_transaction_has_lost_it(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the connection with an error that the driver takes for a mistake of the caller."""
    monkeypatch.setattr(database_session, "_IDLE_TIMEOUT_S", 0.05)
    with closing(Database(postgres_url)) as database:
        with pytest.raises(DatabaseUnavailableError, match="idle-in-transaction"):
            ask(database, between=lambda: time.sleep(0.5))
        ask(database)


def test_a_pooler_may_give_each_transaction_another_connection(postgres_url: str) -> None:
    """Behind PgBouncer in transaction mode prepared statements would be missing or another's, so none is prepared."""
    with closing(Database(postgres_url)) as database:
        for _ in range(20):
            with database.begin_write() as session:
                session.execute(text("SELECT :number"), {"number": 1})
        with database.begin_read() as session:
            assert session.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one() == 0


def test_connections_notice_a_lost_network_unless_the_address_says_otherwise() -> None:
    settings = Settings(database_tcp_timeout_s=40, database_pool_recycle_s=7, _env_file=None)
    timeouts = Timeouts(tcp_s=settings.database_tcp_timeout_s, recycle_s=settings.database_pool_recycle_s)
    own = make_engine_options(make_url("postgresql+psycopg://db/swiftkv?connect_timeout=3&keepalives_idle=1"), timeouts)
    assert own == {
        "pool_pre_ping": True,
        "pool_recycle": 7,
        "connect_args": {
            "keepalives": 1,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": 40_000,
            "prepare_threshold": None,
        },
    }
    assert "connect_args" not in make_engine_options(make_url("mysql://db/swiftkv"), timeouts)


def test_a_read_only_primary_is_unavailable_and_not_ready(postgres_url: str, tmp_path: Path) -> None:
    """Once a primary is demoted, reads are answered, writes are refused with 503, and readiness fails."""
    demoted = threading.Event()

    def begin(connection: Connection) -> None:
        if demoted.is_set():
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    with closing(Database(emptied(postgres_url))) as database:
        database.upgrade()
        event.listen(database._engine, "begin", begin)
        parts, settings = make_components(database, LocalObjectStore(tmp_path)), Settings(home=tmp_path, _env_file=None)
        with control_plane(parts, settings) as client:
            demoted.set()
            with pytest.raises(DatabaseUnavailableError, match="read-only"), database.begin_write() as session:
                session.execute(text("INSERT INTO key_uses VALUES ('a', 1)"))
            assert client.get("/jobs").json()["data"] == []
            refused = client.post("/jobs", json=SPEC)
            assert (refused.status_code, refused.json()["code"]) == (503, "database_unavailable"), refused.text
            assert "read-only" in refused.json()["detail"]
            for path in ("/readyz", "/readyz/database"):
                answer = client.get(path)
                assert (answer.status_code, "read-only" in answer.text) == (503, True)
            assert client.get("/healthz").status_code == 200, "a restart would not help"


@pytest.mark.parametrize("number", [1, 3, 8, 13])
def test_a_migration_that_meets_a_read_only_server_changes_nothing_and_can_be_repeated(
    postgres_url: str, number: int
) -> None:
    """Writes are refused from the `number`-th CREATE or ALTER on."""
    with closing(Database(emptied(postgres_url))) as database:
        database.downgrade("0005")
        statements = 0

        def demote(connection: Connection, cursor: object, statement: str, *_: object) -> None:
            nonlocal statements
            if statement.lstrip().startswith(("CREATE", "ALTER")):
                statements += 1
                if statements == number:
                    connection.exec_driver_sql("SET TRANSACTION READ ONLY")

        event.listen(database._engine, "before_cursor_execute", demote)
        with pytest.raises(DatabaseUnavailableError, match="read-only"):
            database.upgrade()
        event.remove(database._engine, "before_cursor_execute", demote)
        assert statements == number, "no statement followed"
        with database.begin_read() as session:
            assert get_current_revision(session.connection()) == "0005"
        database.upgrade()
        database.check_schema()


def test_a_file_that_cannot_be_written_is_not_ready(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite_database.check_available()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(DatabaseUnavailableError, match="read-only"):
        sqlite_database.check_available()
