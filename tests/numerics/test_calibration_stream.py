"""Starts computed layer by layer from disk. For every family the calibrated start equals that of a model in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.distillation.fork import load_trained
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.lazy_student import LazyStudent
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.student_shape import ShapeRequest
from tests.checkpoints import ROWS, save, save_fp8
from tests.parameters import KINDS, in_turn
from tests.tiny_models import FAMILY_CONFIGS, family_teacher, random_tokens

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "prefill_reduction": None, "key_value_group_size": 2}
SHAPE |= {"early_exit": True, "sharing": "gqa"}


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    """Two batches: packed rows of two samples, and one row of another length."""
    return [
        {
            "input_ids": random_tokens(2, length, seed=seed),
            "position_ids": torch.cat((torch.arange(20), torch.arange(length - 20))).expand(2, -1),
        }
        for seed, length in enumerate((48, 48, 40))
    ]


def streamed(path: Path, batches: Any, shape: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    source = LazyStudent.open(path, ShapeRequest(**shape), {}, dtype=torch.float32)
    found = {name: t.clone() for name, t in calibrate_streamed(source, batches, workers=Workers(), **options)}
    assert all(parameter.is_meta for parameter in source.model.parameters())
    return found


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].float() - tensor.float()).norm() <= share * tensor.float().norm(), name


@pytest.mark.parametrize(
    ("name", "own_output_projection"), in_turn([*FAMILY_CONFIGS, "fbgemm"], [False, True], [*KINDS, "fbgemm"])
)
def test_streamed_equals_in_memory(name: str, own_output_projection: bool, batches: Any, tmp_path: Path) -> None:
    shape = SHAPE | {"own_output_projection": own_output_projection}
    if name == "fbgemm":
        save_fp8(tmp_path, ROWS)
    else:
        save(family_teacher(name), tmp_path, max_shard_size="100KB")
    student = convert(tmp_path, **shape, dtype=torch.float32, calibration=batches)
    found = streamed(tmp_path, batches, shape, max_activation_bytes=0 if name == "llama" else 1 << 20)
    if not name.startswith("deepseek"):
        assert_close(found, student.swiftkv_parameters())
        return
    # The basis of a group's latent is determined up to sign.
    assert found.keys() == student.swiftkv_parameters().keys()
    ids = batches[0]["input_ids"]
    with torch.no_grad():
        expected = student(ids).logits, student.exit_head.weight.clone()
        load_trained(student, found)
        for ours, theirs in zip((student(ids).logits, student.exit_head.weight), expected, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("sharing", ["mqa", "mha"])
def test_other_heads(sharing: str, batches: Any, tmp_path: Path) -> None:
    save(family_teacher("qwen2"), tmp_path)
    shape = SHAPE | {"sharing": sharing, "own_output_projection": sharing == "mqa"}
    expected = convert(tmp_path, **shape, dtype=torch.float32, calibration=batches).swiftkv_parameters()
    assert_close(streamed(tmp_path, batches, shape), expected)


def test_a_layer_at_a_time_is_in_memory(batches: Any, tmp_path: Path) -> None:
    save(family_teacher("llama"), tmp_path)
    source = LazyStudent.open(tmp_path, ShapeRequest(**SHAPE), {}, dtype=torch.float32)
    held: list[int] = []
    fill = source.fill

    def watched(module: torch.nn.Module, *, own: bool = True) -> None:
        fill(module, own=own)
        held.append(sum(p.numel() for p in source.model.parameters() if not p.is_meta))

    source.fill = watched  # type: ignore[method-assign]
    told: list[tuple[int, int]] = []
    list(calibrate_streamed(source, batches, workers=Workers(), progress=lambda *counts: told.append(counts)))
    model = source.model.model
    num_layers = len(model.layers)
    assert told == [(done, num_layers) for done in range(num_layers + 1)]
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers)
    assert max(held) <= max(2 * layer, model.embed_tokens.weight.numel() + layer)
    with pytest.raises(InvalidInputError, match="no tokens"):
        streamed(tmp_path, [], SHAPE)
