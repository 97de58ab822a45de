"""The refitted start: output projections fitted, layer after layer, to the student's own states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.distillation.fork import load_trained
from swiftkv_platform.distillation.weights import LazyStudent
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration_statistics import REFIT_RIDGE
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.workers import Workers
from tests.checkpoints import save
from tests.tiny_models import FAMILY_CONFIGS, family_teacher

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "prefill_reduction": None, "early_exit": False, "sharing": "gqa"}
SHAPE |= {"own_output_projection": True}


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    """[rows, num_tokens]."""
    return torch.randint(0, 256, (6, 80), generator=torch.Generator().manual_seed(2))


def streamed(path: Path, tokens: torch.Tensor, group_size: int, *, refit: bool) -> dict[str, torch.Tensor]:
    source = LazyStudent.open(path, {}, dtype=torch.float32, key_value_group_size=group_size, **SHAPE)
    start = calibrate_streamed(source, list(tokens.split(2)), workers=Workers(), refit=refit, max_activation_bytes=4096)
    found = {name: tensor.clone() for name, tensor in start}
    assert all(parameter.is_meta for parameter in source.model.parameters())
    return found


@torch.no_grad()
def refit_in_memory(student: Any, tokens: torch.Tensor) -> None:
    """The definition, on a whole model: for each upper layer, least squares over all tokens at once."""
    decoder, config = student.model, student.config
    attended: dict[str, torch.Tensor] = {}
    context = decoder.begin(tokens)
    teacher = hidden = x = decoder.lower(context)
    shared = decoder.shared_key_values(x, context)
    for i in range(config.num_key_value_layers, config.num_hidden_layers):
        layer = decoder.layers[i]
        leader = max(each for each in decoder.layer_map.leaders if each <= i)
        if i == leader:
            key_value = layer.self_attn.expand_key_value(shared[decoder.layer_map.leaders.index(i)])
        residual = layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _module, inputs: attended.update(residual=inputs[0])
        )
        teacher = decoder.run_layer(i, teacher, context)
        target = attended["residual"]
        heads = layer.self_attn.o_proj_swiftkv.register_forward_pre_hook(
            lambda _module, inputs: attended.update(heads=inputs[0])
        )
        decoder.run_layer(i, hidden, context, shared_key_value=key_value)
        residual.remove()
        heads.remove()
        a = attended["heads"].flatten(0, 1).double()
        weight = layer.self_attn.o_proj_swiftkv.weight
        missing = (target - attended["residual"]).flatten(0, 1).double()  # beyond what the projection gives already
        penalty = (REFIT_RIDGE * a.square().sum() / a.shape[1]).sqrt() * torch.eye(a.shape[1], dtype=a.dtype)
        rows, wanted = torch.cat((a, penalty)), torch.cat((missing, missing.new_zeros(a.shape[1], missing.shape[1])))
        weight += torch.linalg.lstsq(rows, wanted).solution.T.to(weight.dtype)
        hidden = decoder.run_layer(i, hidden, context, shared_key_value=key_value)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("family", [name for name in FAMILY_CONFIGS if not name.startswith("deepseek")])
def test_layers_are_regressed_in_turn(family: str, group_size: int, tokens: torch.Tensor, tmp_path: Path) -> None:
    save(family_teacher(family), tmp_path, max_shard_size="100KB")
    student = convert(
        tmp_path, key_value_group_size=group_size, **SHAPE, calibration=list(tokens.split(2)), dtype=torch.float32
    )
    refit_in_memory(student, tokens)
    found = streamed(tmp_path, tokens, group_size, refit=True)
    expected = student.swiftkv_parameters()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_the_student_is_closer_to_its_teacher(family: str, tokens: torch.Tensor, tmp_path: Path) -> None:
    save(family_teacher(family), tmp_path)
    student = convert(tmp_path, key_value_group_size=2, **SHAPE, dtype=torch.float32)

    @torch.no_grad()
    def distance() -> float:
        teacher = student.swiftkv(False).model(tokens).last_hidden_state
        return float((student.swiftkv(True).model(tokens).last_hidden_state - teacher).norm())

    distances = []
    for refit in (False, True):
        load_trained(student, streamed(tmp_path, tokens, 2, refit=refit))
        distances.append(distance())
    assert distances[1] < distances[0]
