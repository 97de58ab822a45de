"""One control plane of several turns a loop, as long as it holds the loop's lease. Knows no database and no loop.

A lease is renewed while a step runs, so that no step outlasts it. A control plane that was frozen for longer finds it
gone: `check` refuses what has not begun, and updates carry the lease's token, which the database compares. What was
under way is harmless: every update names the version it changes, and a submission id can be used once.
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
"""Seconds that the others wait for a control plane that has died, at most."""
LONGEST_LEASE_S = 60.0
"""Seconds that they wait at most, where the database needs so long to give a lease that a shorter one would run out."""
_RENEWALS_PER_LEASE = 3
_TAKES_PER_LEASE = 4


class Lease(Protocol):
    """Right to act, held until it is lost."""

    @property
    def fence(self) -> Fence | None:
        """Mark of the lease for what is stored under it; None where no other may hold it. Raises `LeaseLostError`."""
        ...

    def check(self) -> None:
        """Raises `LeaseLostError` unless it is held at this moment."""
        ...


class _Undisputed:
    @property
    def fence(self) -> None:
        return None

    def check(self) -> None:
        """There is no other."""


UNDISPUTED: Lease = _Undisputed()
"""Lease of a process that has no other beside it."""


class Leadership:
    """Leads `name` in the process that calls itself `holder`, or stands by. `lease_s`: how long the lease lasts unless
    it is renewed."""

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
        """Mark of the lease. Raises `LeaseLostError` while another process leads."""
        fence = self._fence
        if fence is None:
            raise self._lost()
        return fence

    def check(self) -> None:
        """Raises `LeaseLostError` unless this process leads at this moment."""
        if self._fence is None or self._clock() >= self._until:
            raise self._lost()

    def _lost(self) -> LeaseLostError:
        message = f"the lease {self._name!r} has run out; the control plane that holds it goes on"
        return LeaseLostError(message, field="lease", value=self._name)

    def guard(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, which then does nothing while another process leads. Raises `DatabaseUnavailableError`, and
        `LeaseLostError` for a lease that ran out in the middle of it: a loop to which that happens each time stalls."""

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
        """Let another process lead at once. Raises `DatabaseUnavailableError`."""
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
                    self._fence = None  # it was another's in between: what this step knows may be old
                    return
            except DatabaseUnavailableError as error:
                self._log.warning("lease not renewed", reason=error.message)  # it runs out by itself
