"""Confidence intervals of the quality that a student loses, from pairs of teacher and student on the same samples or
conversations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from swiftkv_platform.contract.row_results import Interval
from swiftkv_platform.evaluation.quality import SampleSums
from swiftkv_platform.frozen import FrozenBaseModel

MIN_SAMPLES = 30
"""Minimum samples for the interval of an unbounded score, by normal theory."""
_Z_975 = 1.959963984540054
"""97.5% quantile of the normal distribution, for two-sided 95% intervals."""
_NUM_RESAMPLINGS = 500
MIN_TEXTS = 10
"""Minimum number of texts to resample whole texts. With fewer, their parts of at most a row count as independent."""
_MAX_LOG_MARGIN = 50.0
"""Maximum margin of an interval on a logarithmic scale."""
Sums = npt.NDArray[np.float64]


def bootstrap_interval(
    teacher: Sequence[Any], student: Sequence[Any], aggregate: Callable[[Sequence[Any]], float]
) -> Interval | None:
    """Return the interval of `aggregate(teacher) - aggregate(student)` by resampling pairs.

    Returns:
        None for fewer than `MIN_SAMPLES`, or if an aggregate is not finite.
    """
    if len(teacher) < MIN_SAMPLES:
        return None
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(_NUM_RESAMPLINGS):
        drawn = rng.integers(len(teacher), size=len(teacher))
        draws.append(aggregate([teacher[i] for i in drawn]) - aggregate([student[i] for i in drawn]))
    margin = _Z_975 * float(np.std(draws, ddof=1))
    loss = aggregate(teacher) - aggregate(student)
    return (loss - margin, loss + margin) if math.isfinite(margin) and math.isfinite(loss) else None


def bootstrap_margin(
    parts: npt.NDArray[np.float64], statistic: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
) -> float | None:
    """Return the margin of the 95% interval of `statistic`, by resampling the parts with replacement.

    Args:
        parts: sums [num_parts, num_sums] of each independent part, such as a conversation, for teacher and student.
        statistic: computes figures [n] from sums [n, num_sums].

    Returns:
        None for a single part, or if the margin is not finite. Student's quantile widens the margin of few parts.
    """
    num_parts = len(parts)
    if num_parts < 2:
        return None
    drawn = np.random.default_rng(0).multinomial(num_parts, np.full(num_parts, 1.0 / num_parts), size=_NUM_RESAMPLINGS)
    spread = float(np.std(statistic(drawn @ parts), ddof=1)) * math.sqrt(num_parts / (num_parts - 1))
    margin = _compute_t_quantile(num_parts - 1) * spread
    return margin if math.isfinite(margin) else None


_STUDENT_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _compute_t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's distribution, from a table or by the first terms of its expansion."""
    if freedom <= len(_STUDENT_T_QUANTILES):
        return _STUDENT_T_QUANTILES[freedom - 1]
    z = _Z_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def compute_unpaired_interval(loss: float, *errors: float | None) -> Interval | None:
    """Return the interval of a loss from the standard errors of both scores, as if they were independent; it is wider
    than a paired one. None if an error is unknown."""
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    margin = _Z_975 * math.sqrt(sum(error**2 for error in known))
    return (loss - margin, loss + margin) if math.isfinite(margin) and math.isfinite(loss) else None


def compute_mean_interval(parts: Sequence[Interval]) -> Interval:
    """Return the interval of the mean of independent parts."""
    middle = float(np.mean([(low + high) / 2 for low, high in parts]))
    margin = math.hypot(*((high - low) / 2 for low, high in parts)) / len(parts)
    return middle - margin, middle + margin


def estimate_samples_to_decide(
    interval: Interval, value: float, limit: float, num_samples: int, *, share: float | None = None
) -> int | None:
    """Estimate the number of samples that would decide whether `value` is below `limit`, if it stays the same. None if
    `value` equals the limit. `share`: for a `compute_mean_loss_interval`, the value of all samples (such as 100
    points); the part of the margin from its two added samples shrinks faster than the rest."""
    distance = abs(limit - value)
    if not distance or not math.isfinite(distance):
        return None
    # margin^2 = spread / n + added / n^2
    added = (_Z_975 * share) ** 2 if share is not None else 0.0
    counted = num_samples + (2 if added else 0)
    spread = max(((interval[1] - interval[0]) / 2) ** 2 * counted - added / counted, 0.0)
    needed = (spread + math.sqrt(spread**2 + 4 * added * distance**2)) / (2 * distance**2)
    return max(math.ceil(round(needed, 6)), num_samples + 1)


