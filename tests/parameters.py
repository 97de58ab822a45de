"""Parameters of tests: few cases of a product, and the others in the soak."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*dimensions: Iterable[Any], soak: bool = True) -> list[Any]:
    """Cases of a product in which each pair of values of two dimensions occurs; the other cases belong to the soak,
    unless `soak` leaves them out."""
    values = [list(dimension) for dimension in dimensions]
    cases = list(product(*(range(len(each)) for each in values)))
    pairs = {case: {((a, case[a]), (b, case[b])) for a, b in combinations(range(len(values)), 2)} for case in cases}
    left, chosen = set().union(*pairs.values()), set()
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        chosen.add(best)
        left -= pairs[best]
    wide = pytest.mark.soak("a case of a product whose pairs of values occur elsewhere")
    return [
        pytest.param(*(each[at] for each, at in zip(values, case, strict=True)), marks=() if case in chosen else wide)
        for case in cases
        if soak or case in chosen
    ]
