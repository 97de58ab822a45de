"""Rows split among workers by tokens: losses and gradients equal those of whole rows, and packed samples stay apart."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import DeepseekV2Config, LlamaConfig

from swiftkv_platform.distillation.sequence_parallel import check_head_counts
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs import JobSpec
from tests.numerics.distillation_worker import Outcome, Run, group_of_one, run, run_spawned

NUM_STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": {"strategy": "ddp"}, "distillation": {"hidden_loss_weight": 1.0}},
    "fsdp2": {"sharding": {"strategy": "fsdp2"}, "training": {"gradient_checkpointing": True, "micro_batch_size": 2}},
    "own": {"sharding": {"strategy": "fsdp2"}, "training": {"gradient_checkpointing": True, "micro_batch_size": 2}},
    "zero2": {"sharding": {"strategy": "deepspeed", "zero_stage": 2}},
    "lm": {"sharding": {"strategy": "fsdp2"}, "distillation": {"objective": "lm", "trainable": "tail"}},
}
SOAK = "SWIFTKV_SOAK" in os.environ
WORKERS = 4 if SOAK else 2
"""World sizes; four workers form two groups of two."""
NAMES = list(SETTINGS) if SOAK else ["ddp", "own"]


def _alone(path: Path, name: str) -> Run:
    sections = SETTINGS[name]
    training = {"batch_size": 4, "max_steps": NUM_STEPS, **sections.get("training", {})}
    spec = {**sections, "sharding": {"strategy": "ddp"}, "training": training}
    form = "own" if name == "own" else "shared"
    return Run(store=str(path / f"{name}-alone"), early_exit=name == "ddp", decode_key_value=form, spec=spec)


def _together(path: Path, name: str) -> Run:
    alone = _alone(path, name)
    sharding = {**SETTINGS[name]["sharding"], "sequence_parallel_size": 2}
    spec = {**alone.spec, "sharding": sharding, "resources": {"num_workers": WORKERS}}
    return replace(alone, store=str(path / name), spec=spec)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Outcome]:
    path = tmp_path_factory.mktemp("sequences")
    with group_of_one(path):
        alone = {(name, 1): run(_alone(path, name)) for name in NAMES}
    together = run_spawned([_together(path, name) for name in NAMES], WORKERS, path)
    return alone | {(name, 2): outcome for name, outcome in zip(NAMES, together, strict=True)}


@pytest.mark.slow("two processes that train")
@pytest.mark.parametrize("name", NAMES)
def test_workers_that_share_rows_train_as_one(outcomes: dict[tuple[str, int], Outcome], name: str) -> None:
    together, alone = outcomes[name, 2], outcomes[name, 1]
    assert len(together.steps) == NUM_STEPS
    for mine, other in zip(together.steps, alone.steps, strict=True):
        assert mine.tokens == other.tokens
        assert mine.losses == pytest.approx(other.losses, rel=1e-5, abs=1e-5)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert together.frozen_changed == []
    for parameter, tensor in alone.trained.items():
        assert (together.trained[parameter] - tensor).norm() < 1e-3 * tensor.norm(), parameter


def test_a_spec_whose_sequences_do_not_divide_is_refused() -> None:
    spec: dict[str, Any] = {"name": "n", "sharding": {"sequence_parallel_size": 2}}
    for sections, problem in (
        ({"resources": {"num_workers": 3}}, "resources.num_workers must be a fixed multiple of it, but is 3"),
        ({"resources": {"num_workers": {"min": 2, "max": 4}}}, "fixed multiple"),
        ({"data": {"max_length": 8191}}, "it must divide data.max_length 8191"),
        ({"training": {"compile": True}}, "it cannot be combined with training.compile"),
    ):
        with pytest.raises(ValidationError, match=f"sharding.sequence_parallel_size is 2: .*{problem}"):
            JobSpec.model_validate(spec | sections)
    spec |= {"sharding": {"sequence_parallel_size": 4}, "resources": {"num_workers": 8}}
    assert JobSpec.model_validate(spec | {"training": {"batch_size": 2}}).training.batch_size == 2, "one row per group"
    with pytest.raises(ValidationError, match=r"resources\.num_workers x 1 / sharding\.sequence_parallel_size x"):
        JobSpec.model_validate(spec | {"training": {"batch_size": 3}})


def test_attention_that_the_device_cannot_run_is_refused() -> None:
    training = {"attn_implementation": "varlen_attn"}
    problem = r"training\.attn_implementation 'varlen_attn' needs GPUs and bfloat16"
    for section in ({}, {"resources": {"gpus_per_worker": 1}, "model": {"dtype": "float32"}}):
        with pytest.raises(ValidationError, match=problem):
            JobSpec.model_validate({"name": "n", "training": training, **section})
    with_gpus = {"resources": {"gpus_per_worker": 1}, "model": {"dtype": "bfloat16"}}
    assert JobSpec.model_validate({"name": "n", "training": training, **with_gpus})


def test_heads_that_do_not_divide_are_named() -> None:
    check_head_counts(LlamaConfig(num_attention_heads=8, num_key_value_heads=4), 4)
    check_head_counts(DeepseekV2Config(num_attention_heads=8, num_key_value_heads=1), 4)
    with pytest.raises(InvalidInputError, match="must divide num_key_value_heads = 2") as raised:
        check_head_counts(LlamaConfig(num_attention_heads=8, num_key_value_heads=2), 4)
    assert raised.value.field == "sharding.sequence_parallel_size"
