"""The background loop outlives every failure of its step, and ends when asked to."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.database.leases import SqlLeases
from swiftkv_platform.errors import DatabaseUnavailableError, LeaseLostError
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


def test_a_control_plane_whose_lease_ran_out_in_a_round_submits_nothing_more(plane: Plane) -> None:
    """The other one takes over while the first is about to submit, as when its process is frozen there."""
    calls: list[str] = []
    submit = plane.cluster.submit

    def noted(submission_id: str, *arguments: Any) -> None:
        calls.append(submission_id)
        submit(submission_id, *arguments)

    plane.cluster.submit = noted  # type: ignore[method-assign]
    leases = SqlLeases(plane.database)
    first, second = (Leadership(leases, "jobs", holder, plane.clock) for holder in ("a", "b"))
    other = second.guard(plane.reconciler(lease=second).tick)

    class Slow:
        """The attempt store, where one request takes longer than the lease."""

        def __getattr__(self, name: str) -> Any:
            return getattr(plane.store, name)

        def write_request(self, request: AttemptRequest) -> None:
            plane.store.write_request(request)
            plane.clock.now += LEASE_S
            other()

    job = plane.submit()
    first.guard(plane.reconciler(store=Slow(), lease=first).tick)()
    assert calls == [f"{job.id}-1"]
    assert plane.get(job).attempt.submitted_at is not None
    with pytest.raises(LeaseLostError):
        first.check()
    other()
    assert calls == [f"{job.id}-1"]


def test_a_lease_is_renewed_while_a_step_takes_longer_than_it(plane: Plane) -> None:
    leases, turns = SqlLeases(plane.database), list[str]()
    first, second = (Leadership(leases, "jobs", holder, time.time, lease_s=0.2) for holder in ("a", "b"))
    other = second.guard(lambda: turns.append("b"))

    def long() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 0.6:
            other()
            first.check()
            time.sleep(0.01)

    first.guard(long)()
    assert turns == []


def test_a_step_ends_where_its_lease_cannot_be_renewed(plane: Plane) -> None:
    leases = SqlLeases(plane.database)
    first = Leadership(leases, "jobs", "a", time.time, lease_s=0.2)
    began = threading.Event()

    def step() -> None:
        leases.take = lambda *_, **__: None  # type: ignore[assignment, method-assign, return-value]
        while True:
            first.check()
            began.wait(0.01)

    first.guard(step)()  # comes to an end
    with pytest.raises(LeaseLostError):
        first.check()
