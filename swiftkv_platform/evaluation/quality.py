"""Agreement of a student, and of its exit head, with the teacher on held-out rows. Limits are in `report`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self, cast

import numpy as np
import torch

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.engine import kernels
from swiftkv_platform.errors import DataError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.model.context import PACKED_ATTENTION, TokenSelection
from swiftkv_platform.model.packed_attention import (
    DeepSpanWriter,
    add_conversation_spans,
    get_packed_samples,
    make_packed_context,
    run_lower_layers_by_span,
    to_tensors,
)
from swiftkv_platform.model.workers import Workers

_LOGITS_PER_CHUNK = 1 << 22
"""Elements of a [chunk, vocab] buffer: 16 MiB in float32. Smaller chunks run faster on a CPU."""

DEFAULT_WORKERS = Workers()
"""The workers of the default process group, or a single worker without a group."""

NUM_EXIT_BINS = 20
"""Bins of equal width over the exit head's maximum probability; the last begins at 0.95, the paper's threshold."""


class TeacherQuality(FrozenBaseModel):
    """The teacher on held-out text."""

    perplexity: float


class Quality(FrozenBaseModel):
    """A student against its teacher on held-out text."""

    perplexity: float
    kl: float
    """Mean KL(teacher || student) over positions, in nats, at temperature 1."""
    top1_agreement: float
    """Share of the positions where student and teacher have the same most likely token."""


class _AddableSums:
    """Base of sums by bin, one tuple per field; adding two instances adds their fields."""

    def __add__(self, other: Self) -> Self:
        pairs = ((getattr(self, item.name), getattr(other, item.name)) for item in fields(cast("Any", self)))
        return type(self)(*(tuple(a + b for a, b in zip(*pair, strict=True)) for pair in pairs))


@dataclass(frozen=True)
class ExitCounts(_AddableSums):
    """Counts by the exit head's maximum probability, in `NUM_EXIT_BINS` bins."""

    positions: tuple[int, ...] = (0,) * NUM_EXIT_BINS
    """Number of held-out positions per bin."""
    agreements: tuple[int, ...] = (0,) * NUM_EXIT_BINS
    """Positions where exit head and student have the same most likely token."""


