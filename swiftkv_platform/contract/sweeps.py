"""Trials of a sweep, and the summary of their reports: the frontier of quality and compute, and the recommended trial.

Torch-free; independent of how trials run and where reports are stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.verdicts import Verdict, find_worst_verdict
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.specs import JobSpec

GROUP_SIZE_FIELD = "swiftkv.key_value_group_size"
"""Field of the error for a combination of l and g where g exceeds the number of layers >= l."""


@dataclass(frozen=True)
class Trial:
    """One combination of a sweep's values."""

    index: int
    name: str
    """Unique name within the sweep, built from the swept values: `l6-g2-lr0.003`. Valid in an object key."""
    spec: JobSpec
    """The job's spec with the trial's values and without `sweep`."""


def _format_shortest(value: float) -> str:
    """Format with the fewest digits that read back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def expand_sweep(spec: JobSpec) -> tuple[Trial, ...]:
    """Return every combination, largest l and smallest g first; without a sweep, one trial with the job's spec."""
    if spec.sweep is None:
        return (Trial(0, "", spec),)
    sweep, trials = spec.sweep, []
    # None on an axis: the spec's own value.
    axes: tuple[Sequence[float | None], ...] = (
        sorted(sweep.num_key_value_layers, reverse=True) or [None],
        sorted(sweep.key_value_group_size) or [None],
        sorted(sweep.learning_rate) or [None],
    )
    for index, (layers, group, rate) in enumerate(itertools.product(*axes)):
        # 1. the swept values, as changes of their sections
        swiftkv: dict[str, Any] = {}
        if layers is not None:
            swiftkv |= {"num_key_value_layers": layers, "prefill_reduction": None}
        if group is not None:
            swiftkv |= {"key_value_group_size": group}
        optimizer = {} if rate is None else {"learning_rate": rate}
        # 2. the trial's name and spec
        parts = [("l", layers), ("g", group), ("lr", rate)]
        name = "-".join(f"{prefix}{_format_shortest(value)}" for prefix, value in parts if value is not None)
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


class TrialResult(FrozenBaseModel):
    """Outcome of one trial."""

    name: str
    num_key_value_layers: int | None
    """Swept value, or the spec's; None if the spec has `prefill_reduction` instead."""
    key_value_group_size: int
    learning_rate: float | None
    """Swept value, or the spec's value; None if the value is derived from the model's size."""
    report: dict[str, Any] | None
    """`evaluation.json` of the trial; None if it failed."""
    error: str | None = None
    """Why training failed, e.g. a loss that is not finite."""
    on_frontier: bool = False
    """Whether no other trial is better in prefill compute or KL and at least equal in the other."""

    @property
    def worst_gate_verdict(self) -> Verdict:
        return "failed" if self.report is None else find_worst_verdict(self.report)

    @property
    def has_passed_gates(self) -> bool:
        return self.worst_gate_verdict == "passed"

    @property
    def ranking_key(self) -> tuple[float, float, float]:
        """(prefill FLOPs ratio, KV bytes ratio, KL); the trial with the smallest key is recommended."""
        assert self.report is not None, "a failed trial has no report"
        kl: float = self.report["distilled"]["kl"]
        return self.report["prefill_flops_ratio"], self.report["kv_bytes_ratio"], kl


class SweepReport(FrozenBaseModel):
    """Contents of `sweep.json`."""

    points: tuple[TrialResult, ...]
    recommended: str | None
    """Name of the cheapest trial that passed all gates (see `SweepSpec`). If none passed, the undecided trial with the
    lowest KL; None if all failed."""

    @property
    def recommended_result(self) -> TrialResult | None:
        return next((result for result in self.points if result.name == self.recommended), None)


def make_trial_result(
    trial: Trial, *, report: Mapping[str, Any] | None = None, error: str | None = None
) -> TrialResult:
    return TrialResult(
        name=trial.name,
        num_key_value_layers=trial.spec.swiftkv.request.requested_depth,
        key_value_group_size=trial.spec.swiftkv.key_value_group_size,
        learning_rate=trial.spec.optimizer.learning_rate,
        report=None if report is None else dict(report),
        error=error,
    )


def summarize_trials(points: Sequence[TrialResult]) -> SweepReport:
    """Mark the frontier and choose the recommended trial."""
    measured = [result for result in points if result.report is not None]
    passed = [result for result in measured if result.has_passed_gates]
    undecided = [result for result in measured if result.worst_gate_verdict == "undecided"]
    chosen = min(passed, key=lambda result: result.ranking_key) if passed else None
    if chosen is None and undecided:
        chosen = min(undecided, key=lambda result: result.ranking_key[-1])
    return SweepReport(
        points=tuple(
            result.model_copy(update={"on_frontier": result.report is not None and _is_on_frontier(result, measured)})
            for result in points
        ),
        recommended=None if chosen is None else chosen.name,
    )


def _is_on_frontier(result: TrialResult, others: Sequence[TrialResult]) -> bool:
    compute, _, kl = result.ranking_key
    costs = [(other.ranking_key[0], other.ranking_key[2]) for other in others]
    return not any(cost[0] <= compute and cost[1] <= kl and cost != (compute, kl) for cost in costs)
