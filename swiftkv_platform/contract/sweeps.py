"""Trials of a sweep, and what their reports give together: the frontier of quality and compute, and the recommended
point. Torch-free; independent of how trials run and where reports are stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.verdicts import Verdict, verdict
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import JobSpec

GROUP_SIZE_FIELD = "swiftkv.key_value_group_size"
"""Field named when a combination is refused because its g exceeds the number of layers that its l leaves."""


@dataclass(frozen=True)
class Trial:
    """One combination of a sweep's values."""

    index: int
    name: str
    """Unique name within the sweep, usable in a key, made of the swept values: `l6-g2-lr0.003`."""
    spec: JobSpec
    """Spec of the trial as a job without a sweep."""


def _short(value: float) -> str:
    """Format with the fewest digits that read back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def expand(spec: JobSpec) -> tuple[Trial, ...]:
    """Every combination, the largest l and the smallest g first; of a job without a sweep the job itself."""
    if spec.sweep is None:
        return (Trial(0, "", spec),)
    sweep, trials = spec.sweep, []
    axes: tuple[Sequence[float | None], ...] = (
        sorted(sweep.num_key_value_layers, reverse=True) or [None],
        sorted(sweep.key_value_group_size) or [None],
        sorted(sweep.learning_rate) or [None],
    )
    for index, (layers, group, rate) in enumerate(itertools.product(*axes)):
        swiftkv: dict[str, Any] = {}
        if layers is not None:
            swiftkv |= {"num_key_value_layers": layers, "prefill_reduction": None}
        if group is not None:
            swiftkv |= {"key_value_group_size": group}
        optimizer = {} if rate is None else {"learning_rate": rate}
        parts = [("l", layers), ("g", group), ("lr", rate)]
        name = "-".join(f"{prefix}{_short(value)}" for prefix, value in parts if value is not None)
        trial = spec.model_copy(
            update={
                "name": f"{spec.name[: 99 - len(name)]}-{name}",
                "swiftkv": spec.swiftkv.model_copy(update=swiftkv),
                "optimizer": spec.optimizer.model_copy(update=optimizer),
                "sweep": None,
            }
        )
        trials.append(Trial(index, name, trial))
    return tuple(trials)


class Point(FrozenModel):
    """Outcome of one trial."""

    name: str
    num_key_value_layers: int | None
    """Swept value, or the spec's; None if the spec has `prefill_reduction` instead."""
    key_value_group_size: int
    learning_rate: float | None
    """Swept value, or the spec's; None if it depends on the model's size."""
    report: dict[str, Any] | None
    """`evaluation.json` of the trial; None if it failed."""
    error: str | None = None
    """Reason that the trial could not be trained, e.g. a loss that is not finite."""
    on_frontier: bool = False
    """Whether no other trial is better in prefill compute or KL and at least equal in the other."""

    @property
    def verdict(self) -> Verdict:
        return "failed" if self.report is None else verdict(self.report)

    @property
    def within_budget(self) -> bool:
        return self.verdict == "passed"

    @property
    def cost(self) -> tuple[float, float, float]:
        """Prefill compute and cache relative to the teacher's, and KL: the sort key of the choice, in this order."""
        assert self.report is not None, "a trial that failed costs nothing"
        kl: float = self.report["distilled"]["kl"]
        return self.report["prefill_flops_ratio"], self.report["kv_bytes_ratio"], kl


class SweepReport(FrozenModel):
    """Contents of `sweep.json`."""

    points: tuple[Point, ...]
    recommended: str | None
    """The cheapest point within the budget, see `SweepSpec`. If there is none, the point of lowest KL among those whose
    gates are undecided; None if there are none either."""

    @property
    def chosen(self) -> Point | None:
        return next((point for point in self.points if point.name == self.recommended), None)


def point(trial: Trial, *, report: Mapping[str, Any] | None = None, error: str | None = None) -> Point:
    return Point(
        name=trial.name,
        num_key_value_layers=trial.spec.swiftkv.request.given_layers,
        key_value_group_size=trial.spec.swiftkv.key_value_group_size,
        learning_rate=trial.spec.optimizer.learning_rate,
        report=None if report is None else dict(report),
        error=error,
    )


def summarise(points: Sequence[Point]) -> SweepReport:
    """Mark the frontier and choose the recommended point."""
    measured = [point for point in points if point.report is not None]
    affordable = [point for point in measured if point.within_budget]
    open_ones = [point for point in measured if point.verdict == "undecided"]
    chosen = min(affordable, key=lambda point: point.cost) if affordable else None
    if chosen is None and open_ones:
        chosen = min(open_ones, key=lambda point: point.cost[-1])
    return SweepReport(
        points=tuple(
            point.model_copy(update={"on_frontier": point.report is not None and _on_frontier(point, measured)})
            for point in points
        ),
        recommended=None if chosen is None else chosen.name,
    )


def _on_frontier(point: Point, others: Sequence[Point]) -> bool:
    compute, _, kl = point.cost
    return not any(
        other.cost[0] <= compute and other.cost[2] <= kl and (other.cost[0], other.cost[2]) != (compute, kl)
        for other in others
    )
