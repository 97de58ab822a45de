"""Utilisation of a worker, from known steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swiftkv_platform.distillation.trainer import StepMetrics
from swiftkv_platform.jobs.worker.telemetry import Telemetry, training_flops_per_token
from swiftkv_platform.model import convert
from swiftkv_platform.specs import JobSpec
from tests.numerics.distillation_worker import tiny_rows
from tests.tiny_models import random_teacher

CPU = torch.device("cpu")


def spec(**resources: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "n",
            "data": {"max_length": 100},
            "training": {"batch_size": 8},
            "resources": {"num_workers": 2, **resources},
        }
    )


def step(tokens: int, tokens_per_second: float) -> StepMetrics:
    return StepMetrics(
        step=1,
        tokens=tokens,
        losses={"loss": 1.0},
        lr=1.0,
        grad_norm=1.0,
        tokens_per_second=tokens_per_second,
        world_size=2,
    )


def test_work_follows_the_positions_that_count() -> None:
    """Each of two workers does half of the work for 200 positions, in half a second."""
    telemetry = Telemetry(spec(peak_flops_per_second=3.2e6), 4000.0, CPU)
    telemetry.begin(1000)
    point = telemetry.point(step(1200, 400.0))
    assert point["flops_per_second"] == pytest.approx(200 * 4000.0 / 2 / 0.5)
    assert point["mfu"] == pytest.approx(0.25)
    held = torch.ones(1 << 26)
    assert telemetry.point(step(1200, 400.0))["memory_bytes"] >= point["memory_bytes"] > 1 << 20
    assert telemetry.point(step(1200, 400.0))["memory_bytes"] > held.nbytes
    del held
    assert telemetry.point(step(1600, 200.0))["mfu"] == pytest.approx(0.125)


def test_what_is_not_known_is_left_out() -> None:
    assert Telemetry(spec(), 1000.0, CPU).point(step(1, 1.0)).keys() == {"memory_bytes", "flops_per_second"}
    assert Telemetry(spec(), None, CPU).point(step(1, 1.0)).keys() == {"memory_bytes"}


def test_the_arithmetic_is_the_students_own() -> None:
    """Fewer layers of its own, and so a longer student's tail to train: more work a token."""
    students = [convert(random_teacher(), num_key_value_layers=layers) for layers in (5, 2)]
    rows = tiny_rows()
    short, long = (training_flops_per_token(spec(), student.config, rows) for student in students)
    assert short is not None
    assert long is not None
    assert 1.3 < long / short < 3


def test_all_tokens_are_the_work_of_those_that_count() -> None:
    config, rows = convert(random_teacher(), num_key_value_layers=2).config, tiny_rows()
    whole = replace(rows, samples=replace(rows.samples, counts=np.ones_like(rows.samples.counts)))
    per_counted, per_token = (training_flops_per_token(spec(), config, some) for some in (rows, whole))
    assert per_counted is not None
    assert per_token is not None
    assert per_counted > per_token
    assert per_counted * rows.num_counted_tokens < per_token * rows.num_tokens, "the rest skips layers"
