"""The calibrated start layer by layer from disk is the one from a model in memory, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.distillation.fork import load_trained
from swiftkv_platform.distillation.weights import LazyStudent
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.workers import Workers
from tests.checkpoints import ROWS, save, save_fp8
from tests.tiny_models import FAMILY_CONFIGS, family_teacher

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "prefill_reduction": None, "key_value_group_size": 2}
SHAPE |= {"early_exit": True, "sharing": "gqa"}


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    """Packed rows of two samples, and one of another length."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(0, 256, (2, length), generator=generator),
            "position_ids": torch.cat((torch.arange(20), torch.arange(length - 20))).expand(2, -1),
        }
        for length in (48, 48, 40)
    ]


def assert_close(streamed: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert streamed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (streamed[name].float() - tensor.float()).norm() <= 1e-5 * tensor.float().norm(), name


@pytest.mark.parametrize("own_output_projection", [False, True])
@pytest.mark.parametrize("name", [*FAMILY_CONFIGS, "fbgemm"])
def test_streamed_equals_in_memory(
    name: str, own_output_projection: bool, batches: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    shape = SHAPE | {"own_output_projection": own_output_projection}
    if name == "fbgemm":
        save_fp8(tmp_path, ROWS)
    else:
        save(family_teacher(name), tmp_path, max_shard_size="100KB")
    student = convert(tmp_path, **shape, calibration=batches, dtype=torch.float32)
    source = LazyStudent.open(tmp_path, {}, dtype=torch.float32, **shape)
    spilled = 0 if name == "llama" else 1 << 20
    tensors = calibrate_streamed(source, batches, workers=Workers(), max_activation_bytes=spilled)
    streamed = {parameter: tensor.clone() for parameter, tensor in tensors}
    if name.startswith("deepseek"):  # the latent of a group has a basis of its own, whose signs are arbitrary
        assert streamed.keys() == student.swiftkv_parameters().keys()
        tokens = batches[0]["input_ids"]
        with torch.no_grad():
            expected = student(tokens).logits, student.exit_head.weight.clone()
            load_trained(student, streamed)
            for ours, theirs in zip((student(tokens).logits, student.exit_head.weight), expected, strict=True):
                assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    else:
        assert_close(streamed, student.swiftkv_parameters())
    assert all(parameter.is_meta for parameter in source.model.parameters())


@pytest.mark.parametrize("sharing", ["mqa", "mha"])
def test_other_heads(sharing: str, batches: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    save(family_teacher("qwen2"), tmp_path)
    shape = SHAPE | {"sharing": sharing, "own_output_projection": sharing == "mqa"}
    expected = convert(tmp_path, **shape, calibration=batches).swiftkv_parameters()
    source = LazyStudent.open(tmp_path, {}, **shape)
    assert_close(dict(calibrate_streamed(source, batches, workers=Workers())), expected)


def test_a_layer_at_a_time_is_in_memory(batches: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    save(family_teacher("llama"), tmp_path)
    source = LazyStudent.open(tmp_path, {}, **SHAPE)
    held: list[int] = []
    fill = source.fill

    def watched(module: torch.nn.Module, *, own: bool = True) -> None:
        fill(module, own=own)
        held.append(sum(p.numel() for p in source.model.parameters() if not p.is_meta))

    source.fill = watched  # type: ignore[method-assign]
    list(calibrate_streamed(source, batches, workers=Workers()))
    model = source.model.model
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers)
    assert max(held) <= max(2 * layer, model.embed_tokens.weight.numel() + layer)


def test_no_text_is_refused(tmp_path: Path) -> None:
    save(family_teacher("llama"), tmp_path)
    source = LazyStudent.open(tmp_path, {}, **SHAPE)
    with pytest.raises(InvalidInputError, match="no tokens"):
        list(calibrate_streamed(source, [], workers=Workers()))
