"""Verdicts of the benchmark of defaults on its runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rates import verdicts


def rows(*, qkv: float, all_layers: float, start: float = 0.5) -> list[dict[str, Any]]:
    return [
        {"model": "m", "optimizer": "adamw", "trainable": trainable, "start_kl": start, "end_kl": kl}
        for trainable, kl in (("qkv", qkv), ("all", all_layers))
    ]


@pytest.mark.parametrize(
    ("qkv", "all_layers", "no_worse", "none_above"),
    [(0.2, 0.1, True, True), (0.2, 0.3, False, True), (0.6, 0.1, True, False), (0.2, 0.6, False, False)],
)
def test_each_promise_is_judged_by_itself(qkv: float, all_layers: float, no_worse: bool, none_above: bool) -> None:
    (line,) = verdicts(rows(qkv=qkv, all_layers=all_layers))
    assert (line["all_no_worse"], line["none_above_start"]) == (no_worse, none_above)
    assert (line["qkv_kl"], line["all_kl"]) == (qkv, all_layers)
