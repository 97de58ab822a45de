"""Report of an evaluation, with its quality gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import model_validator

from swiftkv_platform.contract.row_results import Interval
from swiftkv_platform.contract.verdicts import VERDICTS, Verdict, read_gate_verdict
from swiftkv_platform.errors import QualityGateError
from swiftkv_platform.evaluation.continuations import ContinuationQuality
from swiftkv_platform.evaluation.harness.builtin import MIN_TEACHER_SHARE_FOUND
from swiftkv_platform.evaluation.harness.run import TaskResults, TaskScore
from swiftkv_platform.evaluation.paired import HeldOutIntervals, compute_kl_reduction, estimate_samples_to_decide
from swiftkv_platform.evaluation.prefill_cost import PrefillCost
from swiftkv_platform.evaluation.quality import (
    BIN_BOUNDS,
    NUM_EXIT_BINS,
    BinnedSums,
    ExitCounts,
    HeldOutTotals,
    Quality,
    TeacherQuality,
)
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.planning.gates import (
    DEFAULT_DROP_RANGE,
    compute_default_limit,
    compute_default_needle_limit,
    count_task_gates,
)
from swiftkv_platform.specs import EvaluationSpec
from swiftkv_platform.specs.evaluation import NEEDLE_PREFIX

NO_TASKS = TaskResults()
MAX_KL = 0.2
"""Default limit of instruction-tuned models, in nats."""
MIN_TOP1_AGREEMENT = 0.8


class TeacherStudentPair(FrozenBaseModel):
    """A figure of the forward passes of teacher (dense) and student."""

    dense: float
    swiftkv: float


class ExitBin(FrozenBaseModel):
    """Held-out positions in a range of the exit head's maximum probability."""

    low: float
    high: float
    share: float
    """Share of all positions."""
    agreement: float | None
    """Share of the bin's positions where exit head and student have the same most likely token; None in an empty
    bin."""


class QualityBin(FrozenBaseModel):
    """Quality on the held-out positions of a bin."""

    low: int
    high: int | None
    """Tokens, exclusive; None in the last bin."""
    num_positions: int
    perplexity_ratio: float
    """The student's perplexity over the teacher's, on these positions."""
    kl: float
    top1_agreement: float


class Gate(FrozenBaseModel):
    """A limit of the spec and the measured value."""

    field: str
    """Dotted path in the spec."""
    subject: str
    """Name of the limited quantity."""
    limit: float
    value: float
    passed: bool
    outcome: Verdict
    """`undecided`: the interval contains the limit, or there is no interval. It does not count as passed."""
    interval: tuple[float, float] | None = None
    """95% interval of `value`, if there is one."""
    samples_needed: int | None = None
    """Estimated number of samples to decide an undecided gate; None if unknown or unlimited."""

    @model_validator(mode="before")
    @classmethod
    def _add_missing_outcome(cls, data: Any) -> Any:
        if isinstance(data, dict) and "outcome" not in data and "passed" in data:
            return {**data, "outcome": read_gate_verdict(data)}
        return data

    @property
    def severity(self) -> tuple[int, float]:
        """Sort key of gates by outcome and distance from the limit; the worst gate has the largest key."""
        rank = VERDICTS.index(self.outcome)
        distance = abs(self.value - self.limit) / abs(self.limit) if self.limit else abs(self.value)
        distance = distance if math.isfinite(distance) else math.inf
        return rank, distance if self.outcome == "failed" else -distance

    @property
    def reason(self) -> str:
        text = f"{self.subject} is {self.value:.4g}, and the limit {self.field} is {self.limit:g}"
        if self.interval is None:
            return text if self.outcome != "undecided" else f"{text}: undecided, because the 95% interval is unknown"
        text += f" (95% interval {self.interval[0]:.4g} to {self.interval[1]:.4g})"
        if self.outcome != "undecided":
            return text
        needed = "" if self.samples_needed is None else f"; use {self.samples_needed:,} samples"
        return f"{text}: undecided, because there are not enough samples{needed}"


