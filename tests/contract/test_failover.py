"""A PostgreSQL with a standby that takes over: an address that names both connects to the one that takes writes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import text

from swiftkv_platform.control_plane.database import session as database_session
from swiftkv_platform.control_plane.database.session import Database, Timeouts
from swiftkv_platform.errors import DatabaseUnavailableError
from tests.support.parameters import few
from tests.support.rays import free_port
from tests.support.requirements import required_module


class Server:
    """A server of a pair, in a directory of its own. `user`: who runs it if the tests run as root, which it refuses."""

    def __init__(self, directory: Path, programs: Path, user: str | None) -> None:
        self.directory, self.port = directory, free_port()
        self._programs, self._user = programs, user

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self.directory), *arguments]
        subprocess.run(command, user=self._user, check=True, stdout=subprocess.DEVNULL, cwd="/")

    def control(self, *arguments: str) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k '' -c fsync=off"
        self.run("pg_ctl", "-w", "-l", f"{self.directory}.log", "-o", options, *arguments)

    def demote(self) -> None:
        """Make the server refuse writes and keep its connections."""
        import psycopg

        with psycopg.connect(f"host=127.0.0.1 port={self.port} user=postgres", autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")

    def freeze(self) -> None:
        """Suspend the server: it answers nothing, but packets are still acknowledged."""
        for process in self._processes():
            process.suspend()

    def kill(self) -> None:
        """Kill the server, if it runs."""
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            for process in self._processes():
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        main = psutil.Process(int((self.directory / "postmaster.pid").read_text().split()[0]))
        return [main, *main.children(recursive=True)]


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    """A primary and its standby, both running."""
    pgserver = required_module("pgserver")
    programs, user = Path(pgserver.__file__).parent / "pginstall" / "bin", None
    directory = Path(tempfile.mkdtemp(prefix="pg-"))
    if os.geteuid() == 0:
        from pgserver import utils

        user = "pgserver"
        utils.ensure_user_exists(user)
        utils.ensure_prefix_permissions(programs)
        for part in (programs, programs.parent / "lib"):
            utils.ensure_folder_permissions(part, stat.S_IRGRP | stat.S_IROTH | stat.S_IXGRP | stat.S_IXOTH)
        shutil.chown(directory, user)
    primary, standby = (Server(directory / name, programs, user) for name in ("primary", "standby"))
    try:
        primary.run("initdb", "--auth=trust", "-U", "postgres", "--encoding=utf8")
        primary.control("start")
        source = f"host=127.0.0.1 port={primary.port} user=postgres"
        standby.run("pg_basebackup", "-d", source, "-R", "-X", "stream", "-c", "fast")
        standby.control("start")
        yield primary, standby
    finally:
        primary.kill()
        standby.kill()
        shutil.rmtree(directory, ignore_errors=True)


def write(database: Database) -> Any:
    """Write a row; return the port of the server that took it."""
    with database.begin_write() as session:
        session.execute(text("INSERT INTO key_uses VALUES ('key', 1) ON CONFLICT DO NOTHING"))
        return session.execute(text("SELECT inet_server_port()")).scalar_one()


def keep_checking(database: Database) -> None:
    """Check until a check raises: a server takes a moment to reload its settings."""
    while True:
        database.check_available()


@pytest.mark.slow("starts two servers, and waits until connections are given up")
@pytest.mark.parametrize("end", few(["kill", "freeze", "demote"], ["kill"]))
def test_the_standby_serves_once_it_takes_writes(
    pair: tuple[Server, Server], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readiness check alone notices it, with pooled connections to the primary and before any write is refused."""
    primary, standby = pair
    monkeypatch.setattr(database_session, "_CLIENT_GRACE_S", 0.0)
    hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in pair)
    url = f"postgresql+psycopg://postgres@/postgres?{hosts}&target_session_attrs=read-write"
    with closing(Database(url, Timeouts(connect_s=2, statement_s=0.5))) as database:
        database.upgrade()
        assert write(database) == primary.port
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(database.begin_read()).execute(text("SELECT 1"))
        getattr(primary, end)()
        with pytest.raises(DatabaseUnavailableError):
            keep_checking(database)
        standby.control("promote")
        database.check_available()
        assert write(database) == standby.port
