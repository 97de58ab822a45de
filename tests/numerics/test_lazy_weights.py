"""Teachers whose files name or store tensors differently from their model: sharded workers read only their own part,
and train as from the whole."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from swiftkv_platform.model import convert
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.lazy_student import LazyStudent, save_lazy_student
from swiftkv_platform.student_shape import RequestedStudentShape
from tests.numerics.distillation_worker import Outcome, Run, counted_reads, run_spawned
from tests.support.checkpoints import BLOCKS, ROWS, TENSORS, save, save_fp8
from tests.support.parameters import KINDS, few
from tests.support.tiny_models import FAMILY_CONFIGS, family_teacher

WORKERS = 2
SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "prefill_reduction": None, "key_value_group_size": 2}
SHAPE |= {"early_exit": True, "sharing": "gqa"}
FP8: dict[str, Any] = {"fbgemm": ROWS, "compressed-tensors": TENSORS, "fine-grained": BLOCKS}
SOAK = "SWIFTKV_SOAK" in os.environ
TRAINED = ("fbgemm", "mixtral") + ("compressed-tensors", "deepseek_v2") * SOAK


def save_as(name: str, directory: Path) -> Path:
    if name not in FP8:
        return save(family_teacher(name), directory, max_shard_size="100KB")
    save_fp8(directory, FP8[name])
    return directory


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    path = tmp_path_factory.mktemp("lazy")
    runs: dict[tuple[str, str], Run] = {}
    for name in TRAINED:
        teacher = save_as(name, path / name)
        training = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 2}
        spec: dict[str, Any] = {"resources": {"num_workers": WORKERS}, "training": training}
        for strategy in ("ddp", "fsdp2", "deepspeed")[: 3 if name == "mixtral" else 2]:
            sharding = {"sharding": {"strategy": strategy, "zero_stage": 3 if strategy == "deepspeed" else 2}}
            store = str(path / f"{name}-{strategy}")
            runs[name, strategy] = Run(store=store, teacher=str(teacher), spec=spec | sharding)
    return dict(zip(runs, run_spawned(list(runs.values()), WORKERS, path), strict=True))


@pytest.mark.soak("two processes")
@pytest.mark.parametrize("name", TRAINED)
def test_a_sharded_worker_reads_its_own_part(name: str, outcomes: dict[tuple[str, str], Outcome]) -> None:
    """With ZeRO a worker holds one unit at a time."""
    strategies = {"fsdp2": 0.55, "deepspeed": 0.9}
    for strategy in [each for each in strategies if (name, each) in outcomes]:
        sharded, whole = outcomes[name, strategy], outcomes[name, "ddp"]
        for mine, other in zip(sharded.steps, whole.steps, strict=True):
            assert mine.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-5)
        assert sharded.frozen_changed == []
        assert sharded.largest_share < strategies[strategy]
        if strategy == "fsdp2":
            assert sharded.share_read < 0.75  # half, plus the weights that the copied start reads again


@pytest.mark.parametrize("name", few([*FAMILY_CONFIGS, *FP8], [*KINDS, *FP8]))
def test_a_lazy_student_is_the_converted_one(name: str, tmp_path: Path) -> None:
    """In memory, and when it is saved piece by piece."""
    directory = save_as(name, tmp_path / "teacher")
    converted = convert(directory, **SHAPE, dtype=torch.bfloat16)
    lazy = LazyStudent.open(directory, RequestedStudentShape(**SHAPE), {}, dtype=torch.bfloat16)
    assert lazy.model.config.to_diff_dict() == converted.config.to_diff_dict()
    assert lazy.model.generation_config.to_dict() == converted.generation_config.to_dict()
    (tmp_path / "ours").mkdir()
    converted.save_pretrained(tmp_path / "theirs")
    save_lazy_student(lazy, tmp_path / "ours", teacher=True)
    ours, theirs = (Checkpoint.from_directory(tmp_path / which) for which in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(ours[tensor].equal(theirs[tensor]) for tensor in theirs)
    lazy.load_parameters(lazy.model)
    expected = dict(converted.named_parameters())
    for parameter, tensor in lazy.model.named_parameters():
        assert tensor.equal(expected[parameter]), parameter


@pytest.mark.parametrize("name", ["mixtral", "fbgemm", "fine-grained"])
def test_rows_are_read_without_the_rest(name: str, tmp_path: Path) -> None:
    lazy = LazyStudent.open(save_as(name, tmp_path / "teacher"), RequestedStudentShape(**SHAPE), {})
    for parameter, tensor in lazy.model.named_parameters():
        rows = slice(len(tensor) // 4, len(tensor) // 2)
        whole = lazy.read(parameter)
        with counted_reads() as sizes:
            part = lazy.read(parameter, rows)
        assert part.equal(whole[rows]), parameter
        if "swiftkv" not in parameter and whole.numel() > 1 << 10:
            assert sum(sizes) < 0.5 * whole.numel() * whole.element_size(), parameter


def test_released_modules_hold_nothing(tmp_path: Path) -> None:
    model: PreTrainedModel = family_teacher("llama")  # its head is tied
    lazy = LazyStudent.open(save(model, tmp_path), RequestedStudentShape(**SHAPE), {})
    for _ in range(2):
        lazy.load_parameters(lazy.model)
        assert lazy.model.lm_head.weight is lazy.model.model.embed_tokens.weight
        lazy.free_parameters(lazy.model)
        assert all(parameter.is_meta for parameter in lazy.model.parameters())