class HeldOutIntervals(FrozenBaseModel):
    """95% intervals of a student's figures on held-out text, by resampling."""

    unit: Literal["text", "row"]
    """Unit of resampling: `text` (conversation or document) or, with few texts, `row` (part of at most a row)."""
    num_units: int
    kl: Interval
    top1_agreement: Interval
    perplexity_ratio: Interval

    @classmethod
    def from_samples(cls, samples: Sequence[SampleSums]) -> HeldOutIntervals | None:
        """Return None for a single unit, or if a figure is not finite."""
        unit, parts = _sum_parts(
            samples, [(one.positions, one.teacher_nll, one.student_nll, one.kl, one.agreements) for one in samples]
        )
        kl, agreement, ratio = (bootstrap_margin(parts, statistic) for statistic in (_kl, _agreement, _log_ratio))
        if kl is None or agreement is None or ratio is None:
            return None
        whole = parts.sum(0, keepdims=True)
        share = float(_agreement(whole)[0])
        return cls(
            unit=unit,
            num_units=len(parts),
            kl=_make_log_interval(float(_kl(whole)[0]), kl),
            top1_agreement=(max(share - agreement, 0.0), min(share + agreement, 1.0)),
            perplexity_ratio=_exponentiate_interval(float(_log_ratio(whole)[0]), ratio),
        )


def compute_kl_reduction(
    parent: Sequence[SampleSums], student: Sequence[SampleSums]
) -> tuple[float, int, Interval | None]:
    """Return (share by which the student's KL is below its parent's, number of resampled units, interval or None) from
    sums over the same samples in the same order. The share is 0 if the parent's KL is 0."""
    _, parts = _sum_parts(student, [(before.kl, after.kl) for before, after in zip(parent, student, strict=True)])
    value, margin = float(_reduction(parts.sum(0, keepdims=True))[0]), bootstrap_margin(parts, _reduction)
    return value, len(parts), None if margin is None else (value - margin, value + margin)


def _sum_parts(samples: Sequence[SampleSums], values: Sequence[Sequence[float]]) -> tuple[Literal["text", "row"], Sums]:
    """Return (unit, sums [num_parts, num_values]) of the units to resample: whole texts or, if there are few, samples.
    `values`: of each sample."""
    texts = np.unique([each.text for each in samples], return_inverse=True)[1]
    rows = np.array(values, np.float64)
    if not len(samples) or texts.max() + 1 < MIN_TEXTS:
        return "row", rows
    parts = np.zeros((texts.max() + 1, rows.shape[1]))
    np.add.at(parts, texts, rows)
    return "text", parts


def _reduction(sums: Sums) -> Sums:
    return np.where(sums[:, 0] > 0.0, 1.0 - sums[:, 1] / np.where(sums[:, 0] > 0.0, sums[:, 0], 1.0), 0.0)


def _kl(sums: Sums) -> Sums:
    return sums[:, 3] / sums[:, 0]


def _agreement(sums: Sums) -> Sums:
    return sums[:, 4] / sums[:, 0]


def _log_ratio(sums: Sums) -> Sums:
    return (sums[:, 2] - sums[:, 1]) / sums[:, 0]


def _make_log_interval(value: float, margin: float) -> Interval:
    """Return the interval of a non-negative figure, symmetric on a logarithmic scale."""
    if value <= 0.0:
        return 0.0, max(margin, 0.0)
    factor = math.exp(min(margin / value, _MAX_LOG_MARGIN))
    return value / factor, value * factor


def _exponentiate_interval(logarithm: float, margin: float) -> Interval:
    bounded = min(margin, _MAX_LOG_MARGIN)
    return math.exp(logarithm - bounded), math.exp(logarithm + bounded)
