"""Intervals of paired differences, held to known cases and to their own coverage."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swiftkv_platform.contract.row_results import compute_mean_loss_interval
from swiftkv_platform.evaluation.harness.run import compute_drop_interval
from swiftkv_platform.evaluation.paired import (
    HeldOutIntervals,
    bootstrap_interval,
    compute_mean_interval,
    compute_unpaired_interval,
    estimate_samples_to_decide,
)
from swiftkv_platform.evaluation.quality import SampleSums


def test_a_share_interval_is_agresti_and_mins() -> None:
    # 30 pairs: the teacher alone is right in 6, the student alone in 2.
    mean = 4 / 32
    margin = 1.959964 * math.sqrt((9 / 32 - mean**2) / 32)
    found = compute_mean_loss_interval([1.0] * 6 + [-1.0] * 2 + [0.0] * 22)
    assert found == pytest.approx((mean - margin, mean + margin))
    low, high = compute_mean_loss_interval([0.0] * 4)
    assert low < -0.3 < 0.3 < high, "a few samples without a difference say little"
    assert compute_mean_loss_interval([0.0] * 400)[1] < 0.01


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(2000):
        low, high = compute_mean_loss_interval(rng.choice([1.0, -1.0, 0.0], size=80, p=[0.10, 0.04, 0.86]).tolist())
        covered += low <= 0.06 <= high
    assert 0.93 <= covered / 2000 <= 0.99


@pytest.mark.parametrize("num_texts", [4, 12, 60])
def test_intervals_of_held_out_text_cover_the_truth_where_texts_differ(num_texts: int) -> None:
    """Positions of a text are alike, so whole texts are drawn: of any length, with 0.1 nats on average. Intervals from
    drawing single positions would cover it a fifth as often."""
    rng, covered, wide = np.random.default_rng(3), 0, 0
    for _ in range(300):
        lengths, levels = rng.integers(5, 200, size=num_texts), rng.gamma(4.0, 0.025, size=num_texts)
        samples = [
            SampleSums(i, i, int(n), 2.0 * n, 2.0 * n + n * kl, float(n * kl), int(n * (1 - kl)))
            for i, (n, kl) in enumerate(zip(lengths, levels, strict=True))
        ]
        found = HeldOutIntervals.from_samples(samples)
        assert found is not None
        assert (found.unit, found.num_units) == ("text" if num_texts >= 10 else "row", num_texts)
        covered += found.kl[0] <= 0.1 <= found.kl[1]
        wide += found.perplexity_ratio[0] <= math.exp(0.1) <= found.perplexity_ratio[1]
    assert covered / 300 >= 0.9
    assert wide / 300 >= 0.9
    parts = [replace(one, text=i % 10) for i, one in enumerate(samples)]
    assert HeldOutIntervals.from_samples(parts).num_units == min(num_texts, 10), "parts of one text are drawn together"


def test_pairs_are_narrower_than_two_independent_scores() -> None:
    rng = np.random.default_rng(2)
    teacher = (rng.random(500) < 0.5).astype(float)
    student = np.where(rng.random(500) < 0.05, 1 - teacher, teacher)
    errors = [float(np.std(mode) / math.sqrt(500)) for mode in (teacher, student)]
    wide = np.ptp(compute_unpaired_interval(float(np.mean(teacher - student)), *errors))
    assert np.ptp(compute_mean_loss_interval((teacher - student).tolist())) < 0.5 * wide
    assert compute_unpaired_interval(0.1, 0.05, None) is None


def test_a_bootstrap_needs_samples_and_finite_scores() -> None:
    teacher, student = list(np.linspace(1, 2, 50)), list(np.linspace(1.2, 2.2, 50))
    assert bootstrap_interval(teacher, student, np.mean) == pytest.approx((-0.2, -0.2)), "every sample loses the same"
    assert bootstrap_interval(teacher[:10], student[:10], np.mean) is None
    assert bootstrap_interval(teacher, student, lambda _: math.inf) is None
    margin = math.sqrt(2) / 2
    assert compute_mean_interval([(0.0, 2.0), (2.0, 4.0)]) == pytest.approx((2.0 - margin, 2.0 + margin))


@pytest.mark.parametrize("losses", [[0.0] * 5, [1.0] + [0.0] * 99, [1.0] * 3 + [-1.0] * 2 + [0.0] * 195])
def test_that_many_samples_do_decide(losses: list[float]) -> None:
    limit, mean = 0.05, float(np.mean(losses))
    assert estimate_samples_to_decide((-2.0, 4.0), 1.0, 2.0, 100) == 900, (
        "nine times the samples for a third of the width"
    )
    assert estimate_samples_to_decide((-2.0, 4.0), 2.0, 2.0, 100) is None, "at the limit no number is enough"
    needed = estimate_samples_to_decide(compute_mean_loss_interval(losses), mean, limit, len(losses), share=1.0)
    rate = np.array([losses.count(value) for value in (1.0, -1.0)]) / len(losses)

    def upper(num_samples: int) -> float:
        plus, minus = np.rint(rate * num_samples).astype(int)
        return compute_mean_loss_interval([1.0] * plus + [-1.0] * minus + [0.0] * (num_samples - plus - minus))[1]

    assert upper(int(1.2 * needed)) <= limit
    assert upper(int(0.8 * needed)) > limit or needed == len(losses) + 1


def answers(values: dict[str, list[float]], score: float, **results: float) -> dict[str, Any]:
    group = {"group": list(values)} if len(values) > 1 else {}
    name = "group" if group else next(iter(values))
    samples = {
        task: [{"doc_id": i, "filter": "none", "acc": value} for i, value in reversed(list(enumerate(row)))]
        for task, row in values.items()
    }
    return {"results": {name: {"acc,none": score, **results}}, "group_subtasks": group, "samples": samples}


def test_a_tasks_samples_are_paired_by_their_number() -> None:
    teacher, student = [1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]
    found = compute_drop_interval("t", "acc,none", answers({"t": teacher}, 0.75), answers({"t": student}, 0.5), {})
    assert found == pytest.approx(compute_mean_loss_interval([0.0, 0.0, 1.0, 0.0]))


@pytest.mark.parametrize(("score", "pooled"), [((1 + 1 + 1 + 0) / 4, True), ((1 + 2 / 3) / 2, False)])
def test_a_group_is_weighted_as_its_score_is(score: float, pooled: bool) -> None:
    values = {"a": [1.0], "b": [1.0, 1.0, 0.0]}
    both = answers(values, score)
    found = compute_drop_interval("group", "acc,none", both, both, {})
    groups = [4] if pooled else [1, 3]
    expected = compute_mean_interval([compute_mean_loss_interval([0.0] * size) for size in groups])
    assert found == pytest.approx(expected)


def test_values_that_are_no_shares_are_drawn_anew_or_take_the_harness_errors() -> None:
    rows = [(float(i % 7), 10) for i in range(60)]
    worse = [(value + 1.0, 10) for value, _ in rows]

    def perplexity(items: Any) -> float:
        pairs = list(items)
        return math.exp(sum(a for a, _ in pairs) / sum(b for _, b in pairs))

    both = [answers({"t": values}, perplexity(values)) for values in (rows, worse)]
    low, high = compute_drop_interval("t", "acc,none", *both, {"t": {"acc": perplexity}})
    assert low < perplexity(rows) - perplexity(worse) < high
    assert compute_drop_interval("t", "acc,none", *both, {}) is None, "neither samples nor a standard error"
    errors = {"acc_stderr,none": 0.1}
    both = [answers({"t": values}, 2.0, **errors) for values in (rows, worse)]
    assert compute_drop_interval("t", "acc,none", *both, {}) == pytest.approx(compute_unpaired_interval(0.0, 0.1, 0.1))
