"""Starts computed layer by layer from disk. For every family the calibrated start equals that of a model in memory; the
refit fits each output projection to the student's own hidden states."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.distillation.fork import load_trained
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration_statistics import REFIT_RIDGE
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.lazy_student import LazyStudent
from swiftkv_platform.model.workers import Workers
from tests.checkpoints import ROWS, save, save_fp8
from tests.parameters import KINDS, few, in_turn
from tests.tiny_models import FAMILY_CONFIGS, family_teacher, random_tokens

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "prefill_reduction": None, "key_value_group_size": 2}
SHAPE |= {"early_exit": True, "sharing": "gqa", "dtype": torch.float32}
REFIT = SHAPE | {"early_exit": False, "own_output_projection": True}


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


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    """[rows, num_tokens]."""
    return random_tokens(6, 80, seed=2)


def streamed(path: Path, batches: Any, shape: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    source = LazyStudent.open(path, {}, **shape)
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
    student = convert(tmp_path, **shape, calibration=batches)
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
    expected = convert(tmp_path, **shape, calibration=batches).swiftkv_parameters()
    assert_close(streamed(tmp_path, batches, shape), expected)


def test_a_layer_at_a_time_is_in_memory(batches: Any, tmp_path: Path) -> None:
    save(family_teacher("llama"), tmp_path)
    source = LazyStudent.open(tmp_path, {}, **SHAPE)
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


@torch.no_grad()
def refit_in_memory(student: Any, tokens: torch.Tensor) -> None:
    """Refit a whole model by definition: for each upper layer, one least-squares fit over all tokens."""
    decoder, config = student.model, student.config
    attended: dict[str, torch.Tensor] = {}
    context = decoder.begin(tokens)
    teacher = hidden = x = decoder.lower(context)
    shared = decoder.shared_key_values(x, context)

    def keep(name: str, module: torch.nn.Module) -> Any:
        return module.register_forward_pre_hook(lambda _module, inputs: attended.update({name: inputs[0]}))

    for i in range(config.num_key_value_layers, config.num_hidden_layers):
        layer = decoder.layers[i]
        leader = max(each for each in decoder.layer_map.leaders if each <= i)
        if i == leader:
            key_value = layer.self_attn.expand_key_value(shared[decoder.layer_map.leaders.index(i)])
        residual = keep("residual", layer.post_attention_layernorm)
        teacher = decoder.run_layer(i, teacher, context)
        target = attended["residual"]
        heads = keep("heads", layer.self_attn.o_proj_swiftkv)
        decoder.run_layer(i, hidden, context, shared_key_value=key_value)
        residual.remove()
        heads.remove()
        a = attended["heads"].flatten(0, 1).double()
        weight = layer.self_attn.o_proj_swiftkv.weight
        missing = (target - attended["residual"]).flatten(0, 1).double()  # what the projection does not give yet
        missing /= getattr(config, "residual_multiplier", 1.0)
        penalty = (REFIT_RIDGE * a.square().sum() / a.shape[1]).sqrt() * torch.eye(a.shape[1], dtype=a.dtype)
        rows, wanted = torch.cat((a, penalty)), torch.cat((missing, missing.new_zeros(a.shape[1], missing.shape[1])))
        weight += torch.linalg.lstsq(rows, wanted).solution.T.to(weight.dtype)
        hidden = decoder.run_layer(i, hidden, context, shared_key_value=key_value)


@pytest.mark.parametrize(
    ("family", "group_size"), in_turn((n for n in FAMILY_CONFIGS if "deepseek" not in n), [1, 2], KINDS[:3])
)
def test_layers_are_refitted_in_turn(family: str, group_size: int, tokens: torch.Tensor, tmp_path: Path) -> None:
    save(family_teacher(family), tmp_path, max_shard_size="100KB")
    shape, batches = REFIT | {"key_value_group_size": group_size}, list(tokens.split(2))
    student = convert(tmp_path, **shape, calibration=batches)
    refit_in_memory(student, tokens)
    found = streamed(tmp_path, batches, shape, refit=True, max_activation_bytes=4096)
    assert_close(found, student.swiftkv_parameters(), 1e-4)


@pytest.mark.parametrize("family", few(["llama", "deepseek_v2", "deepseek_v2-lora"]))
@torch.no_grad()
def test_a_refitted_student_is_closer_to_its_teacher(family: str, tokens: torch.Tensor, tmp_path: Path) -> None:
    save(family_teacher(family), tmp_path)
    student = convert(tmp_path, **REFIT)
    distances = []
    for refit in (False, True):
        options = {"refit": refit, "max_activation_bytes": 4096}
        load_trained(student, streamed(tmp_path, list(tokens.split(2)), REFIT, **options))
        teacher = student.swiftkv(False).model(tokens).last_hidden_state
        distances.append(float((student.swiftkv(True).model(tokens).last_hidden_state - teacher).norm()))
    assert distances[1] < distances[0]
