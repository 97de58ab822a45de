"""Search for the learning rate: a few rates, a few steps of training each, by the held-out KL that they end with. Knows
no model and no workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor

from swiftkv_platform.contract.events import TriedRate
from swiftkv_platform.planning.steering import MAX_TRIALS

FACTOR = 3.0
"""Ratio of neighbouring rates."""
NEARLY = 0.9
"""Share of the largest fall of KL that is as good as all of it: of the rates that reach it, the highest is taken, since
what is gained in a few steps speaks for low rates more than a whole run does."""
MAX_RELATIVE_UPDATE = 0.05
"""Largest root mean square of an update to that of the weights: AdamW's first updates have the size of the rate, and
Muon's are scaled to AdamW's."""
SHARE_FOR_ALL_LAYERS = 0.2
"""Share of the spec's rate to begin with where all layers are trained: what their updates do to the output adds up."""


def highest_rate(matrices: Iterable[Tensor]) -> float:
    """The rate whose updates have the largest size that the trained matrices are given, the median one counting."""
    sizes = sorted(float(matrix.detach().float().square().mean().sqrt()) for matrix in matrices)
    sizes = [size for size in sizes if size > 0.0]  # a head that begins at zero has no size to keep
    return MAX_RELATIVE_UPDATE * sizes[len(sizes) // 2] if sizes else math.inf


def first_rate(rate: float, highest: float, trainable: str) -> float:
    """The rate to begin the search with, or to train with where there is none."""
    return min(rate * SHARE_FOR_ALL_LAYERS if trainable == "all" else rate, highest)


def search(
    first: float, start_kl: float, held_out_kl: Callable[[float], float], *, highest: float = math.inf
) -> tuple[float, list[TriedRate]]:
    """The rate to train with, and what was tried.

    From `first` down or, where that is worse, up, by factors of three, until it gets no better, the next rate is above
    `highest`, or the trials are used up. The lowest rate tried where none leaves the KL below the start's.

    Args:
        start_kl: held-out KL before training.
        held_out_kl: held-out KL after a trial at a rate, from the same start each time; not finite where it diverged.
    """
    kls: dict[float, float] = {}

    def kl(rate: float) -> float:
        if rate not in kls:
            found = held_out_kl(rate)
            kls[rate] = found if math.isfinite(found) else math.inf
        return kls[rate]

    rate, factor = first, FACTOR
    if kl(first) >= start_kl or kl(first / FACTOR) < kl(first):
        rate, factor = first / FACTOR, 1.0 / FACTOR
    while len(kls) < MAX_TRIALS and rate * factor <= highest and (kl(rate) >= start_kl or kl(rate * factor) < kl(rate)):
        rate *= factor
    tried: list[TriedRate] = [
        {"learning_rate": one, "held_out_kl": kls[one] if math.isfinite(kls[one]) else None} for one in sorted(kls)
    ]
    fall = start_kl - min(kls.values())
    if fall <= 0.0:
        return min(kls), tried
    return max(one for one, left in kls.items() if start_kl - left >= NEARLY * fall), tried
