"""A step repeated in the background for as long as the process lives. Knows neither jobs nor deployments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from swiftkv_platform.control_plane.base import Clock, is_due
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.logs import get_logger


@dataclass
class Backoff:
    """Pauses that double with every failure in a row, by name."""

    first_s: float
    longest_s: float
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def ready(self, name: str, now: float) -> bool:
        return is_due(self._not_before.get(name, now), now, within=self.longest_s)

    def failed(self, name: str, now: float) -> float:
        """Count a failure, and return the seconds until the next try."""
        failures = self._failures.get(name, 0)
        delay = min(self.first_s * 2.0 ** min(failures, 16), self.longest_s)
        self._failures[name] = failures + 1
        self._not_before[name] = now + delay
        return delay

    def names(self) -> set[str]:
        """Names that have failed and not succeeded since."""
        return set(self._failures)

    def resting(self, now: float) -> set[str]:
        """Return the names whose next try is not due yet."""
        return {name for name in self._not_before if not self.ready(name, now)}

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)
        self._not_before.pop(name, None)

    def keep(self, names: Set[str]) -> None:
        """Forget all names but these."""
        for name in [*(self._failures.keys() - names)]:
            self.succeeded(name)


_LONGEST_PAUSE_S = 30.0
_STALLED_AFTER_S = 90.0
"""Longest time, in addition to the usual pause, without a completed step: three of the longest pauses after
failures."""


_HUNG_AFTER_S = 300.0
"""Longest time that one step may take: each is of bounded size, and its requests answer or fail sooner."""


class ControlLoop:
    """Thread that runs `step` every `interval_s` seconds, and less often while it fails for any reason."""

    def __init__(self, name: str, step: Callable[[], None], *, interval_s: float, clock: Clock) -> None:
        self.name = name
        self.last_success: float | None = None
        """Unix seconds at which a step last completed."""
        self._started: float | None = None
        self._step_began: float | None = None
        self._step = step
        self._interval_s = interval_s
        self._clock = clock
        self._backoff = Backoff(first_s=interval_s, longest_s=_LONGEST_PAUSE_S)
        self._log = get_logger(loop=name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stalled(self) -> bool:
        """Whether steps fail, or one hangs, for longer than a short outage lasts. False while the loop stands by."""
        since = self._started if self.last_success is None else self.last_success
        return since is not None and self._clock() - since > self._interval_s + _STALLED_AFTER_S

    @property
    def is_hung(self) -> bool:
        """Whether a step has run for so long that it never will return, or the thread has ended, so that only a restart
        of the process helps. Failing steps do not count."""
        if self._started is None or self._stop.is_set():
            return False
        began = self._step_began
        return not self._thread.is_alive() or (began is not None and self._clock() - began > _HUNG_AFTER_S)

    def start(self) -> None:
        self._started = self._clock()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask the loop to end, and wait up to `timeout_s`. A step that takes longer ends with the process, as in a
        crash."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self._once())

    def _once(self) -> float:
        """Do the step; returns the seconds to wait before the next one."""
        self._step_began = self._clock()
        try:
            self._step()
        except SwiftKVError as error:
            pause = self._backoff.failed(self.name, self._clock())
            self._log.warning("step failed", code=error.code, reason=error.message, retry_in_s=pause)
            return pause
        except Exception:
            pause = self._backoff.failed(self.name, self._clock())
            self._log.exception("step failed", retry_in_s=pause)
            return pause
        finally:
            self._step_began = None
        self._backoff.succeeded(self.name)
        self.last_success = self._clock()
        return self._interval_s
