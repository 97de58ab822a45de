"""Election of the one control plane that runs a loop: the holder of the loop's lease. Knows no database and no loop.

A lease is renewed while a step runs, so that no step outlasts it. A control plane that was frozen for longer finds its
lease lost: `check` refuses what has not begun, and updates carry the lease's token, which the database compares.
Actions already under way are harmless: every update names the version it changes, and a submission id can be used once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from swiftkv_platform.control_plane.base import Clock, Fence
from swiftkv_platform.control_plane.loops.rows import Leases
from swiftkv_platform.errors import DatabaseUnavailableError, LeaseLostError
from swiftkv_platform.logs import get_logger

LEASE_S = 5.0
"""Most seconds until another control plane takes over from one that has died."""
LONGEST_LEASE_S = 60.0
"""The same with a database so slow that a shorter lease would expire before it is granted."""
_RENEWALS_PER_LEASE = 3
_TAKES_PER_LEASE = 4


class Lease(Protocol):
    """Right to act, held until it is lost."""

    @property
    def fence(self) -> Fence | None:
        """Fencing token for what is stored under the lease; None if no other process may hold it. Raises
        `LeaseLostError`."""
        ...

    def check(self) -> None:
        """Raise `LeaseLostError` unless the lease is held at this moment."""
        ...


class _Undisputed:
    @property
    def fence(self) -> None:
        return None

    def check(self) -> None:
        """Do nothing: there is no other holder."""


UNDISPUTED: Lease = _Undisputed()
"""Lease of a process that runs alone."""


class Leadership:
    """Leadership of the loop `name`, which the process `holder` has or waits for. `lease_s`: seconds that the lease
    lasts unless it is renewed."""

    def __init__(self, leases: Leases, name: str, holder: str, clock: Clock, *, lease_s: float = LEASE_S) -> None:
        self._leases = leases
        self._name = name
        self._holder = holder
        self._clock = clock
        self._lease_s = lease_s
        self._took = 0.0
        """Seconds that the database needed for the latest lease."""
        self._until = 0.0
        self._fence: Fence | None = None
        self._log = get_logger(loop=name)

    @property
    def fence(self) -> Fence:
        """Fencing token of the lease. Raises `LeaseLostError` while another process leads."""
        fence = self._fence
        if fence is None:
            raise self._lost()
        return fence

    def check(self) -> None:
        """Raise `LeaseLostError` unless this process leads at this moment."""
        if self._fence is None or self._clock() >= self._until:
            raise self._lost()

    def _lost(self) -> LeaseLostError:
        message = f"the lease {self._name!r} has expired; another control plane may hold it now"
        return LeaseLostError(message, field="lease", value=self._name)

    def guard(self, step: Callable[[], None]) -> Callable[[], None]:
        """Wrap `step` so that it does nothing while another process leads. Raises `DatabaseUnavailableError`, and
        `LeaseLostError` if the lease expires during the step, so that a loop to which this always happens stalls."""

        def guarded() -> None:
            led = self._fence is not None
            leads = self._take()
            if leads != led:
                self._log.info("leads" if leads else "stands by", holder=self._holder)
            if not leads:
                return
            with self._renewing():
                step()

        return guarded

    def resign(self) -> None:
        """Give up the lease, so that another process may lead at once. Raises `DatabaseUnavailableError`."""
        if self._fence is not None:
            self._leases.give_up(self._name, self._holder)
            self._fence = None

    def _take(self) -> bool:
        now = self._clock()
        until = now + max(self._lease_s, min(_TAKES_PER_LEASE * self._took, LONGEST_LEASE_S))
        token = self._leases.take(self._name, self._holder, now=now, until=until)
        self._took, self._until = self._clock() - now, until
        self._fence = None if token is None else Fence(self._name, self._holder, token)
        return token is not None

    @contextmanager
    def _renewing(self) -> Iterator[None]:
        """Renew the lease until the context ends."""
        over = threading.Event()
        renewer = threading.Thread(target=self._renew, args=(over,), name=f"{self._name} lease", daemon=True)
        renewer.start()
        try:
            yield
        finally:
            over.set()
            renewer.join()

    def _renew(self, over: threading.Event) -> None:
        began_with = self._fence
        while not over.wait(self._lease_s / _RENEWALS_PER_LEASE):
            try:
                if not self._take() or self._fence != began_with:
                    self._fence = None  # another process led in between: this step's state may be stale
                    return
            except DatabaseUnavailableError as error:
                self._log.warning("lease not renewed", reason=error.message)  # the lease then expires
