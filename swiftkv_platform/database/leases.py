"""Leases as rows: taken, renewed and given up in one statement each. Knows neither loops nor what is done under one."""

from __future__ import annotations

from sqlalchemy import delete, insert, or_, update
from sqlalchemy.exc import IntegrityError

from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import LeaseRow


class SqlLeases:
    """`Leases` in a database that several control planes share."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, name: str, holder: str, *, now: float, until: float) -> bool:
        mine_or_over = or_(LeaseRow.holder == holder, LeaseRow.expires_at <= now)
        renew = update(LeaseRow).where(LeaseRow.name == name, mine_or_over).values(holder=holder, expires_at=until)
        try:
            with self._database.writing() as session:
                if session.connection().execute(renew).rowcount == 0:
                    session.execute(insert(LeaseRow).values(name=name, holder=holder, expires_at=until))
        except IntegrityError:
            return False  # another holder's
        return True

    def give_up(self, name: str, holder: str) -> None:
        with self._database.writing() as session:
            session.execute(delete(LeaseRow).where(LeaseRow.name == name, LeaseRow.holder == holder))
