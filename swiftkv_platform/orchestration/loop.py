"""A step repeated in the background for as long as the process lives. Knows neither jobs nor deployments."""

from __future__ import annotations

import threading
from collections.abc import Callable

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.backoff import Backoff
from swiftkv_platform.orchestration.ports import Clock

_LONGEST_PAUSE_S = 30.0
_STALLED_AFTER_S = 90.0
"""Longest time without a step that came to its end, beside the usual pause: three of the longest pauses after
failures."""


class ControlLoop:
    """Runs `step` every `interval_s` seconds in a thread of its own; less often while it fails, for whatever reason."""

    def __init__(self, name: str, step: Callable[[], None], *, interval_s: float, clock: Clock) -> None:
        self.name = name
        self.last_success: float | None = None
        """Unix seconds at which the step last came to its end."""
        self._started: float | None = None
        self._step = step
        self._interval_s = interval_s
        self._clock = clock
        self._backoff = Backoff(first_s=interval_s, longest_s=_LONGEST_PAUSE_S)
        self._log = get_logger(loop=name)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stalled(self) -> bool:
        """Whether its steps fail, or one hangs, for longer than a passing trouble takes. One that stands by is not."""
        since = self._started if self.last_success is None else self.last_success
        return since is not None and self._clock() - since > self._interval_s + _STALLED_AFTER_S

    def start(self) -> None:
        self._started = self._clock()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask for the end and wait for it. A step that takes longer ends with the process, as in a crash."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._stop.wait(self._once())

    def _once(self) -> float:
        """Do the step; returns the seconds to wait before the next one."""
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
        self._backoff.succeeded(self.name)
        self.last_success = self._clock()
        return self._interval_s
