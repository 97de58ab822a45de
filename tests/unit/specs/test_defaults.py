"""Values that a spec leaves to the model and the data."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import resolve_batch_size, resolve_defaults


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "test", **fields})


@pytest.mark.parametrize(
    ("hidden_size", "rate"), [(64, 3e-3), (192, 3e-3), (512, 1.2e-3), (1024, 6e-4), (2048, 3e-4), (8192, 3e-4)]
)
def test_smaller_models_learn_at_a_higher_rate(hidden_size: int, rate: float) -> None:
    settled = resolve_defaults(spec(), context_length=None, hidden_size=hidden_size)
    assert settled.optimizer.learning_rate == pytest.approx(rate)


def test_models_whose_every_layer_is_trained_learn_at_a_lower_rate() -> None:
    settled = resolve_defaults(spec(distillation={"trainable": "all"}), context_length=None, hidden_size=1024)
    assert settled.optimizer.learning_rate == pytest.approx(2e-4)


def test_what_is_given_stays() -> None:
    given = spec(optimizer={"learning_rate": 1e-5}, training={"batch_size": 6}, data={"max_length": 100})
    assert resolve_batch_size(resolve_defaults(given, context_length=4096, hidden_size=64), num_rows=3) == given


@pytest.mark.parametrize(("context_length", "length"), [(512, 512), (8192, 8192), (131072, 8192), (None, 8192)])
def test_rows_are_no_longer_than_the_context(context_length: int | None, length: int) -> None:
    assert resolve_defaults(spec(), context_length=context_length, hidden_size=64).data.max_length == length


def test_rows_that_workers_share_stay_divisible() -> None:
    shared = spec(sharding={"sequence_parallel_size": 4}, resources={"num_workers": 4})
    assert resolve_defaults(shared, context_length=1026, hidden_size=64).data.max_length == 1024


@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(100_000, 32), (6400, 32), (6399, 16), (2000, 8), (400, 2), (7, 2)],  # two epochs, two workers
)
def test_few_rows_make_small_batches(num_rows: int, size: int) -> None:
    assert resolve_batch_size(spec(), num_rows).training.batch_size == size


def test_a_batch_divides_among_the_workers() -> None:
    uneven = spec(resources={"num_workers": 3}, training={"micro_batch_size": 2})
    assert [resolve_batch_size(uneven, rows).training.batch_size for rows in (100_000, 10)] == [30, 6]


def test_a_number_of_steps_says_how_long_the_run_is() -> None:
    assert resolve_batch_size(spec(training={"max_steps": 10}), num_rows=5).training.batch_size == 32
