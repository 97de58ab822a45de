"""Report of a job and its quality gates, from figures that other modules measure."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import model_validator

from swiftkv_platform.contract.verdicts import NEEDLE_PREFIX, VERDICTS, Verdict, read_gate_verdict
from swiftkv_platform.errors import QualityGateError
from swiftkv_platform.evaluation.continuations import ContinuationQuality
from swiftkv_platform.evaluation.harness.builtin import TEACHER_FINDS
from swiftkv_platform.evaluation.harness.run import TaskResults, TaskScore
from swiftkv_platform.evaluation.paired import HeldOutIntervals, Interval, samples_to_decide
from swiftkv_platform.evaluation.prefill_cost import PrefillCost
from swiftkv_platform.evaluation.quality import (
    BORDERS,
    NUM_EXIT_BINS,
    BinnedSums,
    ExitCounts,
    Quality,
    TeacherQuality,
    Totals,
)
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.gates import (
    DEFAULT_DROP_RANGE,
    compute_default_limit,
    compute_default_needle_limit,
    count_task_gates,
)
from swiftkv_platform.specs import EvaluationSpec

NO_TASKS = TaskResults()
MAX_KL = 0.2
"""Default limit for instruction-tuned models, in nats."""
MIN_TOP1_AGREEMENT = 0.8


class BothModes(FrozenModel):
    """One figure of the teacher's and of the student's forward pass."""

    dense: float
    swiftkv: float


class ExitBin(FrozenModel):
    """Held-out positions by the exit head's confidence, its largest probability."""

    low: float
    high: float
    share: float
    """Share of all positions."""
    agreement: float | None
    """Share of the bin's positions where the exit head's most likely token is the student's; None in an empty bin."""


class QualityBin(FrozenModel):
    """Held-out positions of one bin."""

    low: int
    high: int | None
    """Tokens, exclusive; None in the last bin."""
    num_positions: int
    perplexity_ratio: float
    """The student's perplexity over the teacher's, on these positions."""
    kl: float
    top1_agreement: float


class Gate(FrozenModel):
    """A limit of the spec and the measured value."""

    field: str
    """Dotted path in the spec."""
    subject: str
    """Name of the limited quantity."""
    limit: float
    value: float
    passed: bool
    outcome: Verdict
    """`undecided`, which is not a pass: the interval contains the limit, or there is no interval."""
    interval: tuple[float, float] | None = None
    """95% interval of `value`, if there is one."""
    samples_needed: int | None = None
    """Estimated samples to decide an undecided gate; None if no number would, or if unknown."""

    @model_validator(mode="before")
    @classmethod
    def _of_before_outcomes(cls, data: Any) -> Any:
        if isinstance(data, dict) and "outcome" not in data and "passed" in data:
            return {**data, "outcome": read_gate_verdict(data)}
        return data

    @property
    def severity(self) -> tuple[int, float]:
        """Sort key of gates, the worst largest: first the outcome, then the distance from the limit."""
        rank = VERDICTS.index(self.outcome)
        used = abs(self.value - self.limit) / abs(self.limit) if self.limit else abs(self.value)
        used = used if math.isfinite(used) else math.inf
        return rank, used if self.outcome == "failed" else -used

    @property
    def reason(self) -> str:
        """Explain the outcome by value, limit and interval."""
        said = f"{self.subject} is {self.value:.4g}, and {self.field} is {self.limit:g}"
        if self.interval is None:
            return said if self.outcome != "undecided" else f"{said}: undecided, its samples do not give an interval"
        said += f" (95% interval {self.interval[0]:.4g} to {self.interval[1]:.4g})"
        if self.outcome != "undecided":
            return said
        needed = "" if self.samples_needed is None else f"; {self.samples_needed:,} samples are needed"
        return f"{said}: undecided, too few samples for this limit{needed}"


class TrainingOutcome(FrozenModel):
    """State of the training run that became the model."""

    step: int
    """Optimizer steps done."""
    reason: Literal["lowest_held_out_kl", "last_step"]
    held_out_kl: float | None = None
    """KL of that state in nats, on the few rows measured during training; the report's own figures exclude them."""
    start_kl: float | None = None
    """KL of the state before training, on the same rows."""