class TrainingOutcome(FrozenBaseModel):
    """Training state that became the model."""

    step: int
    """Optimizer steps done."""
    reason: Literal["lowest_held_out_kl", "last_step"]
    held_out_kl: float | None = None
    """KL of that state in nats on the validation rows, which the report's other figures exclude."""
    start_kl: float | None = None
    """KL before training, on the same rows."""


@dataclass(frozen=True)
class ParentTotals:
    """Measurements of the student that training continued from."""

    held_out: HeldOutTotals
    tasks: tuple[TaskScore, ...] = ()
    """Scores on `evaluation.rows`."""


class Report(FrozenBaseModel):
    """Contents of `evaluation.json`. `demo-report.json` has the same keys."""

    teacher: TeacherQuality
    rewired: Quality | None
    """Student with the copied start; None if only the final model was measured."""
    calibrated: Quality | None
    """Student with the calibrated start; None if the job starts from copies."""
    parent: Quality | None = None
    """Student that training continued from (`training.from`); None if training started from the teacher."""
    parent_tasks: tuple[TaskScore, ...] = ()
    """Scores of that student on `evaluation.rows`."""
    distilled: Quality
    perplexity_ratio: float
    """distilled.perplexity / teacher.perplexity"""
    kl_recovered: float | None
    """1 - distilled.kl / rewired.kl; 0 if rewired.kl is 0. Not a gate, because it depends on the quality of the
    start."""
    num_positions: int
    """Number of held-out positions that were compared."""
    intervals: HeldOutIntervals | None = None
    """Intervals of `distilled` and `perplexity_ratio`; None for a single part of a text, and in older reports."""
    prefill_flops_ratio: float
    """SwiftKV / dense, counted in a forward pass."""
    kv_bytes_ratio: float
    """SwiftKV / dense, in the KV caches."""
    prompt_length: int
    """Tokens of the prompt for the figures of both modes."""
    prefill_flops_per_token: TeacherStudentPair
    kv_bytes_per_token: TeacherStudentPair
    """Bytes in the caches, in the model's dtype."""
    ttft_ms: TeacherStudentPair
    """Median time to first token, in milliseconds."""
    tokens_trained: int | None
    training: TrainingOutcome | None = None
    continuations: ContinuationQuality | None = None
    by_position: tuple[QualityBin, ...] = ()
    """Quality of the distilled student by the position in the counted part of a sample, such as an answer."""
    by_prompt_length: tuple[QualityBin, ...] = ()
    """Quality of the distilled student by the number of tokens before the counted part."""
    exit_head: tuple[ExitBin, ...] | None = None
    """Figure D.1 of the paper; None for a model without an exit head."""
    tasks: tuple[TaskScore, ...] = ()
    tasks_left_out: tuple[str, ...] = ()
    """Names of skipped tasks, which have no gates: those not started within `evaluation.max_minutes`, and the
    needle-in-a-haystack tasks if lm-evaluation-harness is not installed."""
    gates: tuple[Gate, ...] = ()

    @classmethod
    def build(
        cls,
        spec: EvaluationSpec,
        *,
        distilled: HeldOutTotals,
        cost: PrefillCost,
        rewired: HeldOutTotals | None = None,
        calibrated: HeldOutTotals | None = None,
        parent: ParentTotals | None = None,
        tokens_trained: int | None = None,
        training: TrainingOutcome | None = None,
        continuations: ContinuationQuality | None = None,
        tasks: TaskResults = NO_TASKS,
        instruct: bool = False,
    ) -> Self:
        """Build the report from measurements on the same rows before and after training. `instruct`: whether the model
        is instruction-tuned, which determines default limits."""
        student, teacher = distilled.student, distilled.teacher
        ratio = student.perplexity / teacher.perplexity
        recovered, intervals = None, HeldOutIntervals.from_samples(distilled.samples)
        if rewired:
            recovered = 1.0 - student.kl / rewired.student.kl if rewired.student.kl else 0.0
        return cls(
            teacher=teacher,
            rewired=rewired.student if rewired else None,
            calibrated=calibrated.student if calibrated else None,
            parent=parent.held_out.student if parent else None,
            parent_tasks=parent.tasks if parent else (),
            distilled=student,
            perplexity_ratio=ratio,
            kl_recovered=recovered,
            num_positions=distilled.num_positions,
            intervals=intervals,
            prefill_flops_ratio=cost.flops_ratio,
            kv_bytes_ratio=cost.kv_bytes_ratio,
            prompt_length=cost.prompt_length,
            prefill_flops_per_token=_pair_modes(cost, "flops_per_token"),
            kv_bytes_per_token=_pair_modes(cost, "kv_bytes_per_token"),
            ttft_ms=_pair_modes(cost, "ttft_ms"),
            tokens_trained=tokens_trained,
            training=training,
            continuations=continuations,
            by_position=build_quality_bins(distilled.by_position),
            by_prompt_length=build_quality_bins(distilled.by_prompt_length),
            exit_head=build_exit_bins(distilled.exit_head),
            tasks=tasks.scores,
            tasks_left_out=tasks.left_out,
            gates=_sort_gates(
                [
                    *_build_gates(spec, (student, ratio, intervals), tasks.scores, instruct=instruct),
                    *_build_parent_gates(spec, parent.held_out if parent else None, distilled),
                ]
            ),
        )

    def list_row_results(self) -> list[str]:
        """Return the names of the files with the results of single rows."""
        scores = (*self.tasks, *self.parent_tasks)
        return [score.row_results for score in scores if score.row_results is not None]

    def check_gates(self) -> None:
        """Raise `QualityGateError` if a gate has failed. Undecided gates do not fail a job."""
        failed = [gate for gate in self.gates if gate.outcome == "failed"]
        if not failed:
            return
        reasons = "; ".join(gate.reason for gate in failed)
        raise QualityGateError(
            f"{reasons} (perplexity {self.distilled.perplexity:.3f} against the teacher's "
            f"{self.teacher.perplexity:.3f}, KL {self.distilled.kl:.4f} nats, top-1 agreement "
            f"{self.distilled.top1_agreement:.1%}); use more training or fewer skipped layers",
            field=failed[0].field,
            value=failed[0].value,
        )


