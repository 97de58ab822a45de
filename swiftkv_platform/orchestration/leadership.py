"""One control plane of several turns a loop, as long as it holds the loop's lease. Knows no database and no loop.

A lease keeps control planes out of each other's way; it is not what keeps them correct. A step that outlasts its lease
is harmless: every update names the version it changes, and a submission id can be used once.
"""

from __future__ import annotations

from collections.abc import Callable

from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.ports import Clock, Leases

LEASE_S = 5.0
"""Seconds that the others wait for a control plane that has died, at most."""


class Leadership:
    """Leads `name` in the process that calls itself `holder`, or stands by."""

    def __init__(self, leases: Leases, name: str, holder: str, clock: Clock) -> None:
        self._leases = leases
        self._name = name
        self._holder = holder
        self._clock = clock
        self._leading = False

    def guard(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, which then does nothing while another process leads. Raises `DatabaseUnavailableError`."""

        def guarded() -> None:
            now = self._clock()
            leading = self._leases.take(self._name, self._holder, now=now, until=now + LEASE_S)
            if leading != self._leading:
                get_logger(loop=self._name).info("leads" if leading else "stands by", holder=self._holder)
                self._leading = leading
            if leading:
                step()

        return guarded

    def resign(self) -> None:
        """Let another process lead at once. Raises `DatabaseUnavailableError`."""
        if self._leading:
            self._leases.give_up(self._name, self._holder)
            self._leading = False
