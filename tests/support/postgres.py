"""A PostgreSQL server for tests: the one that `SWIFTKV_TEST_POSTGRES_URL` names, else one started for the session."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import text

from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import Base
from swiftkv_platform.errors import InvalidInputError
from tests.support.requirements import required_module

POSTGRES = "SWIFTKV_TEST_POSTGRES_URL"
"""Variable with the URL of a server, whose tables are dropped."""


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the SQLAlchemy URL of a server without other tables; skip the test if there is none."""
    if POSTGRES in os.environ:
        yield os.environ[POSTGRES]
        return
    pgserver = required_module("pgserver", otherwise=f", and {POSTGRES} names no PostgreSQL")
    # In /tmp: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        server = pgserver.get_server(directory, cleanup_mode=None)
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={quote(directory, safe='')}"
        finally:
            server.cleanup_mode = "stop"
            server.cleanup()


def emptied(url: str) -> str:
    """Return the URL after emptying the server's tables, or creating them anew."""
    with closing(Database(url)) as database:
        try:
            database.check_schema()
        except InvalidInputError:
            with database.begin_write() as session:
                Base.metadata.drop_all(session.connection())
                session.execute(text("DROP TABLE IF EXISTS alembic_version"))
            database.upgrade()
        else:
            with database.begin_write() as session:
                names = ", ".join(table.name for table in Base.metadata.sorted_tables)
                session.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
    return url


@contextmanager
def password_role(url: str) -> Iterator[str]:
    """Yield a role that needs its password to log in, even if the server trusts all others."""
    role = "swiftkv_with_password"
    with closing(Database(url)) as database:
        with database.begin_write() as session:
            session.execute(text(f"DROP ROLE IF EXISTS {role}"))
            session.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'right'"))
            rules = Path(str(session.execute(text("SHOW hba_file")).scalar_one()))
        # The tests' own server trusts everyone; a remote one asks for passwords anyway.
        before = rules.read_text(encoding="utf-8") if rules.is_file() else None
        try:
            if before is not None:
                rules.write_text(f"local all {role} scram-sha-256\n{before}", encoding="utf-8")
                _reload(database)
            yield role
        finally:
            if before is not None:
                rules.write_text(before, encoding="utf-8")
                _reload(database)
            with database.begin_write() as session:
                session.execute(text(f"DROP ROLE {role}"))


def _reload(database: Database) -> None:
    with database.begin_write() as session:
        session.execute(text("SELECT pg_reload_conf()"))
