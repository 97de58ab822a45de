"""The report of a job, and its quality gates. Knows figures, not how they are measured nor where reports are kept."""

from __future__ import annotations

from typing import Self

from swiftkv_platform.errors import QualityGateError
from swiftkv_platform.evaluation.continuations import ContinuationQuality
from swiftkv_platform.evaluation.harness.run import TaskResults, TaskScore
from swiftkv_platform.evaluation.prefill_cost import PrefillCost
from swiftkv_platform.evaluation.quality import NUM_EXIT_BINS, ExitCounts, Quality, TeacherQuality, Totals
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import EvaluationSpec

NO_TASKS = TaskResults()


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


class Gate(FrozenModel):
    """One limit of the spec and what was measured."""

    field: str
    """Dotted path in the spec."""
    subject: str
    """Quantity that is limited, in words."""
    limit: float
    value: float
    passed: bool


class Report(FrozenModel):
    """`evaluation.json`; `demo-report.json` takes its keys."""

    teacher: TeacherQuality
    rewired: Quality | None
    """The student as it starts with copied projections; None where only the finished model is at hand."""
    calibrated: Quality | None
    """The student as it starts with calibrated projections; None for a job that starts from the copies."""
    distilled: Quality
    perplexity_ratio: float
    """distilled.perplexity / teacher.perplexity."""
    kl_recovered: float | None
    """1 - distilled.kl / rewired.kl; 0 where rewiring costs nothing. It depends on how bad the start is: no gate."""
    num_positions: int
    """Held-out positions compared."""
    prefill_flops_ratio: float
    """SwiftKV / dense, counted on a forward pass."""
    kv_bytes_ratio: float
    """SwiftKV / dense, of the caches of a forward pass."""
    prompt_length: int
    """Tokens of the prompt that the figures of both modes are of."""
    prefill_flops_per_token: BothModes
    kv_bytes_per_token: BothModes
    """Bytes in the caches, in the model's own dtype."""
    ttft_ms: BothModes
    """Medians of the time from the prompt to the first token, milliseconds."""
    tokens_trained: int | None
    continuations: ContinuationQuality | None = None
    exit_head: tuple[ExitBin, ...] | None = None
    """Figure D.1 of the paper; None for a model without an exit head."""
    tasks: tuple[TaskScore, ...] = ()
    tasks_left_out: tuple[str, ...] = ()
    """Tasks that `evaluation.max_minutes` left no time for; no gate judges them."""
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
        continuations: ContinuationQuality | None = None,
        tasks: TaskResults = NO_TASKS,
    ) -> Self:
        """The report from what was measured on the same rows before and after training."""
        student, teacher = distilled.student, distilled.teacher
        ratio = student.perplexity / teacher.perplexity
        return cls(
            teacher=teacher,
            rewired=rewired.student if rewired else None,
            calibrated=calibrated.student if calibrated else None,
            distilled=student,
            perplexity_ratio=ratio,
            kl_recovered=_recovered(rewired.student.kl, student.kl) if rewired else None,
            num_positions=distilled.num_positions,
            prefill_flops_ratio=cost.flops_ratio,
            kv_bytes_ratio=cost.kv_bytes_ratio,
            prompt_length=cost.prompt_length,
            prefill_flops_per_token=_both(cost, "flops_per_token"),
            kv_bytes_per_token=_both(cost, "kv_bytes_per_token"),
            ttft_ms=_both(cost, "ttft_ms"),
            tokens_trained=tokens_trained,
            continuations=continuations,
            exit_head=_exit_bins(distilled.exit_head),
            tasks=tasks.scores,
            tasks_left_out=tasks.left_out,
            gates=_gates(spec, student, ratio, tasks.scores),
        )

    def check_gates(self) -> None:
        """Refuse a student that is too far from its teacher.

        Raises:
            QualityGateError: with the figures that decided.
        """
        failed = [gate for gate in self.gates if not gate.passed]
        if not failed:
            return
        reasons = "; ".join(
            f"{gate.subject} is {gate.value:.4g}, {gate.field} asks for {gate.limit:g}" for gate in failed
        )
        raise QualityGateError(
            f"{reasons} (perplexity {self.distilled.perplexity:.3f} against the teacher's "
            f"{self.teacher.perplexity:.3f}, KL {self.distilled.kl:.4f} nats, top-1 agreement "
            f"{self.distilled.top1_agreement:.1%}); more training or fewer skipped layers would do",
            field=failed[0].field,
            value=failed[0].value,
        )


def _both(cost: PrefillCost, figure: str) -> BothModes:
    return BothModes(dense=getattr(cost.dense, figure), swiftkv=getattr(cost.swiftkv, figure))


def _recovered(before: float, after: float) -> float:
    return 1.0 - after / before if before else 0.0


def _exit_bins(counts: ExitCounts) -> tuple[ExitBin, ...] | None:
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


def _gates(spec: EvaluationSpec, student: Quality, ratio: float, tasks: tuple[TaskScore, ...]) -> tuple[Gate, ...]:
    # A value that is not a number passes no gate.
    measured = [
        ("max_kl", "held-out KL in nats", student.kl, spec.max_kl),
        ("max_perplexity_ratio", "held-out perplexity relative to the teacher's", ratio, spec.max_perplexity_ratio),
    ]
    measured += [("max_drop", f"points lost on {score.task}", score.drop, spec.max_drop) for score in tasks]
    gates = [
        Gate(field=f"evaluation.{name}", subject=subject, limit=limit, value=value, passed=value <= limit)
        for name, subject, value, limit in measured
        if limit is not None
    ]
    if spec.min_top1_agreement is not None:
        gates.append(
            Gate(
                field="evaluation.min_top1_agreement",
                subject="held-out top-1 agreement",
                limit=spec.min_top1_agreement,
                value=student.top1_agreement,
                passed=student.top1_agreement >= spec.min_top1_agreement,
            )
        )
    return tuple(gates)
