"""Intervals of the figures of held-out text, 95%, by conversation. Knows sums, no model and no gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from swiftkv_platform.evaluation.paired import Interval, resampled
from swiftkv_platform.evaluation.quality import SampleSums
from swiftkv_platform.frozen import FrozenModel

FEWEST_TEXTS = 10
"""Conversations or texts below which their parts, of a row's length at most, count as independent."""
_MOST = 50.0
"""Largest half of an interval on a logarithmic scale."""

Sums = npt.NDArray[np.float64]


class HeldOutIntervals(FrozenModel):
    """95% intervals of a student's figures on held-out text, of which conversations are drawn anew."""

    unit: Literal["text", "row"]
    """`text`: a conversation or document. `row`: a part of one, of at most a row's length, where texts are few."""
    num_units: int
    kl: Interval
    top1_agreement: Interval
    perplexity_ratio: Interval

    @classmethod
    def of(cls, samples: Sequence[SampleSums]) -> HeldOutIntervals | None:
        """None for a single unit, or figures that are no numbers."""
        texts = np.unique([each.text for each in samples], return_inverse=True)[1]
        unit: Literal["text", "row"] = "text" if len(samples) and texts.max() + 1 >= FEWEST_TEXTS else "row"
        rows = np.array(
            [(one.positions, one.teacher_nll, one.student_nll, one.kl, one.agreements) for one in samples], np.float64
        ).reshape(-1, 5)
        parts = rows
        if unit == "text":
            parts = np.zeros((texts.max() + 1, rows.shape[1]))
            np.add.at(parts, texts, rows)
        kl, agreement, ratio = (resampled(parts, statistic) for statistic in (_kl, _agreement, _log_ratio))
        if kl is None or agreement is None or ratio is None:
            return None
        whole = parts.sum(0, keepdims=True)
        share = float(_agreement(whole)[0])
        return cls(
            unit=unit,
            num_units=len(parts),
            kl=_scaled(float(_kl(whole)[0]), kl),
            top1_agreement=(max(share - agreement, 0.0), min(share + agreement, 1.0)),
            perplexity_ratio=_exponential(float(_log_ratio(whole)[0]), ratio),
        )


def _kl(sums: Sums) -> Sums:
    return sums[:, 3] / sums[:, 0]


def _agreement(sums: Sums) -> Sums:
    return sums[:, 4] / sums[:, 0]


def _log_ratio(sums: Sums) -> Sums:
    return (sums[:, 2] - sums[:, 1]) / sums[:, 0]


def _scaled(value: float, margin: float) -> Interval:
    """An interval of a figure that is never negative: symmetrical on a logarithmic scale."""
    if value <= 0.0:
        return 0.0, max(margin, 0.0)
    factor = math.exp(min(margin / value, _MOST))
    return value / factor, value * factor


def _exponential(logarithm: float, margin: float) -> Interval:
    bounded = min(margin, _MOST)
    return math.exp(logarithm - bounded), math.exp(logarithm + bounded)
