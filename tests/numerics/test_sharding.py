"""One run, spread over workers by every strategy: the same losses, and checkpoints that the others go on from.

`SWIFTKV_SOAK=1` takes 20 steps by every strategy at 1 and 2 workers with micro batches of 1 and 4; otherwise each
strategy takes 4 with 2 workers.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from tests.numerics.distillation_worker import Outcome, Run, group_of_one, run, run_spawned, tiny_teacher

pytestmark = pytest.mark.timeout(900)  # every strategy is trained once, before the first test

SOAK = bool(os.environ.get("SWIFTKV_SOAK"))
SHARDINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero1": {"strategy": "deepspeed", "zero_stage": 1},
    "zero2": {"strategy": "deepspeed", "zero_stage": 2},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
    "zero2-offload": {"strategy": "deepspeed", "zero_stage": 2, "cpu_offload": True},
    "zero3-offload": {"strategy": "deepspeed", "zero_stage": 3, "cpu_offload": True},
}
CUTS = tuple(product((1, 2), (1, 4))) if SOAK else ((2, 2),)
"""Workers and micro batch; the last one is resumed."""
WORKERS, MICRO_BATCH = CUTS[-1]
HANDOVERS = (("zero3", "fsdp2", 1), ("zero1", "ddp", 1), ("fsdp2", "zero3", 2), ("ddp", "zero2-offload", 2))
"""Sharding that begins, sharding that takes over, and its number of workers."""
NUM_STEPS = 20 if SOAK else 4
MIDDLE = NUM_STEPS // 2


def _scenario(path: Path, sharding: str, workers: int, micro_batch_size: int, **changes: Any) -> Run:
    return Run(
        store=str(path),
        early_exit=True,
        spec={
            "sharding": SHARDINGS[sharding],
            "resources": {"num_workers": workers},
            "training": {"batch_size": 8, "micro_batch_size": micro_batch_size, "max_steps": NUM_STEPS},
            "checkpoint": {"every_steps": MIDDLE},
        },
        **changes,
    )


def _resumed(path: Path, began: str, sharding: str, workers: int, *, attempt: int) -> Run:
    """The second half once more, from the checkpoint in the middle of the run that `began` did."""
    return _scenario(
        path / f"{began}-{WORKERS}-{MICRO_BATCH}",
        sharding,
        workers,
        MICRO_BATCH,
        attempt=attempt,
        resume_from=f"{AttemptId('j', 1).checkpoints_prefix}/step-{MIDDLE:08d}*",
    )


def _bfloat16(path: Path, sharding: str, **distillation: Any) -> Run:
    scenario = _scenario(path / f"bfloat16-{sharding}", sharding, WORKERS, MICRO_BATCH)
    training = {**scenario.spec["training"], "gradient_checkpointing": sharding != "ddp"}
    changes = {"model": {"dtype": "bfloat16"}, "training": training, "distillation": distillation}
    return replace(scenario, spec=scenario.spec | changes)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Outcome]:
    """All of it in one start of each number of workers: a start costs more than a run."""
    path = tmp_path_factory.mktemp("sharded")
    reference_run = _scenario(path / "reference", "ddp", 1, 1)
    runs: dict[int, dict[Any, Run]] = {1: {("reference",): reference_run}, 2: {}}
    for sharding, (workers, size) in product(SHARDINGS, CUTS):
        name = f"{sharding}-{workers}-{size}"
        runs[workers][sharding, workers, size] = _scenario(path / name, sharding, workers, size)
    for sharding in SHARDINGS:
        runs[2]["resumed", sharding] = _resumed(path, sharding, sharding, WORKERS, attempt=2)
    for began, after, workers in HANDOVERS:
        runs[workers]["taken over", began, after] = _resumed(path, began, after, workers, attempt=3)
    for sharding in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
        runs[2]["bfloat16", sharding] = _bfloat16(path, sharding, hidden_loss_weight=1.0)
    tiny_teacher().save_pretrained(path / "teacher")
    for sharding in ("fsdp2", "zero3"):
        scenario = _scenario(path / f"lazy-{sharding}", sharding, WORKERS, MICRO_BATCH)
        runs[2]["lazy", sharding] = replace(scenario, teacher=str(path / "teacher"))
    for sharding, trainable in product(("ddp", "fsdp2", "zero3"), ("tail", "all")):
        scenario = _scenario(path / f"{trainable}-{sharding}", sharding, WORKERS, MICRO_BATCH)
        scenario = replace(scenario, spec=scenario.spec | {"distillation": {"trainable": trainable}})
        runs[2][trainable, sharding] = scenario
        for after in {"ddp": ["zero3"], "zero3": ["ddp", "fsdp2"], "fsdp2": []}[sharding] if trainable == "all" else []:
            key = f"{AttemptId('j', 1).checkpoints_prefix}/step-{MIDDLE:08d}*"
            spec = scenario.spec | {"sharding": SHARDINGS[after]}
            attempt = 2 + list(SHARDINGS).index(after)
            runs[2]["all", sharding, after] = replace(scenario, spec=spec, attempt=attempt, resume_from=key)
        runs[2]["qwen3", trainable, sharding] = replace(
            scenario, store=str(path / f"qwen3-{trainable}-{sharding}"), family="qwen3"
        )
    for sharding in ("ddp", "fsdp2"):
        scenario = _scenario(path / f"qwen3-qkv-{sharding}", sharding, WORKERS, MICRO_BATCH)
        runs[2]["qwen3", "qkv", sharding] = replace(scenario, family="qwen3")
    for sharding, again in product(("ddp", "fsdp2"), (False, True)):
        scenario = _scenario(path / f"muon-{sharding}", sharding, WORKERS, MICRO_BATCH)
        if again:
            key = f"{AttemptId('j', 1).checkpoints_prefix}/step-{MIDDLE:08d}*"
            scenario = replace(scenario, attempt=2, resume_from=key)
        optimizer = {"name": "muon", "learning_rate": 1e-2, "warmup_ratio": 0.25}
        runs[2]["muon", sharding, again] = replace(scenario, spec=scenario.spec | {"optimizer": optimizer})
    odd = {"batch_size": 7, "micro_batch_size": 1, "max_steps": NUM_STEPS}
    uneven = replace(reference_run, store=str(path / "uneven"), spec=reference_run.spec | {"training": odd})
    runs[2]["uneven", 2] = uneven
    runs[1]["uneven", 1] = replace(uneven, store=str(path / "uneven-alone"))
    pair = run_spawned(list(runs[2].values()), 2, path)
    single = runs[1]
    with group_of_one(path) if not SOAK else nullcontext():
        # DeepSpeed would keep a hold of this process.
        alone = run_spawned(list(single.values()), 1, path) if SOAK else [run(scenario) for scenario in single.values()]
    return dict(zip([*runs[2], *single], [*pair, *alone], strict=True))


def _assert_same_losses(actual: Outcome, expected: Outcome) -> None:
    assert [m.step for m in actual.steps] == [m.step for m in expected.steps]
    for mine, other in zip(actual.steps, expected.steps, strict=True):
        assert mine.tokens == other.tokens
        assert mine.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-4)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


@pytest.mark.parametrize(("sharding", "cut"), list(product(SHARDINGS, CUTS)))
def test_losses_agree(outcomes: dict[Any, Outcome], sharding: str, cut: tuple[int, int]) -> None:
    outcome, reference = outcomes[sharding, *cut], outcomes["reference",]
    assert len(outcome.steps) == NUM_STEPS
    _assert_same_losses(outcome, reference)
    assert outcome.frozen_changed == []
    assert reference.steps[-1].losses["loss"] < 0.9 * reference.steps[0].losses["loss"]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(outcomes: dict[Any, Outcome], sharding: str) -> None:
    whole, resumed = outcomes[sharding, *CUTS[-1]], outcomes["resumed", sharding]
    assert [m.step for m in resumed.steps] == list(range(MIDDLE + 1, NUM_STEPS + 1))
    for name, tensor in whole.trained.items():
        assert resumed.trained[name].equal(tensor), name


@pytest.mark.parametrize(("began", "after", "workers"), HANDOVERS)
def test_another_strategy_takes_over(outcomes: dict[Any, Outcome], began: str, after: str, workers: int) -> None:
    second, whole = outcomes["taken over", began, after], outcomes[began, *CUTS[-1]]
    _assert_same_losses(second, Outcome(whole.steps[MIDDLE:], whole.trained, [], []))
    for name, tensor in whole.trained.items():
        assert (second.trained[name] - tensor).norm() < 1e-3 * tensor.norm(), name


@pytest.mark.parametrize("sharding", ["fsdp2", "zero1", "zero2", "zero3"])
def test_bfloat16_follows_the_same_course(outcomes: dict[Any, Outcome], sharding: str) -> None:
    """With gradient checkpointing, against DDP without."""
    outcome, reference = outcomes["bfloat16", sharding], outcomes["bfloat16", "ddp"]
    for mine, other in zip(outcome.steps, reference.steps, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=0.05)
    assert outcome.steps[-1].losses["loss"] < outcome.steps[0].losses["loss"]


def test_a_batch_that_workers_cannot_share_equally_is_trained_whole(outcomes: dict[Any, Outcome]) -> None:
    """Seven rows, as an elastic run may meet them: four for one worker and three for the other."""
    _assert_same_losses(outcomes["uneven", 2], outcomes["uneven", 1])


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_no_worker_holds_the_whole_model(outcomes: dict[Any, Outcome], sharding: str) -> None:
    """Half of it, and the module that is being read: here the vocabulary's weights are the largest."""
    outcome = outcomes["lazy", sharding]
    _assert_same_losses(outcome, outcomes["reference",])
    assert outcome.frozen_changed == []
    assert outcome.largest_share < 0.7


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
@pytest.mark.parametrize("trainable", ["tail", "all"])
def test_whole_layers_train_sharded(outcomes: dict[Any, Outcome], trainable: str, sharding: str) -> None:
    sharded, replicated = outcomes[trainable, sharding], outcomes[trainable, "ddp"]
    _assert_same_losses(sharded, replicated)
    assert any("mlp" in name for name in sharded.trained)
    assert any(name.startswith("model.layers.0.") for name in sharded.trained) == (trainable == "all")
    assert sharded.frozen_changed == []


