"""A decode step on a GPU launches as much for many sequences as for few."""

from __future__ import annotations

import pytest

from benchmarks.operator_counts import GREEDY, SAMPLED, Counts, decode_step
from swiftkv_platform.engine import SamplingParams
from tests.fakes.cuda import fake_cuda


def counts(batch_size: int, params: SamplingParams) -> Counts:
    with fake_cuda() as log:
        return decode_step(log, batch_size, num_layers=4, params=params)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_operators_do_not_grow_with_the_batch(params: SamplingParams) -> None:
    few, many = counts(8, params), counts(64, params)
    assert many.kernels.total() <= 1.2 * few.kernels.total()
    assert many.copies == few.copies
    assert many.waits == few.waits == 1
    assert many.kernels["torch_attn._varlen_attn"] == 4, "one a layer"