class Report(FrozenModel):
    """Contents of `evaluation.json`; `demo-report.json` has its keys."""

    teacher: TeacherQuality
    rewired: Quality | None
    """Student with the copied start; None if only the finished model was measured."""
    calibrated: Quality | None
    """Student with the calibrated start; None if the job starts from copies."""
    distilled: Quality
    perplexity_ratio: float
    """distilled.perplexity / teacher.perplexity."""
    kl_recovered: float | None
    """1 - distilled.kl / rewired.kl; 0 if rewiring costs nothing. It depends on how bad the start is, so it is no
    gate."""
    num_positions: int
    """Held-out positions compared."""
    intervals: HeldOutIntervals | None = None
    """Intervals of `distilled` and `perplexity_ratio`; None if a single part of a text was measured, and in older
    reports."""
    prefill_flops_ratio: float
    """SwiftKV / dense, counted on a forward pass."""
    kv_bytes_ratio: float
    """SwiftKV / dense, of the KV caches."""
    prompt_length: int
    """Tokens of the prompt that the figures of both modes refer to."""
    prefill_flops_per_token: BothModes
    kv_bytes_per_token: BothModes
    """Bytes in the caches, in the model's own dtype."""
    ttft_ms: BothModes
    """Medians of the time from the prompt to the first token, milliseconds."""
    tokens_trained: int | None
    training: TrainingOutcome | None = None
    """Training run of the model, if known."""
    continuations: ContinuationQuality | None = None
    by_position: tuple[QualityBin, ...] = ()
    """Quality of the distilled student by the position within the counted part of a sample, such as an answer."""
    by_prompt_length: tuple[QualityBin, ...] = ()
    """The distilled student by the tokens before the counted part of the sample."""
    exit_head: tuple[ExitBin, ...] | None = None
    """Figure D.1 of the paper; None for a model without an exit head."""
    tasks: tuple[TaskScore, ...] = ()
    tasks_left_out: tuple[str, ...] = ()
    """Tasks that were not started within `evaluation.max_minutes`, and needles if the harness is not installed; they
    have no gates."""
    gates: tuple[Gate, ...] = ()

    @classmethod
    def build(
        cls,
        spec: EvaluationSpec,
        *,
        distilled: Totals,
        cost: PrefillCost,
        rewired: Totals | None = None,
        calibrated: Totals | None = None,
        tokens_trained: int | None = None,
        training: TrainingOutcome | None = None,
        continuations: ContinuationQuality | None = None,
        tasks: TaskResults = NO_TASKS,
        instruct: bool = False,
    ) -> Self:
        """Build the report from measurements on the same rows before and after training. `instruct`: whether the model
        is instruction-tuned, which resolves limits that the spec leaves open."""
        student, teacher = distilled.student, distilled.teacher
        ratio = student.perplexity / teacher.perplexity
        recovered, intervals = None, HeldOutIntervals.of(distilled.samples)
        if rewired:
            recovered = 1.0 - student.kl / rewired.student.kl if rewired.student.kl else 0.0
        return cls(
            teacher=teacher,
            rewired=rewired.student if rewired else None,
            calibrated=calibrated.student if calibrated else None,
            distilled=student,
            perplexity_ratio=ratio,
            kl_recovered=recovered,
            num_positions=distilled.num_positions,
            intervals=intervals,
            prefill_flops_ratio=cost.flops_ratio,
            kv_bytes_ratio=cost.kv_bytes_ratio,
            prompt_length=cost.prompt_length,
            prefill_flops_per_token=_both(cost, "flops_per_token"),
            kv_bytes_per_token=_both(cost, "kv_bytes_per_token"),
            ttft_ms=_both(cost, "ttft_ms"),
            tokens_trained=tokens_trained,
            training=training,
            continuations=continuations,
            by_position=quality_bins(distilled.by_position),
            by_prompt_length=quality_bins(distilled.by_prompt_length),
            exit_head=exit_bins(distilled.exit_head),
            tasks=tasks.scores,
            tasks_left_out=tasks.left_out,
            gates=_gates(spec, (student, ratio, intervals), tasks.scores, instruct=instruct),
        )

    def check_gates(self) -> None:
        """Raise `QualityGateError` with the reasons of the gates that failed, if any. Undecided gates do not fail a
        job."""
        refused = [gate for gate in self.gates if gate.outcome == "failed"]
        if not refused:
            return
        reasons = "; ".join(gate.reason for gate in refused)
        raise QualityGateError(
            f"{reasons} (perplexity {self.distilled.perplexity:.3f} against the teacher's "
            f"{self.teacher.perplexity:.3f}, KL {self.distilled.kl:.4f} nats, top-1 agreement "
            f"{self.distilled.top1_agreement:.1%}); use more training or fewer skipped layers",
            field=refused[0].field,
            value=refused[0].value,
        )


def _both(cost: PrefillCost, figure: str) -> BothModes:
    return BothModes(dense=getattr(cost.dense, figure), swiftkv=getattr(cost.swiftkv, figure))


