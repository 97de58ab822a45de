"""Backoff after a failure: the time until the next try. Knows no reason for a failure and does not sleep."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Pauses that double with every failure in a row, by name."""

    first_s: float
    longest_s: float
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def ready(self, name: str, now: float) -> bool:
        return now >= self._not_before.get(name, 0.0)

    def failed(self, name: str, now: float) -> float:
        """Seconds until the next try."""
        failures = self._failures.get(name, 0)
        delay = min(self.first_s * 2.0 ** min(failures, 16), self.longest_s)
        self._failures[name] = failures + 1
        self._not_before[name] = now + delay
        return delay

    def names(self) -> set[str]:
        """Those that have failed and not succeeded since."""
        return set(self._failures)

    def resting(self, now: float) -> set[str]:
        """Those whose next try is not due."""
        return {name for name, due in self._not_before.items() if now < due}

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)
        self._not_before.pop(name, None)

    def keep(self, names: Set[str]) -> None:
        """Forget all others."""
        for name in [*(self._failures.keys() - names)]:
            self.succeeded(name)