def _pair_modes(cost: PrefillCost, figure: str) -> TeacherStudentPair:
    return TeacherStudentPair(dense=getattr(cost.dense, figure), swiftkv=getattr(cost.swiftkv, figure))


def build_quality_bins(sums: BinnedSums) -> tuple[QualityBin, ...]:
    """Return the quality of each non-empty bin."""
    return tuple(
        QualityBin(
            low=low,
            high=BIN_BOUNDS[i + 1] if i + 1 < len(BIN_BOUNDS) else None,
            num_positions=count,
            perplexity_ratio=math.exp((sums.student_nll[i] - sums.teacher_nll[i]) / count),
            kl=sums.kl[i] / count,
            top1_agreement=sums.agreements[i] / count,
        )
        for i, (low, count) in enumerate(zip(BIN_BOUNDS, sums.positions, strict=True))
        if count
    )


def build_exit_bins(counts: ExitCounts) -> tuple[ExitBin, ...] | None:
    """Return the paper's figure D.1; None for a model without an exit head."""
    total = sum(counts.positions)
    if not total:
        return None
    return tuple(
        ExitBin(
            low=i / NUM_EXIT_BINS,
            high=(i + 1) / NUM_EXIT_BINS,
            share=positions / total,
            agreement=agreements / positions if positions else None,
        )
        for i, (positions, agreements) in enumerate(zip(counts.positions, counts.agreements, strict=True))
    )


