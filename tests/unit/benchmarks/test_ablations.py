"""Summaries of the benchmark of options on its runs."""

from __future__ import annotations

from benchmarks.ablations import ARMS, BASELINE, summaries


def test_arms_are_averaged_over_seeds_and_held_to_the_baseline() -> None:
    other = next(arm for arm in ARMS if arm != BASELINE)
    rows = [
        {"arm": arm, "seed": seed, "start_kl": start, "end_kl": end}
        for arm, seed, start, end in (
            (BASELINE, 0, 0.2, 0.1),
            (other, 0, 0.3, 0.3),
            (BASELINE, 1, 0.2, 0.3),
            (other, 1, 0.5, 0.1),
        )
    ]
    baseline, compared = summaries(rows)
    assert (baseline["arm"], compared["arm"]) == (BASELINE, other)
    assert baseline["end_kl"] == {"mean": 0.2, "lowest": 0.1, "highest": 0.3, "ratio": 1.0}
    assert compared["start_kl"] == {"mean": 0.4, "lowest": 0.3, "highest": 0.5, "ratio": 2.0}
