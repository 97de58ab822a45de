"""Fair sharing among senders (keys of tenants, or client addresses). Knows no model and no request.

Shares: a sender that is alone may hold `max_amount` of a resource. Otherwise half of what others hold is subtracted, so
that some of it is left for a new sender. A tenant may hold twice as much, by the same rule.

Order: the tenant that has received the least service is next, and within it the sender that has received the least
("Fairness in Serving Large Language Models", https://arxiv.org/abs/2401.00588). A sender that was idle gains no credit.
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

ResultT = TypeVar("ResultT")
_MAX_REMEMBERED_NAMES = 1000
"""Max number of tenants, and of keys per tenant, whose service is remembered; the least recent is dropped."""


@dataclass(frozen=True)
class FairShare:
    """A sender's or tenant's share of a resource: the amount it holds, and its current limit."""

    name: str
    used: int
    limit: int


def find_exceeded_share(
    sender: Sender, amount: int, held_amounts: Mapping[Sender, int], max_amount: int
) -> FairShare | None:
    """Return the share that a sender would exceed with `amount` more, or None. A sender that holds nothing always gets
    one.

    Args:
        held_amounts: amount that each sender holds.
        max_amount: limit of a sender that is alone.
    """
    own = held_amounts.get(sender, 0)
    if own + amount <= 1:
        return None
    of_tenant = sum(each for other, each in held_amounts.items() if other.tenant == sender.tenant)
    of_all = sum(held_amounts.values())
    shares = (
        FairShare(
            f"caller {sender.key!r}" if sender.key else "this caller", own, _compute_limit(max_amount, of_tenant - own)
        ),
        FairShare(f"tenant {sender.tenant!r}", of_tenant, _compute_limit(2 * max_amount, of_all - of_tenant)),
    )
    return next((share for share in shares if share.used + amount > share.limit), None)


def _compute_limit(max_amount: int, held_by_others: int) -> int:
    return max(max_amount - -(-held_by_others // 2), 0)


class FairLimit:
    """A limit on the concurrent calls of each sender, as in `find_exceeded_share`."""

    def __init__(self, max_amount: int, calls: str, state: str) -> None:
        """Make a limit. Its error says "queue full: 2 of 2 {calls} of caller 'x' {state}"."""
        self._most, self._calls, self._state = max_amount, calls, state
        self._held: Counter[Sender] = Counter()

    @contextmanager
    def limit_call(self, sender: Sender) -> Iterator[None]:
        """Count a call of the sender while the context is open. Raises `QueueFullError` above the limit."""
        share = find_exceeded_share(sender, 1, self._held, self._most)
        if share is not None:
            raise QueueFullError(
                f"queue full: {share.used} of {share.limit} {self._calls} of {share.name} {self._state}; "
                "try again later"
            )
        self._held[sender] += 1
        try:
            yield
        finally:
            self._held[sender] -= 1
            if not self._held[sender]:
                del self._held[sender]


class _ServiceByName:
    """Service by name of a tenant or key, at least that of the last chosen name: idle time gives no credit."""

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._minimum = 0.0

    def __getitem__(self, name: str) -> float:
        return max(self._amounts.get(name, 0.0), self._minimum)

    def raise_minimum(self, name: str) -> None:
        self._minimum = self[name]

    def add_service(self, name: str, amount: float) -> None:
        had = self[name]
        self._amounts.pop(name, None)
        self._amounts[name] = had + amount
        if len(self._amounts) > _MAX_REMEMBERED_NAMES:
            del self._amounts[next(iter(self._amounts))]


class FairOrder:
    """Order of senders: first by the service of their tenant, then by their own."""

    def __init__(self) -> None:
        self._tenants = _ServiceByName()
        self._keys: dict[str, _ServiceByName] = {}

    def get_rank(self, sender: Sender) -> tuple[float, float]:
        """Return the sort key of a sender: service of its tenant, then its own service; the lowest is next."""
        keys = self._keys.get(sender.tenant)
        return self._tenants[sender.tenant], 0.0 if keys is None else keys[sender.key]

    def record_choice(self, sender: Sender) -> None:
        self._tenants.raise_minimum(sender.tenant)
        self._get_key_amounts(sender.tenant).raise_minimum(sender.key)

    def record_service(self, sender: Sender, amount: float) -> None:
        self._tenants.add_service(sender.tenant, amount)
        self._get_key_amounts(sender.tenant).add_service(sender.key, amount)

    def _get_key_amounts(self, tenant: str) -> _ServiceByName:
        keys = self._keys[tenant] = self._keys.pop(tenant, _ServiceByName())
        if len(self._keys) > _MAX_REMEMBERED_NAMES:
            del self._keys[next(iter(self._keys))]
        return keys


@dataclass(eq=False)
class _Waiter:
    sender: Sender
    priority: int
    arrival: int
    granted: asyncio.Future[None]


class FairSemaphore:
    """Semaphore with `size` slots, at most `max_per_sender` per sender. Waiting senders get slots in fair order of the
    time that they have held slots. For one event loop."""

    def __init__(
        self, size: int, *, max_per_sender: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_free = size
        self._max_per_sender = max_per_sender or size
        self._running: Counter[Sender] = Counter()
        self._clock = clock
        self._order = FairOrder()
        self._waiting: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._closed: SwiftKVError | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def hold_slot(self, sender: Sender, *, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a slot and hold it. A lower `priority` is served first. Raises the error of `close`."""
        release = await self.acquire(sender, priority=priority)
        try:
            yield
        finally:
            release()

    async def acquire(self, sender: Sender, *, priority: int = 0) -> Callable[[], None]:
        """Wait for a slot and return the function that releases it. Raises the error of `close`."""
        if self._closed is not None:
            raise self._closed
        if self._can_acquire(sender):
            self._grant_slot(sender)
        else:
            await self._wait_for_slot(_Waiter(sender, priority, next(self._arrivals), asyncio.Future()))
        began = self._clock()

        def release() -> None:
            self._order.record_service(sender, self._clock() - began)
            self._release_slot(sender)

        return release

    def close(self, error: SwiftKVError) -> None:
        """Raise `error` for all waiting and later callers."""
        self._closed = error
        for waiter in self._waiting:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)
        self._waiting.clear()

    async def _wait_for_slot(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self._release_slot(waiter.sender)  # it was granted and canceled at the same moment
            raise

    def _can_acquire(self, sender: Sender) -> bool:
        return self._num_free > 0 and self._running[sender] < self._max_per_sender

    def _grant_slot(self, sender: Sender) -> None:
        self._num_free -= 1
        self._running[sender] += 1
        self._order.record_choice(sender)

    def _release_slot(self, sender: Sender) -> None:
        self._num_free += 1
        self._running[sender] -= 1
        if not self._running[sender]:
            del self._running[sender]
        able = [each for each in self._waiting if self._can_acquire(each.sender)]
        if able:
            chosen = min(able, key=lambda each: (each.priority, *self._order.get_rank(each.sender), each.arrival))
            self._waiting.remove(chosen)
            self._grant_slot(chosen.sender)
            chosen.granted.set_result(None)


class FairThreadPool:
    """Thread pool that runs calls in fair order of their senders, at most `max_per_sender` per sender at a time."""

    def __init__(self, num_threads: int, name: str, *, max_per_sender: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._semaphore = FairSemaphore(num_threads, max_per_sender=max_per_sender)

    async def run(self, sender: Sender, call: Callable[[], ResultT]) -> ResultT:
        """Run `call` in a thread. Its slot is released when it ends, even if the awaiting task was canceled. Raises the
        error of `close`."""
        release, loop = await self._semaphore.acquire(sender), asyncio.get_running_loop()
        job = self._threads.submit(call)

        def release_when_done(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and no task waits
                loop.call_soon_threadsafe(release)

        job.add_done_callback(release_when_done)
        return await asyncio.wrap_future(job)

    def close(self, error: SwiftKVError) -> None:
        """Raise `error` for waiting and later calls, without waiting for running calls."""
        self._semaphore.close(error)
        self._threads.shutdown(wait=False)
