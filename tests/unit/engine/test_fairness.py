"""Fair shares and turns: a sender leaves something for others, and does not wait for others' queues."""

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_platform.engine.fairness import FairOrder, FairSemaphore, FairThreadPool, find_exceeded_share
from swiftkv_platform.errors import EngineDeadError
from swiftkv_platform.web.limiters import Sender

EVE, AL, ANN = Sender("t", "eve"), Sender("t", "al"), Sender("other", "ann")
SENDERS = [Sender(tenant, key) for tenant in "abc" for key in "xyz"]


def take_all(sender: Sender, held: Counter[Sender], most: int) -> None:
    while find_exceeded_share(sender, 1, held, most) is None:
        held[sender] += 1


@given(order=st.lists(st.sampled_from(SENDERS), min_size=1, max_size=30), most=st.integers(1, 100))
def test_greedy_senders_always_leave_something(order: list[Sender], most: int) -> None:
    held: Counter[Sender] = Counter()
    take_all(order[0], held, most)
    assert held[order[0]] == most, "one that is alone may have as much as before"
    for sender in order[1:]:
        assert held[sender] or find_exceeded_share(sender, 1, held, most) is None, "a new one gets something"
        take_all(sender, held, most)
    assert max(held.values()) <= most
    assert held.total() < 4 * most + len(held)


def test_who_comes_second_gets_half_and_the_share_is_named() -> None:
    held = Counter({EVE: 72})
    assert find_exceeded_share(AL, 36, held, 72) is None
    for sender, name, own, most in ((EVE, "caller 'eve'", 72, 72), (AL, "caller 'al'", 0, 36)):
        share = find_exceeded_share(sender, 37, held, 72)
        assert share is not None
        assert (share.name, share.used, share.limit) == (name, own, most)


def test_the_keys_of_a_tenant_count_together() -> None:
    held = Counter({Sender("t", str(number)): 20 for number in range(8)})
    share = find_exceeded_share(Sender("t", "new"), 2, held | Counter({ANN: 100}), 100)
    assert share is not None
    assert (share.name, share.used, share.limit) == ("tenant 't'", 160, 150)
    assert find_exceeded_share(Sender("third", "new"), 50, held, 100) is None


def test_the_order_forgets_the_least_recent_senders() -> None:
    order = FairOrder()
    for number in range(5000):
        sender = Sender(f"t{number}", "k")
        order.record_choice(sender)
        order.record_service(sender, 1.0)
        order.record_service(Sender("t", f"k{number}"), 1.0)
    assert len(order._tenants._amounts) <= 1000
    assert max(len(keys._amounts) for keys in order._keys.values()) == len(order._keys) == 1000


@pytest.mark.parametrize("newcomer", [ANN, AL])
async def test_a_newcomer_waits_for_one_turn_only(newcomer: Sender) -> None:
    now = 0.0
    turns, done = FairSemaphore(1, clock=lambda: now), []

    async def work(sender: Sender) -> None:
        nonlocal now
        async with turns.hold_slot(sender):
            for _ in range(3):  # until the others wait
                await asyncio.sleep(0)
            now += 1.0
            done.append(sender)

    tasks = [asyncio.create_task(work(EVE)) for _ in range(10)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(work(newcomer)) for _ in range(3)]
    await asyncio.gather(*tasks)
    assert done[:6] == [EVE, newcomer] * 3


async def test_one_sender_leaves_turns_to_others() -> None:
    turns = FairSemaphore(3, max_per_sender=2)
    ends = [await turns.acquire(EVE) for _ in range(2)]
    third = asyncio.create_task(turns.acquire(EVE))
    await asyncio.sleep(0)
    (await asyncio.wait_for(turns.acquire(ANN), 10.0))()
    await asyncio.sleep(0)
    assert not third.done()
    ends[0]()
    (await asyncio.wait_for(third, 10.0))()
    ends[1]()
    assert not turns.num_waiting


async def test_who_leaves_while_waiting_takes_no_turn() -> None:
    turns = FairSemaphore(1)
    end = await turns.acquire(EVE)
    leaving, late, last = (asyncio.create_task(turns.acquire(sender)) for sender in (AL, ANN, EVE))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    assert turns.num_waiting == 2
    end()  # grants a turn to one that leaves in the same moment
    granted = next(each for each in (late, last) if each._fut_waiter.done())  # type: ignore[attr-defined]
    granted.cancel()
    other = last if granted is late else late
    (await asyncio.wait_for(other, 10.0))()
    (await asyncio.wait_for(turns.acquire(AL), 10.0))()


async def test_threads_take_turns_and_one_that_is_abandoned_ends_its_own() -> None:
    threads, done, go = FairThreadPool(1, "test"), [], threading.Event()
    held = asyncio.create_task(threads.run(EVE, lambda: go.wait(30.0)))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(threads.run(EVE, lambda: done.append("eve"))) for _ in range(5)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(threads.run(ANN, lambda: done.append("ann"))))
    held.cancel()
    await asyncio.sleep(0.01)
    assert done == [], "the thread is still busy"
    go.set()
    await asyncio.gather(*tasks)
    assert done == ["ann", *["eve"] * 5]
    waiting = asyncio.create_task(threads.run(EVE, lambda: None))
    threads.close(EngineDeadError("closed"))
    for late in (waiting, threads.run(ANN, lambda: None)):
        with pytest.raises(EngineDeadError):
            await late
