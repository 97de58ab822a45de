"""The wait of the next in line, from when others have left."""

from __future__ import annotations

import pytest

from swiftkv_platform.engine.frontend import Departures


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_is_that_of_all_before_at_the_pace_of_the_last_departures() -> None:
    clock = Clock()
    departures = Departures(clock)
    for _ in range(40):
        departures.note(1, full=True)
        clock.now += 0.5
    assert departures.expected_wait(1) == pytest.approx(0.5)
    assert departures.expected_wait(6) == pytest.approx(3.0)
    assert departures.expected_wait(0) == 0.0


def test_departures_from_idle_places_and_too_few_of_them_say_nothing() -> None:
    clock = Clock()
    departures = Departures(clock)
    departures.note(3, full=True)
    clock.now += 9.0
    assert departures.expected_wait(5) == 0.0
    departures.note(1, full=True)
    assert departures.expected_wait(5) > 0.0
    departures.note(1, full=False)
    assert departures.expected_wait(5) == 0.0


def test_an_engine_that_stalls_looks_slower_by_the_second() -> None:
    clock = Clock()
    departures = Departures(clock)
    departures.note(8, full=True)
    waits = []
    for _ in range(3):
        clock.now += 8.0
        waits.append(departures.expected_wait(1))
    assert waits == pytest.approx([1.0, 2.0, 3.0])
