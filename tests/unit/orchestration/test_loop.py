"""The background loop outlives every failure of its step, and ends when asked to."""

from __future__ import annotations

import threading

import pytest

from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.orchestration.loop import ControlLoop


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
