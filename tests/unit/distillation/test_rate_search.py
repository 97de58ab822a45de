"""The search for a learning rate, over curves of what a few steps leave of the held-out KL."""

import math
from collections.abc import Callable

import pytest
import torch

from swiftkv_platform.distillation.course import first_rate, highest_rate, search
from swiftkv_platform.planning.steering import MAX_TRIALS, steps_of_trial


def valley(best: float, *, ruinous: float = math.inf) -> Callable[[float], float]:
    """Held-out KL with its lowest at the rate `best`, and no number from `ruinous` on."""
    return lambda rate: math.nan if rate >= ruinous else 0.2 + 0.1 * abs(math.log(rate / best))


def test_the_search_finds_the_lowest_kl_up_or_down() -> None:
    for best in (1e-3, 1e-3 / 3, 1e-3 / 9, 3e-3, 9e-3):
        rate, tried = search(1e-3, 0.5, valley(best))
        assert rate == pytest.approx(best)
        assert len(tried) <= MAX_TRIALS
    rate, tried = search(1e-2, 0.5, valley(1e-2 / 9, ruinous=2e-3))
    assert rate == pytest.approx(1e-2 / 9)
    assert [one["held_out_kl"] is None for one in tried] == [False, False, True, True], "ruinous ones are passed over"


def test_of_rates_that_gain_nearly_as_much_the_highest_is_taken() -> None:
    kls = {1.0: 0.205, 1.0 / 3: 0.2, 1.0 / 9: 0.3}
    rate, _ = search(1.0, 0.5, lambda rate: min(kls.items(), key=lambda item: abs(item[0] - rate))[1])
    assert rate == 1.0


def test_the_lowest_rate_is_taken_where_none_gains_anything_and_none_above_the_highest() -> None:
    rate, tried = search(1.0, 0.5, lambda rate: 0.6 + rate)
    assert rate == pytest.approx(3.0 ** -(MAX_TRIALS - 1))
    assert len(tried) == MAX_TRIALS
    rate, tried = search(1e-3, 0.5, valley(9e-3), highest=4e-3)
    assert rate == max(one["learning_rate"] for one in tried) == pytest.approx(3e-3)


def test_bounds_of_a_search() -> None:
    """No matrix moves by more than a share of its size; a trial takes few steps, and a short run has none."""
    matrices = [torch.full((4, 4), size) for size in (0.0, 0.01, 0.02, 9.0)]
    assert highest_rate(matrices) == pytest.approx(0.05 * 0.02)
    assert highest_rate([]) == math.inf
    assert first_rate(1.0, 1e-3, "qkv") == 1e-3
    assert first_rate(1e-5, 1e-3, "qkv") == 1e-5
    assert first_rate(1e-3, 1e-3, "all") == pytest.approx(2e-4)
    assert steps_of_trial(106) is None
    assert steps_of_trial(400) == 15
    assert steps_of_trial(100_000) == 40
