"""Test parameters: a few cases of a product; the other cases run in the soak."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

WIDE = pytest.mark.soak("a case of a product whose pairs of values, or whose values, occur elsewhere")


KINDS = ("llama", "qwen2-mixed", "qwen3_moe", "deepseek_v2-lora")
"""Families of `tiny_models` that together have every feature: a tied head and scaled RoPE, biases and windows, norms of
keys and experts, latents."""


def few(values: Iterable[Any], kept: Sequence[Any] = KINDS) -> list[Any]:
    """Return a case for each value; those that are not in `kept` run only in the soak."""
    return [pytest.param(value, marks=() if value in kept else WIDE) for value in values]


def in_turn(values: Iterable[Any], others: Sequence[Any], kept: Sequence[Any] | None = None) -> list[Any]:
    """Pair each value in `kept` (by default every value) with one of `others`, in turn; the rest of the product runs
    only in the soak."""
    values = list(values)
    kept = values if kept is None else kept
    return [
        pytest.param(value, other, marks=() if value in kept and kept.index(value) % len(others) == number else WIDE)
        for value in values
        for number, other in enumerate(others)
    ]


def pairwise(*dimensions: Iterable[Any], soak: bool = True) -> list[Any]:
    """Return cases in which each pair of values of two dimensions occurs; the other cases run only in the soak, or
    never without `soak`."""
    values = [list(dimension) for dimension in dimensions]
    cases = list(product(*(range(len(each)) for each in values)))
    pairs = {case: {((a, case[a]), (b, case[b])) for a, b in combinations(range(len(values)), 2)} for case in cases}
    left, chosen = set().union(*pairs.values()), set()
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        chosen.add(best)
        left -= pairs[best]
    return [
        pytest.param(*(each[at] for each, at in zip(values, case, strict=True)), marks=() if case in chosen else WIDE)
        for case in cases
        if soak or case in chosen
    ]