@pytest.mark.parametrize(("began", "after"), [("ddp", "zero3"), ("zero3", "ddp"), ("zero3", "fsdp2")])
def test_another_strategy_takes_over_the_training_of_all_layers(
    outcomes: dict[Any, Outcome], began: str, after: str
) -> None:
    whole = outcomes["all", began]
    _assert_same_losses(outcomes["all", began, after], Outcome(whole.steps[MIDDLE:], whole.trained, [], []))


@pytest.mark.parametrize(("trainable", "sharding"), [("qkv", "fsdp2"), *product(("tail", "all"), ("fsdp2", "zero3"))])
def test_heads_that_are_normalised_train_sharded(outcomes: dict[Any, Outcome], trainable: str, sharding: str) -> None:
    """A leader's norm of keys runs before its layer, and in the teacher's."""
    _assert_same_losses(outcomes["qwen3", trainable, sharding], outcomes["qwen3", trainable, "ddp"])


def test_muon_trains_sharded_matrices(outcomes: dict[Any, Outcome]) -> None:
    """Its iterations run in bfloat16, which rounds otherwise where a matrix is in two parts."""
    sharded, replicated = outcomes["muon", "fsdp2", False], outcomes["muon", "ddp", False]
    for mine, other in zip(sharded.steps, replicated.steps, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=2e-2)
    assert sharded.steps[-1].losses["loss"] < 0.9 * sharded.steps[0].losses["loss"]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_resumed_muon_run_equals_an_uninterrupted_one(outcomes: dict[Any, Outcome], sharding: str) -> None:
    whole, resumed = outcomes["muon", sharding, False], outcomes["muon", sharding, True]
    assert [m.step for m in resumed.steps] == list(range(MIDDLE + 1, NUM_STEPS + 1))
    for name, tensor in whole.trained.items():
        assert resumed.trained[name].equal(tensor), name
