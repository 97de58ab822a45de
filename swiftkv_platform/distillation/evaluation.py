"""How close a student is to its teacher on held-out rows, the report of a job, and its quality gate. Knows neither the
training step nor where reports are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from swiftkv_platform.distillation.packing import PackedRows
from swiftkv_platform.distillation.prefill_cost import PrefillCost
from swiftkv_platform.errors import DataError, QualityGateError
from swiftkv_platform.specs import EvaluationSpec

_LOGITS_PER_CHUNK = 1 << 22
"""Elements of a [chunk, vocab] buffer: 16 MiB in float32. Smaller chunks run faster on CPU, and only a sum is kept."""


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TeacherQuality(_Report):
    """The teacher on held-out text."""

    perplexity: float


class Quality(_Report):
    """A student against its teacher on held-out text."""

    perplexity: float
    kl: float
    """Mean KL(teacher || student) over positions, in nats, at temperature 1."""
    top1_agreement: float
    """Share of the positions where the student's most likely token is the teacher's."""


@dataclass(frozen=True)
class Totals:
    """Sums over positions; those of several workers add up."""

    num_positions: int = 0
    teacher_nll: float = 0.0
    """Negative log-likelihood of the next token, in nats."""
    student_nll: float = 0.0
    kl: float = 0.0
    agreements: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def teacher(self) -> TeacherQuality:
        return TeacherQuality(perplexity=math.exp(self.teacher_nll / self.num_positions))

    @property
    def student(self) -> Quality:
        return Quality(
            perplexity=math.exp(self.student_nll / self.num_positions),
            kl=self.kl / self.num_positions,
            top1_agreement=self.agreements / self.num_positions,
        )


def evaluation_rows(rows: PackedRows, *, max_tokens: int) -> list[int]:
    """Evenly spaced rows of about `max_tokens` tokens together, but one at least: packing sorts rows by the length of
    their samples, so the first ones would be no fair share.

    Raises:
        DataError: there are no rows, or none has a position that counts.
    """
    if not rows.num_counted_tokens:
        raise DataError(
            "data.validation_fraction leaves no held-out text to evaluate on; a larger share or more samples would do",
            field="data.validation_fraction",
        )
    num_rows = min(max(int(max_tokens / (rows.num_tokens / len(rows))), 1), len(rows))
    return [int(i) for i in np.linspace(0, len(rows) - 1, num_rows).round()]


def evaluate(model: Any, rows: PackedRows, *, max_tokens: int, batch_size: int) -> Totals:
    """Compare teacher and student mode of a SwiftKV model over the positions that the rows' `loss_mask` marks.

    Args:
        model: a SwiftKV causal language model with its teacher's projections; its mode does not matter.
        max_tokens: held-out tokens to measure, see `evaluation_rows`.
        batch_size: rows a forward pass.

    Raises:
        DataError: nothing is held out.
        ModelError: the model was exported without its teacher.
    """
    return measure(model, rows, evaluation_rows(rows, max_tokens=max_tokens), batch_size=batch_size)


@torch.no_grad()
def measure(model: Any, rows: PackedRows, indices: Sequence[int], *, batch_size: int) -> Totals:
    """The sums over the rows `indices`; workers may take a share each."""
    totals = Totals()
    with _evaluation_mode(model):
        for start in range(0, len(indices), batch_size):
            batch = rows.batch(indices[start : start + batch_size])
            totals += _measure_batch(model, {name: tensor.to(model.device) for name, tensor in batch.items()})
    return totals


def _measure_batch(model: Any, batch: dict[str, torch.Tensor]) -> Totals:
    """One forward pass, the layers below l computed once; tensors are [rows, max_length]."""
    decoder = model.model
    context = decoder.begin(batch["input_ids"], position_ids=batch["position_ids"])
    x = decoder.lower(context)
    counted = batch["loss_mask"]
    targets = batch["input_ids"].roll(-1, dims=1)[counted]  # [num_positions]
    teacher = decoder.teacher_upper(x, context)[counted]  # [num_positions, hidden_size]
    student = decoder.student_upper(x, context)[counted]
    chunk_size = max(1, _LOGITS_PER_CHUNK // model.config.vocab_size)
    totals = Totals()
    for start in range(0, len(targets), chunk_size):
        chunk = slice(start, start + chunk_size)
        totals += _compare(model.lm_head(teacher[chunk]), model.lm_head(student[chunk]), targets[chunk])
    return totals


def _compare(teacher: torch.Tensor, student: torch.Tensor, targets: torch.Tensor) -> Totals:
    """Sums over positions for logits [num_positions, vocab_size] and the ids of the next tokens [num_positions]."""
    log_p, log_q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)  # [num_positions]
    index = targets.unsqueeze(-1)
    return Totals(
        num_positions=len(targets),
        teacher_nll=-log_p.gather(-1, index).double().sum().item(),
        student_nll=-log_q.gather(-1, index).double().sum().item(),
        kl=kl.double().sum().item(),
        agreements=int((log_p.argmax(-1) == log_q.argmax(-1)).sum()),
    )


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class TimeToFirstToken(_Report):
    """Milliseconds, medians."""

    dense: float
    swiftkv: float


class Report(_Report):
    """`evaluation.json` and `demo-report.json`."""

    teacher: TeacherQuality
    rewired: Quality
    """The student as it starts with copied projections."""
    calibrated: Quality | None
    """As it starts with calibrated ones; null for a job that starts from the copies."""
    distilled: Quality
    kl_recovered: float
    """1 - distilled.kl / rewired.kl; 0 where rewiring costs nothing."""
    prefill_flops_ratio: float
    """SwiftKV / dense, counted on a forward pass."""
    kv_bytes_ratio: float
    """SwiftKV / dense, of the caches of a forward pass."""
    ttft_ms: TimeToFirstToken
    tokens_trained: int

    @classmethod
    def build(
        cls,
        *,
        rewired: Totals,
        calibrated: Totals | None,
        distilled: Totals,
        cost: PrefillCost,
        tokens_trained: int,
    ) -> Self:
        """The report from what was measured on the same rows before and after training."""
        return cls(
            teacher=distilled.teacher,
            rewired=rewired.student,
            calibrated=calibrated.student if calibrated else None,
            distilled=distilled.student,
            kl_recovered=1.0 - distilled.student.kl / rewired.student.kl if rewired.student.kl else 0.0,
            prefill_flops_ratio=cost.flops_ratio,
            kv_bytes_ratio=cost.kv_bytes_ratio,
            ttft_ms=TimeToFirstToken(dense=cost.dense.ttft_ms, swiftkv=cost.swiftkv.ttft_ms),
            tokens_trained=tokens_trained,
        )


def check_gate(report: Report, spec: EvaluationSpec) -> None:
    """Refuse a student that is too far from its teacher.

    Raises:
        QualityGateError: with the figures that decided.
    """
    if spec.max_kl is not None and not report.distilled.kl <= spec.max_kl:
        raise QualityGateError(
            f"held-out KL is {report.distilled.kl:.4f} nats; evaluation.max_kl allows {spec.max_kl:g} (perplexity "
            f"{report.distilled.perplexity:.3f} against the teacher's {report.teacher.perplexity:.3f}, top-1 agreement "
            f"{report.distilled.top1_agreement:.1%}); more training or fewer skipped layers would do",
            field="evaluation.max_kl",
            value=report.distilled.kl,
        )
