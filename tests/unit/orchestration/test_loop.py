"""The background loop outlives every failure of its step, and ends when asked to."""

from __future__ import annotations

import threading

import pytest

from swiftkv_platform.database.leases import SqlLeases
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.orchestration.leadership import LEASE_S, Leadership
from swiftkv_platform.orchestration.loop import ControlLoop
from tests.unit.orchestration.conftest import Plane


@pytest.mark.parametrize("error", [DatabaseUnavailableError("away"), ZeroDivisionError("a bug")])
def test_a_loop_outlives_failures_and_ends_when_asked(error: Exception) -> None:
    failures = [error, error]
    recovered = threading.Event()

    def step() -> None:
        if failures:
            raise failures.pop()
        recovered.set()

    loop = ControlLoop("test", step, interval_s=0.001, clock=lambda: 7.0)
    assert loop.last_success is None
    loop.start()
    assert recovered.wait(30)
    loop.stop(30)
    assert loop.last_success == 7.0
    recovered.clear()
    assert not recovered.wait(0.05)


def test_one_of_two_leads_until_it_resigns_or_dies(plane: Plane) -> None:
    leases = SqlLeases(plane.database)
    turns: list[str] = []
    first, second = (Leadership(leases, "jobs", holder, plane.clock) for holder in ("a", "b"))
    step_a, step_b = first.guard(lambda: turns.append("a")), second.guard(lambda: turns.append("b"))
    for _ in range(3):
        step_a()
        step_b()
        plane.clock.now += LEASE_S / 2
    assert turns == ["a", "a", "a"]
    first.resign()
    step_b()
    step_a()
    assert turns[3:] == ["b"]
    plane.clock.now += LEASE_S
    step_a()
    assert turns[3:] == ["b", "a"], "nobody has heard of b for as long as its lease"
