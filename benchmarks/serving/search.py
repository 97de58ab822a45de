"""The highest arrival rate that a system sustains, by bisection. Knows no system."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RateSearch:
    """Bisects between `low` and `high`, in requests a second. It takes for granted that a rate below a sustained one
    is sustained too. `low` itself is tried where nothing above it was sustained."""

    low: float
    high: float
    num_trials: int
    """Rates to try; the last one of these halves the bracket for the last time."""
    trials: dict[float, bool] = field(default_factory=dict)
    """Rates tried, and whether each was sustained."""

    @property
    def next_rate(self) -> float | None:
        """Return the rate to try now; None once the search is over."""
        if len(self.trials) < self.num_trials:
            sustained, failed = self._bracket()
            return (sustained + failed) / 2
        return self.low if self.sustained is None and self.low not in self.trials else None

    def record(self, rate: float, *, sustained: bool) -> None:
        """Record whether a rate was sustained."""
        self.trials[rate] = sustained

    @property
    def sustained(self) -> float | None:
        """The highest rate that was sustained; None: not even `low`."""
        return max((rate for rate, sustained in self.trials.items() if sustained), default=None)

    def _bracket(self) -> tuple[float, float]:
        failed = min((rate for rate, sustained in self.trials.items() if not sustained), default=self.high)
        return self.sustained or self.low, failed
