"""Fair shares and turns of senders (keys of tenants, or client addresses). Knows no model and no request.

Shares: one sender may hold `max_amount` of a resource while it is alone, and otherwise less by half of what others
hold. So something is always left for a sender that holds little. A tenant may hold twice as much in the same way.

Turns: the tenant that was served least goes next, and of its senders the one that was served least, as in "Fairness in
Serving Large Language Models" (https://arxiv.org/abs/2401.00588). Those that come back after a while owe nothing, and
have nothing saved.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from swiftkv_platform.errors import QueueFullError, SwiftKVError
from swiftkv_platform.web.limiters import Sender

R = TypeVar("R")
_MAX_REMEMBERED_NAMES = 1000
"""Tenants, and keys of each, whose service is remembered; the least recent one is forgotten."""


@dataclass(frozen=True)
class FairShare:
    """A sender's or its tenant's share of a resource: the amount that it holds, and the most that it may hold now."""

    name: str
    held: int
    limit: int


def find_exceeded_share(sender: Sender, amount: int, held: Mapping[Sender, int], max_amount: int) -> FairShare | None:
    """Return the share that a sender would exceed with `amount` more; None if it may have that. `held`: what all
    senders hold; `max_amount`: what one sender may hold alone. A sender that holds nothing may always have one."""
    own = held.get(sender, 0)
    if own + amount <= 1:
        return None
    of_tenant = sum(each for other, each in held.items() if other.tenant == sender.tenant)
    of_all = sum(held.values())
    shares = (
        FairShare(
            f"caller {sender.key!r}" if sender.key else "this caller", own, _compute_limit(max_amount, of_tenant - own)
        ),
        FairShare(f"tenant {sender.tenant!r}", of_tenant, _compute_limit(2 * max_amount, of_all - of_tenant)),
    )
    return next((share for share in shares if share.held + amount > share.limit), None)


def _compute_limit(max_amount: int, held_by_others: int) -> int:
    """Return what one may hold beside others."""
    return max(max_amount - -(-held_by_others // 2), 0)


class FairLimit:
    """A limit on calls under way, of which each sender may have `max_amount` alone, as in `find_exceeded_share`."""

    def __init__(self, max_amount: int, calls: str, state: str) -> None:
        """Make a limit whose refusals say that a number of `calls` of a sender are in a `state`."""
        self._most, self._calls, self._state = max_amount, calls, state
        self._held: Counter[Sender] = Counter()

    @contextmanager
    def hold(self, sender: Sender) -> Iterator[None]:
        """Count a call until the block ends. Raises `QueueFullError`."""
        share = find_exceeded_share(sender, 1, self._held, self._most)
        if share is not None:
            raise QueueFullError(
                f"queue full: {share.held} of {share.limit} {self._calls} of {share.name} {self._state}; "
                "try again later"
            )
        self._held[sender] += 1
        try:
            yield
        finally:
            self._held[sender] -= 1
            if not self._held[sender]:
                del self._held[sender]


class _ServedAmounts:
    """Amounts of service by name. A name that has had less than the last chosen one counts as if it had had as much."""

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._floor = 0.0

    def __getitem__(self, name: str) -> float:
        return max(self._amounts.get(name, 0.0), self._floor)

    def raise_floor(self, name: str) -> None:
        self._floor = self[name]

    def add_service(self, name: str, amount: float) -> None:
        had = self[name]
        self._amounts.pop(name, None)
        self._amounts[name] = had + amount
        if len(self._amounts) > _MAX_REMEMBERED_NAMES:
            del self._amounts[next(iter(self._amounts))]


class FairOrder:
    """Order of senders by the service that their tenants and they have had."""

    def __init__(self) -> None:
        self._tenants = _ServedAmounts()
        self._keys: dict[str, _ServedAmounts] = {}

    def get_rank(self, sender: Sender) -> tuple[float, float]:
        """Return the place in the order; the lowest goes next."""
        keys = self._keys.get(sender.tenant)
        return self._tenants[sender.tenant], 0.0 if keys is None else keys[sender.key]

    def record_choice(self, sender: Sender) -> None:
        """Record that the sender is served next."""
        self._tenants.raise_floor(sender.tenant)
        self._get_key_amounts(sender.tenant).raise_floor(sender.key)

    def record_service(self, sender: Sender, amount: float) -> None:
        """Record service of a sender, in any unit."""
        self._tenants.add_service(sender.tenant, amount)
        self._get_key_amounts(sender.tenant).add_service(sender.key, amount)

    def _get_key_amounts(self, tenant: str) -> _ServedAmounts:
        keys = self._keys[tenant] = self._keys.pop(tenant, _ServedAmounts())
        if len(self._keys) > _MAX_REMEMBERED_NAMES:
            del self._keys[next(iter(self._keys))]
        return keys


@dataclass(eq=False)
class _Waiter:
    sender: Sender
    priority: int
    number: int
    granted: asyncio.Future[None]


class FairSemaphore:
    """At most `size` turns at a time, `max_per_sender` of a sender, granted in fair order of the time that they took.
    For one event loop."""

    def __init__(
        self, size: int, *, max_per_sender: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_free = size
        self._max_per_sender = max_per_sender or size
        self._running: Counter[Sender] = Counter()
        self._clock = clock
        self._order = FairOrder()
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._closed: SwiftKVError | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def hold(self, sender: Sender, *, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a turn and hold it. `priority`: lower goes first. Raises the error of `close`."""
        release = await self.acquire(sender, priority=priority)
        try:
            yield
        finally:
            release()

    async def acquire(self, sender: Sender, *, priority: int = 0) -> Callable[[], None]:
        """Wait for a turn and return the function that ends it. Raises the error of `close`."""
        if self._closed is not None:
            raise self._closed
        if self._can_acquire(sender):
            self._grant(sender)
        else:
            await self._wait(_Waiter(sender, priority, next(self._numbers), asyncio.Future()))
        began = self._clock()

        def release() -> None:
            self._order.record_service(sender, self._clock() - began)
            self._release(sender)

        return release

    def close(self, error: SwiftKVError) -> None:
        """Raise `error` for all who wait, and who come later."""
        self._closed = error
        for waiter in self._waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        self._waiting.clear()

    async def _wait(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self._release(waiter.sender)  # it was granted in the moment when it was cancelled
            raise

    def _can_acquire(self, sender: Sender) -> bool:
        return self._num_free > 0 and self._running[sender] < self._max_per_sender

    def _grant(self, sender: Sender) -> None:
        self._num_free -= 1
        self._running[sender] += 1
        self._order.record_choice(sender)

    def _release(self, sender: Sender) -> None:
        self._num_free += 1
        self._running[sender] -= 1
        if not self._running[sender]:
            del self._running[sender]
        able = [each for each in self._waiting if self._can_acquire(each.sender)]
        if able:
            chosen = min(able, key=lambda each: (each.priority, *self._order.get_rank(each.sender), each.number))
            self._waiting.remove(chosen)
            self._grant(chosen.sender)
            chosen.granted.set_result(None)


class FairThreadPool:
    """Threads that run calls in fair order of their senders, `max_per_sender` of a sender at a time."""

    def __init__(self, number: int, name: str, *, max_per_sender: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._semaphore = FairSemaphore(number, max_per_sender=max_per_sender)

    async def run(self, sender: Sender, call: Callable[[], R]) -> R:
        """Run `call` in a thread. A turn ends with the call, even if who waits for it is cancelled. Raises the error of
        `close`."""
        release, loop = await self._semaphore.acquire(sender), asyncio.get_running_loop()
        job = self._threads.submit(call)

        def release_when_done(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(release)

        job.add_done_callback(release_when_done)
        return await asyncio.wrap_future(job)

    def close(self, error: SwiftKVError) -> None:
        """Refuse calls that have not begun with `error`, without waiting for running ones."""
        self._semaphore.close(error)
        self._threads.shutdown(wait=False)
