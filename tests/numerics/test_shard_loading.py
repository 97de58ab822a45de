"""A tensor-parallel rank reads only its part of a checkpoint, and holds the same part that it would keep of the whole
model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Transpose, WeightConverter

from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.loading import _read_model
from swiftkv_platform.engine.sharding import get_unsharded_name, shard_model
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export
from swiftkv_platform.model.weights import loading
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.loading import StoredWeights
from tests.numerics.distillation_worker import counted_reads
from tests.support.checkpoints import BLOCKS, ROWS, TENSORS, rewrite, save, save_fp8
from tests.support.parameters import KINDS, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher, random_teacher

STUDENT: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True}
SIZE = 2


@dataclass(frozen=True)
class OneOfRanks:
    """A rank that only loads weights."""

    rank: int
    size: int = SIZE
    device = torch.device("cpu")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("loading sums nothing")


def check(directory: Path, *, also_read: int = 0, **config: Any) -> list[Any]:
    """Compare each rank's part of the whole model with what it reads from the files; return the latter by rank.

    Args:
        also_read: bytes that a rank may read besides what it keeps.
    """
    engine = EngineConfig(tensor_parallel_size=SIZE, **config)
    loaded = []
    for rank in range(SIZE):
        kept: Any = _read_model(directory, engine, None)
        shard_model(kept, OneOfRanks(rank))
        with counted_reads() as sizes:
            model = _read_model(directory, engine, OneOfRanks(rank))  # type: ignore[arg-type]
        check_same(model, kept)
        assert 0 < sum(sizes) <= stored_bytes(kept, directory) + also_read
        loaded.append(model)
    return loaded


def check_same(model: Any, kept: Any) -> None:
    actual, expected = (dict(one.named_parameters(remove_duplicate=False)) for one in (model, kept))
    assert actual.keys() == expected.keys()
    for name, parameter in expected.items():
        if name == "model.embed_tokens.weight" and parameter.shape == (1, 1):
            continue  # a placeholder: rank 0 holds the embedding
        found = actual[name]
        assert found.dtype == parameter.dtype, name
        assert found.shape == parameter.shape, name
        assert torch.equal(found.view(torch.uint8), parameter.contiguous().view(torch.uint8)), name
    for (name, buffer), (_, other) in zip(model.named_buffers(), kept.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    tied = [one.model.embed_tokens.weight is getattr(one.lm_head, "weight", None) for one in (model, kept)]
    assert tied[0] == tied[1]
    linear = [
        [(name, m.in_features, m.out_features) for name, m in root.named_modules() if type(m) is torch.nn.Linear]
        for root in (model, kept)
    ]
    assert linear[0] == linear[1]
    assert type(model) is type(kept)
    assert model.training is kept.training is False
    assert model.dtype == kept.dtype
    assert model.config.to_diff_dict() == kept.config.to_diff_dict()
    assert model.generation_config.to_dict() == kept.generation_config.to_dict()


def stored_bytes(kept: Any, directory: Path) -> int:
    """Return the bytes that a rank's part takes in the files, with all scales of FP8 weights."""
    headers = Checkpoint.from_directory(directory).headers
    total = sum(info.num_bytes for name, info in headers.items() if name.endswith(("_scale", "_scale_inv")))
    for name, parameter in kept.named_parameters():
        if parameter.shape == (1, 1):
            continue
        info = headers.get(get_unsharded_name(name))
        dtype = next(iter(headers.values())).dtype if info is None else info.dtype  # experts are stored one by one
        total += parameter.numel() * dtype.itemsize
    return total


@pytest.mark.parametrize(("family", "other"), in_turn(FAMILY_CONFIGS, ["teacher", "dense"], KINDS))
def test_every_family(family: str, other: str, tmp_path: Path) -> None:
    teacher = family_teacher(family)
    save(disturb(convert(teacher, **STUDENT)), tmp_path / "student", max_shard_size="100KB")
    check(tmp_path / "student")
    if other == "dense":
        save(teacher, tmp_path / "dense", max_shard_size="100KB")
    check(tmp_path / ("dense" if other == "dense" else "student"), swiftkv=other == "dense")


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    save(family_teacher("llama"), directory)
    rewrite(directory, change)


