"""Estimate of the next request's wait for its turn, judged by how often a place has become free. Knows no engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 32
"""Departures remembered: enough to even out answers that end together, few enough to follow the load."""
_ENOUGH = 4
"""Departures without which there is no judgement."""


class Departures:
    """Times at which requests have ended while all places were taken."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_WINDOW)

    def note(self, count: int, *, full: bool) -> None:
        """`count` requests have ended; `full`: others were waiting, or would have."""
        if not full:
            self._times.clear()  # how often idle places become free says nothing of a queue
        else:
            self._times.extend([self._clock()] * count)

    def expected_wait(self, num_in_line: int) -> float:
        """Seconds until the last of `num_in_line` requests has its turn; 0 while nothing is known."""
        if num_in_line <= 0 or len(self._times) < _ENOUGH:
            return 0.0
        # The time since the last departure counts as well, or a stalled engine would look fast.
        return num_in_line * (self._clock() - self._times[0]) / len(self._times)
