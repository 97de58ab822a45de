"""Rows of leases: taking, renewing and giving up. Knows neither loops nor what is done under a lease."""

from __future__ import annotations

from sqlalchemy import ColumnElement, exists, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.base import Fence
from swiftkv_platform.control_plane.database.paging import Store
from swiftkv_platform.control_plane.database.tables import LeaseRow
from swiftkv_platform.errors import LeaseLostError

_NOT_HELD = ""
_LONGEST_S = 120.0
"""Seconds ahead to which no lease goes, with room for clocks that differ."""


class Leases(Store):
    """Leases, each held by one process at a time, until a time. Both methods raise `DatabaseUnavailableError`."""

    def take(self, name: str, holder: str, *, now: float, until: float) -> int | None:
        """Take or renew a lease. Returns its token, or None while another holder's lease has not expired.

        A lease that would last longer than any has expired: its holder's clock has been set back since. The token is at
        least 1, increases each time that another holder takes the lease, and stays the same on renewal.
        """
        row = update(LeaseRow).where(LeaseRow.name == name)
        renew = row.where(LeaseRow.holder == holder).values(expires_at=until)
        has_run_out = or_(LeaseRow.expires_at <= now, LeaseRow.expires_at > now + _LONGEST_S)
        succeed = row.where(has_run_out).values(holder=holder, expires_at=until, token=LeaseRow.token + 1)
        try:
            with self._database.writing() as session:
                for statement in (renew, succeed):
                    token: int | None = session.scalar(statement.returning(LeaseRow.token))
                    if token is not None:
                        return token
                session.execute(insert(LeaseRow).values(name=name, holder=holder, expires_at=until, token=1))
        except IntegrityError:
            return None  # held by another
        return 1

    def give_up(self, name: str, holder: str) -> None:
        """Free the lease if `holder` has it."""
        mine = update(LeaseRow).where(LeaseRow.name == name, LeaseRow.holder == holder)
        with self._database.writing() as session:
            session.execute(mine.values(holder=_NOT_HELD, expires_at=0.0))  # the row keeps the token


def holds(fence: Fence) -> ColumnElement[bool]:
    """Return the condition that the fence's holder still has the lease, for the statement that it guards."""
    return exists(
        select(LeaseRow.name).where(
            LeaseRow.name == fence.name, LeaseRow.holder == fence.holder, LeaseRow.token == fence.token
        )
    )


def check_fence(session: Session, fence: Fence | None) -> None:
    """Raise `LeaseLostError` if another holder has taken the lease."""
    if fence is not None and not session.scalar(select(holds(fence))):
        raise lease_lost(fence.name)


def lease_lost(name: str) -> LeaseLostError:
    message = f"the lease {name!r} is no longer held by this control plane; another one may hold it now"
    return LeaseLostError(message, field="lease", value=name)
