"""The choice of held-out rows, and how often they are measured."""

from __future__ import annotations

import numpy as np
import pytest

from swiftkv_platform.data.packing import Samples, pack
from swiftkv_platform.distillation.micro_batches import measured_rows
from swiftkv_platform.planning.steering import measuring_interval
from swiftkv_platform.specs import ValidationSpec


@pytest.mark.parametrize(
    ("total_steps", "batch_size", "interval"), [(400, 32, 20), (401, 32, 21), (20, 4, 3), (8, 1, 10)]
)
def test_a_run_is_measured_twenty_times_where_its_batches_have_the_rows(
    total_steps: int, batch_size: int, interval: int
) -> None:
    assert measuring_interval(ValidationSpec(), batch_size, total_steps) == interval
    assert measuring_interval(ValidationSpec(every_steps=7), batch_size, total_steps) == 7


@pytest.mark.parametrize(("rows_between", "max_tokens", "number"), [(300, 10_000, 30), (300, 100, 10), (5, 10_000, 1)])
def test_measured_rows_are_a_tenth_of_those_trained_on_between(rows_between: int, max_tokens: int, number: int) -> None:
    tokens = np.zeros(1000, dtype=np.int32)
    samples = Samples(tokens=tokens, counts=np.ones(1000, dtype=np.bool_), starts=np.arange(0, 1001, 10))
    rows = pack(samples, np.arange(100), max_length=10, pad_token_id=0)
    chosen = measured_rows(rows, ValidationSpec(max_tokens=max_tokens), rows_between)
    assert len(set(chosen)) == len(chosen) == number
    assert chosen[0] == 0
    assert number == 1 or chosen[-1] == 99