def quality_bins(sums: BinnedSums) -> tuple[QualityBin, ...]:
    """The bins that hold positions."""
    return tuple(
        QualityBin(
            low=low,
            high=BORDERS[i + 1] if i + 1 < len(BORDERS) else None,
            num_positions=count,
            perplexity_ratio=math.exp((sums.student_nll[i] - sums.teacher_nll[i]) / count),
            kl=sums.kl[i] / count,
            top1_agreement=sums.agreements[i] / count,
        )
        for i, (low, count) in enumerate(zip(BORDERS, sums.positions, strict=True))
        if count
    )


def exit_bins(counts: ExitCounts) -> tuple[ExitBin, ...] | None:
    """Figure D.1 of the paper; None for a model without an exit head."""
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


def _gates(
    spec: EvaluationSpec,
    held_out: tuple[Quality, float, HeldOutIntervals | None],
    tasks: tuple[TaskScore, ...],
    *,
    instruct: bool,
) -> tuple[Gate, ...]:
    def settle(limit: float | Literal["auto"] | None, default: float) -> float | None:
        return limit if limit != "auto" else default if instruct else None

    num_gates = max(count_task_gates(spec), sum(not score.task.startswith(NEEDLE_PREFIX) for score in tasks))
    student, ratio, known = held_out
    least = settle(spec.min_top1_agreement, MIN_TOP1_AGREEMENT)
    figures: tuple[tuple[str, str, float, float | None], ...] = (
        ("kl", "held-out KL in nats", student.kl, settle(spec.max_kl, MAX_KL)),
        ("perplexity_ratio", "held-out perplexity relative to the teacher's", ratio, spec.max_perplexity_ratio),
        ("top1_agreement", "held-out top-1 agreement", student.top1_agreement, least),
    )
    gates = [
        _held_out_gate(name, subject, value, limit, known)
        for name, subject, value, limit in figures
        if limit is not None
    ]
    gates += [gate for gate in (_task_gate(score, spec, num_gates) for score in tasks) if gate is not None]
    return tuple(sorted(gates, key=lambda gate: gate.severity, reverse=True))


def _held_out_gate(name: str, subject: str, value: float, limit: float, known: HeldOutIntervals | None) -> Gate:
    is_least = name == "top1_agreement"
    interval, num_units = (None, 0) if known is None else (getattr(known, name), known.num_units)
    field = f"{'min' if is_least else 'max'}_{name}"
    return _gate(field, subject, value, limit, interval, num_units, is_least=is_least)


def _gate(
    field: str,
    subject: str,
    value: float,
    limit: float,
    interval: Interval | None,
    num_samples: int,
    *,
    is_least: bool = False,
    share: float | None = None,
) -> Gate:
    """Judge a value by its interval. `share`: see `samples_to_decide`."""
    outcome, needed = _outcome(value, limit, interval, is_least=is_least), None
    if outcome == "undecided" and interval is not None:
        needed = samples_to_decide(interval, value, limit, num_samples, share=share)
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


def _outcome(value: float, limit: float, interval: Interval | None, *, is_least: bool = False) -> Verdict:
    """Passed if the whole interval is within the limit, failed if it is entirely beyond; a value that is not finite
    fails."""
    if not math.isfinite(value):
        return "failed"
    if interval is None:
        return "undecided"
    low, high = interval
    if is_least:
        low, high, limit = -high, -low, -limit
    return "passed" if high <= limit else "failed" if low > limit else "undecided"


def _task_gate(score: TaskScore, spec: EvaluationSpec, num_gates: int) -> Gate | None:
    """Test for non-inferiority: passed if the whole interval of the points lost is within the limit, failed if it is
    entirely beyond. None if there is no limit, or if the teacher itself finds few needles."""
    is_needle = score.task.startswith(NEEDLE_PREFIX)
    asked = spec.max_needle_drop if is_needle else spec.max_drop
    if asked is None or (is_needle and score.teacher < TEACHER_FINDS):
        return None
    if asked != "auto":
        limit = asked
    elif is_needle:
        limit = compute_default_needle_limit(score.num_samples)
    elif score.is_share:
        limit = compute_default_limit(score.num_samples, num_gates=num_gates)
    else:
        limit = DEFAULT_DROP_RANGE[0]
    field, share = "max_needle_drop" if is_needle else "max_drop", 100.0 if score.is_share else None
    subject = f"points lost on {score.task}"
    return _gate(field, subject, score.drop, limit, score.drop_interval, score.num_samples, share=share)
