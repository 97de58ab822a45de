"""The loops of a control plane, and the leases that elect the one control plane that runs each.

A lease is renewed while a step runs, so that no step outlasts it. A control plane that was frozen for longer finds its
lease lost: `check_leading` refuses new actions, and updates carry the lease's token, which the database compares.
Actions already under way are harmless: every update names the version it changes, and a submission id can be used once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, exists, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.base import Clock, FencingToken, is_due
from swiftkv_platform.control_plane.database.session import Repository
from swiftkv_platform.control_plane.database.tables import LeaseRow
from swiftkv_platform.errors import DatabaseUnavailableError, LeaseLostError, SwiftKVError
from swiftkv_platform.logs import get_logger

_NO_HOLDER = ""
_MAX_LEASE_EXPIRY_S = 120.0
"""Max seconds until a lease expires, with a margin for clock skew. A later expiry shows that a clock was set back."""


class Leases(Repository):
    """Leases in the database, each held by one process until it expires. Both methods raise
    `DatabaseUnavailableError`."""

    def acquire(self, name: str, holder: str, *, now: float, until: float) -> int | None:
        """Take or renew a lease. Returns its token, or None while another holder's lease has not expired.

        A lease that would last longer than any has expired: its holder's clock has been set back since. The token is at
        least 1, increases each time that another holder takes the lease, and stays the same on renewal.
        """
        # 1. renew the own lease  2. else acquire an expired one  3. else create the row
        row = update(LeaseRow).where(LeaseRow.name == name)
        renew = row.where(LeaseRow.holder == holder).values(expires_at=until)
        has_run_out = or_(LeaseRow.expires_at <= now, LeaseRow.expires_at > now + _MAX_LEASE_EXPIRY_S)
        succeed = row.where(has_run_out).values(holder=holder, expires_at=until, token=LeaseRow.token + 1)
        try:
            with self._database.begin_write() as session:
                for statement in (renew, succeed):
                    token: int | None = session.scalar(statement.returning(LeaseRow.token))
                    if token is not None:
                        return token
                session.execute(insert(LeaseRow).values(name=name, holder=holder, expires_at=until, token=1))
        except IntegrityError:
            return None  # held by another
        return 1

    def release(self, name: str, holder: str) -> None:
        """Release the lease if `holder` has it."""
        mine = update(LeaseRow).where(LeaseRow.name == name, LeaseRow.holder == holder)
        with self._database.begin_write() as session:
            session.execute(mine.values(holder=_NO_HOLDER, expires_at=0.0))  # the row keeps the token


def make_lease_condition(fence: FencingToken) -> ColumnElement[bool]:
    """Return the SQL condition that the fence's holder still has the lease, to guard a statement."""
    return exists(
        select(LeaseRow.name).where(
            LeaseRow.name == fence.name, LeaseRow.holder == fence.holder, LeaseRow.token == fence.token
        )
    )


def check_fence(session: Session, fence: FencingToken | None) -> None:
    """Raise `LeaseLostError` if another holder has acquired the lease."""
    if fence is not None and not session.scalar(select(make_lease_condition(fence))):
        raise _make_lease_lost_error(fence.name)


def _make_lease_lost_error(name: str) -> LeaseLostError:
    message = f"the lease {name!r} is no longer held by this control plane; another one may hold it now"
    return LeaseLostError(message, field="lease", value=name)


LEASE_S = 5.0
"""Max seconds until another control plane replaces a dead one."""
MAX_LEASE_S = 60.0
"""Max seconds of a lease with a slow database, where a shorter lease would expire before it is granted."""
_RENEWALS_PER_LEASE = 3
_ACQUISITIONS_PER_LEASE = 4