def with_fused_experts(directory: Path) -> None:
    model = family_teacher("qwen3_moe")
    save(model, directory)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def without_dtype(directory: Path) -> None:
    """Write a model whose config.json omits the dtype."""
    save(random_teacher().to(torch.bfloat16), directory)
    config = json.loads((directory / "config.json").read_bytes())
    assert config.pop("dtype") == "bfloat16"
    (directory / "config.json").write_text(json.dumps(config))


def trained(teacher: Any, **shape: Any) -> Any:
    return disturb(convert(teacher, **STUDENT, **shape))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BIASED = {"attention_bias": True}
CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "biases": lambda path: save(trained(random_teacher(**BIASED, mlp_bias=True)), path),
    "its own outputs": lambda path: save(trained(random_teacher(**BIASED), own_output_projection=True), path),
    "its own heads": lambda path: save(trained(random_teacher(), sharing="mha"), path),
    "no teacher": lambda path: export(trained(family_teacher("qwen3")), path),
    "streamed": lambda path: convert_checkpoint(
        save(family_teacher("mixtral"), path.parent / "teacher"), path, **STUDENT
    ),
    "the head alone": lambda path: change_tensors(path, lambda t: t.update({HEAD: t.pop(EMBEDDING)})),
    "fused experts": with_fused_experts,
    "no dtype": without_dtype,
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(CHECKPOINTS, ["auto", "bfloat16"]))
def test_every_checkpoint(name: str, dtype: str, tmp_path: Path) -> None:
    CHECKPOINTS[name](tmp_path / "model")
    check(tmp_path / "model", dtype=dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_that_is_stored_as_well(tied: bool, tmp_path: Path) -> None:
    """The head equals the embedding, or differs from it."""
    change_tensors(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING] + (0 if tied else 1)}))
    head = load_file(tmp_path / "model.safetensors")[HEAD].nbytes
    first, _ = check(tmp_path, also_read=2 * head)  # read whole, to compare the two
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(("quantization", "student"), in_turn([ROWS, TENSORS, BLOCKS], [False, True]))
def test_fp8(quantization: dict[str, Any], student: bool, tmp_path: Path) -> None:
    save_fp8(tmp_path / "teacher", quantization)
    if student:
        convert_checkpoint(tmp_path / "teacher", tmp_path / "student", **STUDENT)
    for dtype in ("auto", "float32"):
        check(tmp_path / ("student" if student else "teacher"), dtype=dtype)


def test_a_range_of_every_dimension_of_stacked_experts(tmp_path: Path) -> None:
    model = family_teacher("mixtral")
    weights = StoredWeights(Checkpoint.open(save(model, tmp_path)), model.config)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = model.get_parameter(name)
    for rows in (slice(10, 20), slice(90, 102), slice(100, 150)):  # gate rows, rows of both, up rows
        part = (slice(1, 3), rows, slice(5, 9))
        with counted_reads() as sizes:
            assert torch.equal(weights.read(name, part), whole[part])
        assert sum(sizes) == whole[part].nbytes


def test_a_part_of_what_is_converted_as_a_whole(tmp_path: Path) -> None:
    """No supported family has such a conversion; the tensor is read whole, and a part of it kept."""
    model = random_teacher()
    transposed = WeightConverter("up_proj.weight", "up_proj.weight", operations=[Transpose(0, 1)])
    with patch.object(loading, "get_checkpoint_conversion_mapping", lambda _: [transposed]):
        weights = StoredWeights(Checkpoint.open(save(model, tmp_path)), model.config)
    name, part = "model.layers.1.mlp.up_proj.weight", (slice(8, 24), slice(30, 90))
    with counted_reads() as sizes:
        found = weights.read(name, part)
    whole = model.get_parameter(name)
    assert torch.equal(found, whole.T[part])
    assert found.untyped_storage().nbytes() == found.nbytes, "the rest of the tensor is freed"
    assert sizes == [whole.nbytes]


def test_heads_that_do_not_divide_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    save(random_teacher(), tmp_path)
    with counted_reads() as sizes, pytest.raises(ModelError, match="num_key_value_heads 2"):
        _read_model(tmp_path, EngineConfig(tensor_parallel_size=4), OneOfRanks(0, 4))  # type: ignore[arg-type]
    assert sizes == []