def _build_gates(
    spec: EvaluationSpec,
    held_out: tuple[Quality, float, HeldOutIntervals | None],
    tasks: tuple[TaskScore, ...],
    *,
    instruct: bool,
) -> list[Gate]:
    def resolve_limit(limit: float | Literal["auto"] | None, default: float) -> float | None:
        return limit if limit != "auto" else default if instruct else None

    num_gates = max(count_task_gates(spec), sum(not score.task.startswith(NEEDLE_PREFIX) for score in tasks))
    student, ratio, known = held_out
    min_agreement = resolve_limit(spec.min_top1_agreement, MIN_TOP1_AGREEMENT)
    figures: tuple[tuple[str, str, float, float | None], ...] = (
        ("kl", "held-out KL in nats", student.kl, resolve_limit(spec.max_kl, MAX_KL)),
        ("perplexity_ratio", "held-out perplexity relative to the teacher's", ratio, spec.max_perplexity_ratio),
        ("top1_agreement", "held-out top-1 agreement", student.top1_agreement, min_agreement),
    )
    gates = [
        _build_held_out_gate(name, subject, value, limit, known)
        for name, subject, value, limit in figures
        if limit is not None
    ]
    gates += [gate for gate in (_build_task_gate(score, spec, num_gates) for score in tasks) if gate is not None]
    return gates


def _build_parent_gates(spec: EvaluationSpec, parent: HeldOutTotals | None, distilled: HeldOutTotals) -> list[Gate]:
    limit = spec.min_kl_reduction
    if parent is None or limit is None:
        return []
    value, num_units, interval = compute_kl_reduction(parent.samples, distilled.samples)
    subject = "relative reduction of held-out KL compared with training.from"
    return [_build_gate("min_kl_reduction", subject, value, limit, interval, num_units, is_minimum=True)]


def _sort_gates(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """Return the gates, the worst first."""
    return tuple(sorted(gates, key=lambda gate: gate.severity, reverse=True))


def _build_held_out_gate(
    name: str, subject: str, value: float, limit: float, intervals: HeldOutIntervals | None
) -> Gate:
    is_minimum = name == "top1_agreement"
    interval, num_units = (None, 0) if intervals is None else (getattr(intervals, name), intervals.num_units)
    field = f"{'min' if is_minimum else 'max'}_{name}"
    return _build_gate(field, subject, value, limit, interval, num_units, is_minimum=is_minimum)


def _build_gate(
    field: str,
    subject: str,
    value: float,
    limit: float,
    interval: Interval | None,
    num_samples: int,
    *,
    is_minimum: bool = False,
    share: float | None = None,
) -> Gate:
    """Judge a value by its interval. `share`: see `estimate_samples_to_decide`."""
    outcome, needed = _judge_value(value, limit, interval, is_minimum=is_minimum), None
    if outcome == "undecided" and interval is not None:
        needed = estimate_samples_to_decide(interval, value, limit, num_samples, share=share)
    return Gate(
        field=f"evaluation.{field}",
        subject=subject,
        limit=limit,
        value=value,
        passed=outcome == "passed",
        outcome=outcome,
        interval=interval,
        samples_needed=needed,
    )


def _judge_value(value: float, limit: float, interval: Interval | None, *, is_minimum: bool = False) -> Verdict:
    """Return passed if the whole interval is within the limit, failed if all of it is beyond; a value that is not
    finite has failed."""
    if not math.isfinite(value):
        return "failed"
    if interval is None:
        return "undecided"
    low, high = interval
    if is_minimum:
        low, high, limit = -high, -low, -limit
    return "passed" if high <= limit else "failed" if low > limit else "undecided"


def _build_task_gate(score: TaskScore, spec: EvaluationSpec, num_gates: int) -> Gate | None:
    """Test for non-inferiority: compare the interval of the points lost with the limit. None if there is no limit, or
    if the teacher finds too few needles."""
    is_needle = score.task.startswith(NEEDLE_PREFIX)
    spec_limit = spec.max_needle_drop if is_needle else spec.max_drop
    if spec_limit is None or (is_needle and score.teacher < MIN_TEACHER_SHARE_FOUND):
        return None
    if spec_limit != "auto":
        limit = spec_limit
    elif is_needle:
        limit = compute_default_needle_limit(score.num_samples)
    elif score.uses_percentage_points:
        limit = compute_default_limit(score.num_samples, num_gates=num_gates)
    else:
        limit = DEFAULT_DROP_RANGE[0]
    field, share = "max_needle_drop" if is_needle else "max_drop", 100.0 if score.uses_percentage_points else None
    subject = f"points lost on {score.task}"
    return _build_gate(field, subject, score.drop, limit, score.drop_interval, score.num_samples, share=share)