class Leadership:
    """Leader election for the loop `name`: the process `holder` leads, or stands by. `lease_s`: seconds of the lease
    unless it is renewed."""

    def __init__(self, leases: Leases, name: str, holder: str, clock: Clock, *, lease_s: float = LEASE_S) -> None:
        self._leases = leases
        self._name = name
        self._holder = holder
        self._clock = clock
        self._lease_s = lease_s
        self._acquire_seconds = 0.0
        """Seconds that acquiring the latest lease took."""
        self._until = 0.0
        self._fence: FencingToken | None = None
        self._log = get_logger(loop=name)

    @property
    def fence(self) -> FencingToken:
        """Fencing token for writes under the lease. Raises `LeaseLostError` while another process leads."""
        fence = self._fence
        if fence is None:
            raise _make_lease_lost_error(self._name)
        return fence

    def check_leading(self) -> None:
        """Raise `LeaseLostError` unless this process leads now."""
        if self._fence is None or self._clock() >= self._until:
            raise _make_lease_lost_error(self._name)

    def guard_step(self, step: Callable[[], None]) -> Callable[[], None]:
        """Wrap `step` to do nothing while another process leads. Raises `DatabaseUnavailableError`, and
        `LeaseLostError` if the lease expires during the step; a loop whose lease always expires thus stalls."""

        def step_as_leader() -> None:
            led = self._fence is not None
            leads = self._acquire()
            if leads != led:
                self._log.info("became leader" if leads else "no longer leader", holder=self._holder)
            if not leads:
                return
            with self._renew_during():
                step()

        return step_as_leader

    def release(self) -> None:
        """Release the lease, so that another process may lead at once. Raises `DatabaseUnavailableError`."""
        if self._fence is not None:
            self._leases.release(self._name, self._holder)
            self._fence = None

    def _acquire(self) -> bool:
        now = self._clock()
        until = now + max(self._lease_s, min(_ACQUISITIONS_PER_LEASE * self._acquire_seconds, MAX_LEASE_S))
        token = self._leases.acquire(self._name, self._holder, now=now, until=until)
        self._acquire_seconds, self._until = self._clock() - now, until
        self._fence = None if token is None else FencingToken(self._name, self._holder, token)
        return token is not None

    @contextmanager
    def _renew_during(self) -> Iterator[None]:
        """Renew the lease until the context ends."""
        over = threading.Event()
        renewer = threading.Thread(target=self._run_renewals, args=(over,), name=f"{self._name} lease", daemon=True)
        renewer.start()
        try:
            yield
        finally:
            over.set()
            renewer.join()

    def _run_renewals(self, over: threading.Event) -> None:
        began_with = self._fence
        while not over.wait(self._lease_s / _RENEWALS_PER_LEASE):
            try:
                if not self._acquire() or self._fence != began_with:
                    self._fence = None  # another process led in between: this step's state may be stale
                    return
            except DatabaseUnavailableError as error:
                self._log.warning("lease not renewed", reason=error.message)  # the lease then expires


@dataclass
class Backoff:
    """Exponential backoff per name."""

    first_s: float
    max_s: float
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def is_ready(self, name: str, now: float) -> bool:
        return is_due(self._not_before.get(name, now), now, within=self.max_s)

    def record_failure(self, name: str, now: float) -> float:
        """Count a failure. Returns the seconds until the next attempt."""
        failures = self._failures.get(name, 0)
        delay = min(self.first_s * 2.0 ** min(failures, 16), self.max_s)
        self._failures[name] = failures + 1
        self._not_before[name] = now + delay
        return delay

    def list_failed(self) -> set[str]:
        """Return the names whose latest attempt failed."""
        return set(self._failures)

    def list_waiting(self, now: float) -> set[str]:
        """Return the names whose next attempt is not due yet."""
        return {name for name in self._not_before if not self.is_ready(name, now)}

    def record_success(self, name: str) -> None:
        self._failures.pop(name, None)
        self._not_before.pop(name, None)

    def retain_only(self, names: Set[str]) -> None:
        """Forget the failures of names that are not in `names`."""
        for name in [*(self._failures.keys() - names)]:
            self.record_success(name)


_MAX_PAUSE_S = 30.0
_STALLED_AFTER_S = 90.0
"""Max seconds without a completed step, in addition to the interval: three max pauses after failures."""


_HUNG_AFTER_S = 300.0
"""Max seconds of one step. Steps have a bounded size, and their requests have shorter timeouts."""


class ControlLoop:
    """Thread that runs `step` every `interval_s` seconds, and less often after failures."""

    def __init__(self, name: str, step: Callable[[], None], *, interval_s: float, clock: Clock) -> None:
        self.name = name
        self.last_success: float | None = None
        """Unix seconds at which a step last completed."""
        self._started: float | None = None
        self._step_began: float | None = None
        self._step = step
        self._interval_s = interval_s
        self._clock = clock
        self._backoff = Backoff(first_s=interval_s, max_s=_MAX_PAUSE_S)
        self._log = get_logger(loop=name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stalled(self) -> bool:
        """Whether no step has completed for longer than a short outage takes. False while the loop stands by."""
        since = self._started if self.last_success is None else self.last_success
        return since is not None and self._clock() - since > self._interval_s + _STALLED_AFTER_S

    @property
    def is_hung(self) -> bool:
        """Whether a step has run for so long that it will never return, or the thread has ended; only a restart of
        the process helps. Failed steps do not count."""
        if self._started is None or self._stop.is_set():
            return False
        began = self._step_began
        return not self._thread.is_alive() or (began is not None and self._clock() - began > _HUNG_AFTER_S)

    def start(self) -> None:
        self._started = self._clock()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the loop, and wait up to `timeout_s` for its step. A longer step ends with the process, as in a
        crash."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self._run_step())

    def _run_step(self) -> float:
        """Run the step. Returns the seconds until the next one."""
        self._step_began = self._clock()
        try:
            self._step()
        except SwiftKVError as error:
            pause = self._backoff.record_failure(self.name, self._clock())
            self._log.warning("control loop step failed", code=error.code, reason=error.message, retry_in_s=pause)
            return pause
        except Exception:
            pause = self._backoff.record_failure(self.name, self._clock())
            self._log.exception("control loop step failed", retry_in_s=pause)
            return pause
        finally:
            self._step_began = None
        self._backoff.record_success(self.name)
        self.last_success = self._clock()
        return self._interval_s
