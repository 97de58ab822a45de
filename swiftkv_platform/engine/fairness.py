"""Fair shares and turns of senders (keys of tenants, or client addresses). Knows no model and no request.

Shares: one sender may hold `most` of a resource while it is alone, and otherwise less by half of what others hold. So
something is always left for a sender that holds little. A tenant may hold twice as much in the same way.

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
_MAX_REMEMBERED = 1000
"""Tenants, and keys of each, whose service is remembered; the least recent one is forgotten."""


@dataclass(frozen=True)
class FairShare:
    """A sender's or its tenant's share of a resource: the amount that it holds, and the most that it may hold now."""

    name: str
    held: int
    most: int


def exceeded_share(sender: Sender, amount: int, held: Mapping[Sender, int], most: int) -> FairShare | None:
    """Return the share that a sender would exceed with `amount` more; None if it may have that. `held`: what all
    senders hold; `most`: what one sender may hold alone. A sender that holds nothing may always have one."""
    own = held.get(sender, 0)
    if own + amount <= 1:
        return None
    of_tenant = sum(each for other, each in held.items() if other.tenant == sender.tenant)
    of_all = sum(held.values())
    shares = (
        FairShare(f"caller {sender.key!r}" if sender.key else "this caller", own, _left(most, of_tenant - own)),
        FairShare(f"tenant {sender.tenant!r}", of_tenant, _left(2 * most, of_all - of_tenant)),
    )
    return next((share for share in shares if share.held + amount > share.most), None)


def _left(most: int, held_by_others: int) -> int:
    """Return what one may hold beside others."""
    return max(most - -(-held_by_others // 2), 0)


class FairLimit:
    """A limit on calls under way, of which each sender may have `most` alone, as in `exceeded_share`."""

    def __init__(self, most: int, calls: str, state: str) -> None:
        """Make a limit whose refusals say that a number of `calls` of a sender are in a `state`."""
        self._most, self._calls, self._state = most, calls, state
        self._held: Counter[Sender] = Counter()

    @contextmanager
    def hold(self, sender: Sender) -> Iterator[None]:
        """Count a call until the block ends. Raises `QueueFullError`."""
        share = exceeded_share(sender, 1, self._held, self._most)
        if share is not None:
            raise QueueFullError(
                f"queue full: {share.held} of {share.most} {self._calls} of {share.name} {self._state}; try again later"
            )
        self._held[sender] += 1
        try:
            yield
        finally:
            self._held[sender] -= 1
            if not self._held[sender]:
                del self._held[sender]


class _Service:
    """Amounts of service by name. A name that has had less than the last chosen one counts as if it had had as much."""

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._floor = 0.0

    def __getitem__(self, name: str) -> float:
        return max(self._amounts.get(name, 0.0), self._floor)

    def choose(self, name: str) -> None:
        self._floor = self[name]

    def charge(self, name: str, amount: float) -> None:
        had = self[name]
        self._amounts.pop(name, None)
        self._amounts[name] = had + amount
        if len(self._amounts) > _MAX_REMEMBERED:
            del self._amounts[next(iter(self._amounts))]


class FairOrder:
    """Order of senders by the service that their tenants and they have had."""

    def __init__(self) -> None:
        self._tenants = _Service()
        self._keys: dict[str, _Service] = {}

    def rank(self, sender: Sender) -> tuple[float, float]:
        """Return the place in the order; the lowest goes next."""
        keys = self._keys.get(sender.tenant)
        return self._tenants[sender.tenant], 0.0 if keys is None else keys[sender.key]

    def choose(self, sender: Sender) -> None:
        """Record that the sender is served next."""
        self._tenants.choose(sender.tenant)
        self._keys_of(sender.tenant).choose(sender.key)

    def charge(self, sender: Sender, amount: float) -> None:
        """Record service of a sender, in any unit."""
        self._tenants.charge(sender.tenant, amount)
        self._keys_of(sender.tenant).charge(sender.key, amount)

    def _keys_of(self, tenant: str) -> _Service:
        keys = self._keys[tenant] = self._keys.pop(tenant, _Service())
        if len(self._keys) > _MAX_REMEMBERED:
            del self._keys[next(iter(self._keys))]
        return keys


@dataclass(eq=False)
class _Waiter:
    sender: Sender
    priority: int
    number: int
    granted: asyncio.Future[None]


class FairTurns:
    """At most `size` turns at a time, `of_one` of a sender, granted in fair order of the time that they took. For one
    event loop."""

    def __init__(self, size: int, *, of_one: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free = size
        self._of_one = of_one or size
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
    async def turn(self, sender: Sender, *, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a turn and hold it. `priority`: lower goes first. Raises the error of `close`."""
        end = await self.begin(sender, priority=priority)
        try:
            yield
        finally:
            end()

    async def begin(self, sender: Sender, *, priority: int = 0) -> Callable[[], None]:
        """Wait for a turn and return the function that ends it. Raises the error of `close`."""
        if self._closed is not None:
            raise self._closed
        if self._may_begin(sender):
            self._grant(sender)
        else:
            await self._wait(_Waiter(sender, priority, next(self._numbers), asyncio.Future()))
        began = self._clock()

        def end() -> None:
            self._order.charge(sender, self._clock() - began)
            self._release(sender)

        return end

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

    def _may_begin(self, sender: Sender) -> bool:
        return self._num_free > 0 and self._running[sender] < self._of_one

    def _grant(self, sender: Sender) -> None:
        self._num_free -= 1
        self._running[sender] += 1
        self._order.choose(sender)

    def _release(self, sender: Sender) -> None:
        self._num_free += 1
        self._running[sender] -= 1
        if not self._running[sender]:
            del self._running[sender]
        able = [each for each in self._waiting if self._may_begin(each.sender)]
        if able:
            chosen = min(able, key=lambda each: (each.priority, *self._order.rank(each.sender), each.number))
            self._waiting.remove(chosen)
            self._grant(chosen.sender)
            chosen.granted.set_result(None)


class FairThreads:
    """Threads that run calls in fair order of their senders, `of_one` of a sender at a time."""

    def __init__(self, number: int, name: str, *, of_one: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._turns = FairTurns(number, of_one=of_one)

    async def run(self, sender: Sender, call: Callable[[], R]) -> R:
        """Run `call` in a thread. A turn ends with the call, even if who waits for it is cancelled. Raises the error of
        `close`."""
        end, loop = await self._turns.begin(sender), asyncio.get_running_loop()
        job = self._threads.submit(call)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(end)

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def close(self, error: SwiftKVError) -> None:
        """Refuse calls that have not begun with `error`, without waiting for running ones."""
        self._turns.close(error)
        self._threads.shutdown(wait=False)
