"""Runs that continue from the checkpoint of another: its weights by every strategy, its optimizer where asked."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.distillation.checkpoint import TrainedTensors
from tests.numerics.distillation_worker import Outcome, Run, run_spawned

pytestmark = pytest.mark.timeout(900)

SHARDINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero1": {"strategy": "deepspeed", "zero_stage": 1},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
}
CHECKPOINT = f"parent/{AttemptId('j', 1).checkpoints_prefix}/step-00000002*"


def _continued(path: Path, sharding: str, *, with_optimizer: bool, steps: int) -> Run:
    training = {"batch_size": 4, "micro_batch_size": 1, "max_steps": steps, "seed": 1}
    parent = {"from": "job_a:2", "load_optimizer_state": with_optimizer}
    return Run(
        store=str(path / f"{sharding}-{with_optimizer}-{steps}"),
        parent=str(path / CHECKPOINT),
        spec={
            "sharding": SHARDINGS[sharding],
            "resources": {"num_workers": 2},
            "training": {**training, **parent},
            "optimizer": {"warmup_ratio": 0.0, "schedule": "constant"},
        },
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parents")


@pytest.fixture(scope="module")
def outcomes(path: Path) -> dict[Any, Outcome]:
    parent = Run(store=str(path / "parent"), spec={"training": {"max_steps": 2}, "resources": {"num_workers": 2}})
    runs: dict[Any, Run] = {"parent": parent}
    for sharding, with_optimizer in product(SHARDINGS, (False, True)):
        runs[sharding, with_optimizer, 1] = _continued(path, sharding, with_optimizer=with_optimizer, steps=1)
    for sharding in SHARDINGS:
        runs[sharding, False, 0] = _continued(path, sharding, with_optimizer=False, steps=0)
    return dict(zip(runs, run_spawned(list(runs.values()), 2, path), strict=True))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_run_starts_from_the_weights_of_its_parent(outcomes: dict[Any, Outcome], path: Path, sharding: str) -> None:
    (directory,) = path.glob(CHECKPOINT)
    expected, started = TrainedTensors(directory), outcomes[sharding, False, 0]
    assert started.steps == []
    assert started.trained.keys() == expected.keys()
    for name, tensor in started.trained.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_every_strategy_continues_alike(outcomes: dict[Any, Outcome], with_optimizer: bool) -> None:
    first, *others = (outcomes[sharding, with_optimizer, 1] for sharding in SHARDINGS)
    for other in others:
        assert other.steps[0].losses == pytest.approx(first.steps[0].losses, rel=1e-4, abs=1e-4)
        for name, tensor in first.trained.items():
            torch.testing.assert_close(other.trained[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_fresh_optimizer_takes_another_step_than_that_of_the_parent(
    outcomes: dict[Any, Outcome], sharding: str
) -> None:
    fresh, kept = outcomes[sharding, False, 1], outcomes[sharding, True, 1]
    assert fresh.steps[0].losses == kept.steps[0].losses
    assert [metrics.step for metrics in kept.steps] == [1]
    before = outcomes[sharding, False, 0].trained
    # Adam's first step is as long as the learning rate, whatever the gradient.
    longest = max(float((fresh.trained[name] - before[name]).abs().max()) for name in before)
    assert longest == pytest.approx(1e-2, rel=0.2)
    assert any(not torch.allclose(fresh.trained[n], kept.trained[n], atol=1e-4) for n in before)