BIN_BOUNDS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Lower bounds of bins of positions and of prompt lengths, in tokens; the last bin is open."""


@dataclass(frozen=True)
class BinnedSums(_AddableSums):
    """Sums over positions in the bins of `BIN_BOUNDS`."""

    positions: tuple[int, ...] = (0,) * len(BIN_BOUNDS)
    """Number of held-out positions per bin."""
    teacher_nll: tuple[float, ...] = (0.0,) * len(BIN_BOUNDS)
    student_nll: tuple[float, ...] = (0.0,) * len(BIN_BOUNDS)
    kl: tuple[float, ...] = (0.0,) * len(BIN_BOUNDS)
    agreements: tuple[int, ...] = (0,) * len(BIN_BOUNDS)


@dataclass(frozen=True)
class SampleSums:
    """Sums over the counted positions of one sample: a conversation, or a part of a text."""

    sample: int
    text: int
    """Index of the conversation or text that the sample belongs to."""
    positions: int
    teacher_nll: float
    student_nll: float
    kl: float
    agreements: int


@dataclass(frozen=True)
class HeldOutTotals:
    """Sums over held-out positions; adding two instances adds their fields."""

    num_positions: int = 0
    teacher_nll: float = 0.0
    """Negative log-likelihood of the next token, in nats."""
    student_nll: float = 0.0
    kl: float = 0.0
    agreements: int = 0
    exit_head: ExitCounts = field(default_factory=ExitCounts)
    """Zeros for a model without an exit head."""
    by_position: BinnedSums = field(default_factory=BinnedSums)
    """Binned by the position within the counted part of its sample, such as the answer."""
    by_prompt_length: BinnedSums = field(default_factory=BinnedSums)
    """Binned by the sample's tokens before its first counted position."""
    samples: tuple[SampleSums, ...] = ()
    """One entry per sample with counted positions; empty in results of earlier versions."""

    def __add__(self, other: HeldOutTotals) -> HeldOutTotals:
        return HeldOutTotals(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

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


def select_evaluation_rows(rows: PackedRows, *, max_tokens: int) -> list[int]:
    """Return evenly spaced rows of about `max_tokens` tokens in total, at least one. (Packing sorts rows by the length
    of their samples, so the first rows are not representative.) Raises `DataError` if no position counts."""
    if not rows.num_counted_tokens:
        raise DataError(
            "data.sources has no held-out text to evaluate on: training and evaluation need at least one sample each; "
            "add different rows",
            field="data.sources",
        )
    num_rows = min(max(int(max_tokens / (rows.num_tokens / len(rows))), 1), len(rows))
    return [int(i) for i in np.linspace(0, len(rows) - 1, num_rows).round()]


def evaluate(
    model: Any, rows: PackedRows, *, max_tokens: int, batch_size: int, workers: Workers = DEFAULT_WORKERS
) -> HeldOutTotals:
    """Compare teacher and student mode of a SwiftKV model at the positions in the rows' `loss_mask`. Raises `DataError`
    if nothing is held out, `ModelError` if the model was exported without its teacher.

    Args:
        model: a SwiftKV causal language model with its teacher's projections; its mode does not matter.
        max_tokens: held-out tokens to measure, see `select_evaluation_rows`.
        batch_size: rows per forward pass.
        workers: each measures a share of the rows; all return the total.
    """
    indices = select_evaluation_rows(rows, max_tokens=max_tokens)
    share = -(-len(indices) // workers.size)
    # In step, a worker without further rows runs one that is not counted.
    fill = indices[:1] * (share - len(workers.get_share(indices))) if workers.in_step else []
    totals = measure_rows(model, rows, workers.get_share(indices), batch_size=min(batch_size, share), not_counted=fill)
    return sum(workers.gather(totals), HeldOutTotals())


@torch.no_grad()
def measure_rows(
    model: Any, rows: PackedRows, indices: Sequence[int], *, batch_size: int, not_counted: Sequence[int] = ()
) -> HeldOutTotals:
    """Return the sums over the rows `indices`; the rows `not_counted` run afterwards and add nothing."""
    totals = HeldOutTotals()
    all_rows = [*indices, *not_counted]
    with run_in_evaluation_mode(model):
        for start in range(0, len(all_rows), batch_size):
            chosen = all_rows[start : start + batch_size]
            batch = to_tensors(rows.make_padded_batch(chosen))
            batch["loss_mask"][max(len(indices) - start, 0) :] = False
            on_device = {name: tensor.to(model.device) for name, tensor in batch.items()}
            totals += _measure_batch(model, on_device, _SampleLayout.from_rows(rows, chosen))
    return totals


@dataclass(frozen=True)
class _SampleLayout:
    """Lengths and indices of the samples of concatenated rows; padding belongs to the last sample of a row."""

    lengths: list[int]
    samples: list[int]
    texts: list[int]

    @classmethod
    def from_rows(cls, rows: PackedRows, indices: Sequence[int]) -> _SampleLayout:
        layout = cls([], [], [])
        for index in indices:
            own = [int(length) for length in rows.get_sample_lengths(index)]
            own[-1] += rows.max_length - sum(own)
            layout.lengths.extend(own)
            layout.samples.extend(map(int, rows.get_sample_indices(index)))
            layout.texts.extend(map(int, rows.get_content_ids(index)))
        return layout


def _measure_batch(model: Any, batch: dict[str, torch.Tensor], sample_layout: _SampleLayout) -> HeldOutTotals:
    """Measure one forward pass over tensors [rows, max_length]; the layers below l run once if both modes share them.
    Positions that count are deep tokens; each run of them is an answer."""
    decoder, counted = model.model, batch["loss_mask"]
    targets = batch["input_ids"].roll(-1, dims=1)[counted]  # [num_positions]
    if decoder.layer_map.deep_leaders:
        context = make_packed_context(
            decoder,
            batch["input_ids"],
            batch["position_ids"],
            sample_layout.lengths,
            inference_operator=kernels.find_packed_operator(model.device, model.dtype),
            dtype=model.dtype,
        )
    else:
        context = decoder.make_context(batch["input_ids"], position_ids=batch["position_ids"])
    span_context, selection, student_rows = context, None, counted.flatten().nonzero().squeeze(1)
    if decoder.layer_map.deep_leaders:
        deep_tail = model.config.shape.swiftkv_deep_tail
        span_context = add_conversation_spans(context, counted.flatten(), deep_tail, overlapping=True)
        samples = get_packed_samples(span_context)
        selection, student_rows = TokenSelection(samples.deep_tokens), samples.counted_rows
    x, entering = run_lower_layers_by_span(decoder, context, span_context, selection)
    teacher_x = x
    if decoder.run_teacher_lower is not None or decoder.layer_map.bypassed_layers:
        teacher_x = (decoder.run_teacher_lower or decoder.run_lower_layers)(context)
    teacher = _select_counted(decoder.run_teacher_upper(teacher_x, context), counted)  # [num_positions, hidden_size]
    deep = DeepSpanWriter(decoder.project_key_values(x, context.rotation)) if decoder.layer_map.deep_leaders else None
    output = decoder.run_student_upper(x, span_context, selection=selection, deep=deep, hidden=entering)
    student = output.flatten(0, 1)[student_rows]
    exits = entering.flatten(0, 1)[student_rows] if model.config.shape.has_exit_head else None
    positions, prompts = _locate_positions(batch["position_ids"], counted)  # [num_positions]
    chunk_size = max(1, _LOGITS_PER_CHUNK // model.config.vocab_size)
    chunks, totals = list[torch.Tensor](), HeldOutTotals()
    for start in range(0, len(targets), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = model.lm_head(student[chunk])
        chunks.append(_compute_figures(model.lm_head(teacher[chunk]), logits, targets[chunk]))
        if exits is not None:
            totals += HeldOutTotals(exit_head=_count_exits(model.exit_logits(exits[chunk]), logits.argmax(-1)))
    if not chunks:
        return totals
    figures = torch.cat(chunks, dim=1)
    teacher_nll, student_nll, kl, agreements = figures.sum(-1).tolist()
    return totals + HeldOutTotals(
        len(targets),
        teacher_nll=teacher_nll,
        student_nll=student_nll,
        kl=kl,
        agreements=int(agreements),
        by_position=_sum_by_bin(positions, figures),
        by_prompt_length=_sum_by_bin(prompts, figures),
        samples=_sum_by_sample(figures, counted, sample_layout),
    )


def _select_counted(states: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Select the states of the counted positions, [num_positions, size], from rows or concatenated rows."""
    return states.flatten(0, 1)[counted.flatten()]


def _count_exits(logits: torch.Tensor, student: torch.Tensor) -> ExitCounts:
    """Count exits from the head's logits [num_positions, vocab_size] and the student's tokens [num_positions]."""
    confidence, tokens = logits.float().softmax(-1).max(-1)
    bins = (confidence * NUM_EXIT_BINS).long().clamp(max=NUM_EXIT_BINS - 1)
    counted = (torch.bincount(some, minlength=NUM_EXIT_BINS) for some in (bins, bins[tokens == student]))
    return ExitCounts(*(tuple(counts.tolist()) for counts in counted))


def _locate_positions(position_ids: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each counted position its index in the counted part of its sample, and the number of tokens before
    that part: two tensors [num_positions], from tensors [rows, max_length]. A sample begins where `position_ids` is
    0."""
    begins = (position_ids == 0).long().cumsum(-1)  # [rows, max_length]: samples so far in the row
    rows = torch.arange(len(begins), device=begins.device).unsqueeze(-1) * (begins.shape[-1] + 1)
    samples = (begins + rows)[counted]
    positions = position_ids[counted]
    # One entry for every possible sample, because only the device knows their number.
    first = begins.new_full((len(begins) * (begins.shape[-1] + 1),), torch.iinfo(torch.long).max)
    first = first.scatter_reduce(0, samples, positions, "amin")
    prompts = first[samples]
    return positions - prompts, prompts


def _sum_by_sample(
    figures: torch.Tensor, counted: torch.Tensor, sample_layout: _SampleLayout
) -> tuple[SampleSums, ...]:
    """Sum `figures` [4, num_positions], see `_compute_figures`, for each sample with `counted` positions in rows [rows,
    max_length]."""
    number = len(sample_layout.lengths)
    owner = torch.from_numpy(np.repeat(np.arange(number), sample_layout.lengths)).to(figures.device)[counted.flatten()]
    return tuple(
        SampleSums(sample, text, int(positions), teacher_nll, student_nll, kl, int(agreements))
        for sample, text, (teacher_nll, student_nll, kl, agreements, positions) in zip(
            sample_layout.samples, sample_layout.texts, _sum_over_positions(owner, number, figures), strict=True
        )
        if positions
    )


def _sum_by_bin(values: torch.Tensor, figures: torch.Tensor) -> BinnedSums:
    """Sum `figures` [4, num_positions], see `_compute_figures`, by the bins of `values` [num_positions]."""
    bins = torch.bucketize(values, torch.tensor(BIN_BOUNDS[1:], device=values.device), right=True)
    teacher_nll, student_nll, kl, agreements, positions = zip(
        *_sum_over_positions(bins, len(BIN_BOUNDS), figures), strict=True
    )
    return BinnedSums(tuple(map(int, positions)), teacher_nll, student_nll, kl, tuple(map(int, agreements)))


def _sum_over_positions(groups: torch.Tensor, num_groups: int, figures: torch.Tensor) -> list[list[float]]:
    """Sum `figures` [4, num_positions] and count positions for each group; `groups`: index of each position's group."""
    none = torch.zeros(num_groups, len(figures) + 1, dtype=torch.double, device=figures.device)
    sums: list[list[float]] = none.index_add_(0, groups, torch.cat([figures, torch.ones_like(figures[:1])]).T).tolist()
    return sums


def _compute_figures(teacher: torch.Tensor, student: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return [4, num_positions] for logits [num_positions, vocab_size] and the ids of the next tokens [num_positions]:
    the negative log-likelihoods of teacher and student, KL, and 1 where the most likely tokens are the same."""
    log_p, log_q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    index = targets.unsqueeze(-1)
    of_teacher, of_student = (-log.gather(-1, index).squeeze(-1) for log in (log_p, log_q))
    same = log_p.argmax(-1) == log_q.argmax(-1)
    return torch.stack([of_teacher.double(), of_student.double(), kl.double(), same.double()])


@contextmanager
def run_in_evaluation_mode(model: Any) -> Iterator[None]:
    """Run a SwiftKV model without dropout; restore its mode and flags afterwards."""
    decoder = model.model
    mode, was_training = decoder.swiftkv_enabled, model.training
    changed: list[tuple[Any, str]] = []
    if model.config.layer_map.deep_leaders:
        kept = (
            getattr(layers, "__self__", decoder) for layers in (decoder.run_teacher_lower, decoder.run_teacher_upper)
        )
        changed = [
            (one, one.config._attn_implementation) for one in {id(one): one for one in (decoder, *kept)}.values()
        ]
    model.eval()
    try:
        for one, _ in changed:
            one.set_attn_implementation(PACKED_ATTENTION)  # falls back to SDPA without samples
        yield
    finally:
        for one, attention in changed:
            one.set_attn_implementation(attention)
        model.swiftkv(mode).train(was_training)
