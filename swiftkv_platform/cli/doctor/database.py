"""Check of the database: reachable, with the schema of this program. An SQLite file is opened to be read only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError

if TYPE_CHECKING:
    from sqlalchemy import URL
    from sqlalchemy.orm import Session

_UPGRADE = "python -m swiftkv_platform.database"
_SHORTEST_WAIT_S = 2
"""libpq waits no shorter."""
_REMEDIES = {
    "password authentication failed": "correct user and password in SWIFTKV_DATABASE_URL",
    "no password supplied": "give user and password in SWIFTKV_DATABASE_URL",
    "role": "create the role, or correct the user in SWIFTKV_DATABASE_URL",
    "does not exist": "create the database (createdb), or correct its name in SWIFTKV_DATABASE_URL",
}
"""Remedies by what PostgreSQL says."""


def examine_database(surroundings: Surroundings) -> Finding:
    """Connect, and compare the schema's revision."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(surroundings.settings.resolved_database_url)
    except ArgumentError:
        return _bad_address("SWIFTKV_DATABASE_URL is no SQLAlchemy URL.")
    if url.get_backend_name() == "sqlite":
        return _examine_file(url)
    return _examine_server(url, surroundings.timeout_s)


@contextmanager
def session_on_server(url: URL, timeout_s: float) -> Iterator[Session]:
    """A transaction on a database that is no file; the server has half the time to let this process in.

    Raises:
        InvalidInputError: an address that no installed driver understands.
        DatabaseUnavailableError: the server does not answer, or refuses.
    """
    from swiftkv_platform.database.session import Database

    wait_s = max(_SHORTEST_WAIT_S, int(timeout_s / 2))
    address = url.update_query_dict({"connect_timeout": str(wait_s)}).render_as_string(hide_password=False)
    with closing(Database(address)) as database, database.reading() as session:
        yield session


def _examine_file(url: URL) -> Finding:
    from swiftkv_platform.database.session import known_revisions, newest_revision

    path = Path(url.database or "")
    if not url.database or not path.exists():
        return Finding("ok", f"{path} is made by the first start.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.Error as error:
        return Finding("failed", f"{path} cannot be read: {error}.", "restore it from a backup, or name another file")
    present, wanted = (rows[0][0] if rows else None), newest_revision()
    if present == wanted:
        return Finding("ok", f"{path} has the newest schema, {wanted}.")
    if present is not None and present not in known_revisions():
        return _newer(present, wanted)
    return Finding("ok", f"{path} has schema {present or 'none'}; the next start brings it to {wanted}.")


def _examine_server(url: URL, timeout_s: float) -> Finding:
    from swiftkv_platform.database.session import current_revision, known_revisions, newest_revision

    place = url.render_as_string(hide_password=True)
    try:
        with session_on_server(url, timeout_s) as session:
            present, wanted = current_revision(session.connection()), newest_revision()
    except InvalidInputError as error:
        return _bad_address(one_line(error))
    except DatabaseUnavailableError as error:
        text = one_line(error)
        remedy = next((advice for sign, advice in _REMEDIES.items() if sign in text), None)
        return Finding("failed", text, remedy or "start the server, or correct host and port in SWIFTKV_DATABASE_URL")
    if present == wanted:
        return Finding("ok", f"{place} answers and has the newest schema, {wanted}.")
    if present is not None and present not in known_revisions():
        return _newer(present, wanted)
    return Finding(
        "failed", f"{place} has schema {present or 'none'}, and this program needs {wanted}.", f"run {_UPGRADE}"
    )


def _newer(present: str, wanted: str) -> Finding:
    message = f"The schema is {present}, which a newer version of this program made; this one knows up to {wanted}."
    return Finding("failed", message, f"install that version, or go back with it: {_UPGRADE} --back-to {wanted}")


def _bad_address(message: str) -> Finding:
    return Finding("failed", message, "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME would do")
