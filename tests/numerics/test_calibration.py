"""The calibrated start: by definition for groups of one, exact where an exact solution exists, better than copying
elsewhere, and the same layer by layer from files as in memory."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from swiftkv_platform.distillation.model import load_trained_tensors
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration import calibrate_layerwise
from swiftkv_platform.model.calibration.regression import RIDGE
from swiftkv_platform.model.weights.lazy_student import LazyStudent
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.student_shape import RequestedStudentShape
from tests.support.checkpoints import ROWS, save, save_fp8
from tests.support.parameters import KINDS, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, family_teacher, random_teacher, random_tokens

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "prefill_reduction": None, "key_value_group_size": 2}
SHAPE |= {"early_exit": True, "sharing": "gqa"}
BYPASSING = {"prefill_layers": [0, 2], "decode_key_value": "own"}


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return random_tokens(32, 64, seed=1)


@torch.no_grad()
def divergence(student: Any, tokens: torch.Tensor) -> float:
    """Mean KL(teacher || student) in nats."""
    student_log = student.swiftkv(True)(tokens).logits.log_softmax(-1)
    teacher_log = student.swiftkv(False)(tokens).logits.log_softmax(-1)
    return float(F.kl_div(student_log, teacher_log, log_target=True, reduction="none").sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, {"num_key_value_layers": 2}) for name in FAMILY_CONFIGS), ("llama", BYPASSING)]
)
@torch.no_grad()
def test_a_layer_of_its_own_is_the_ridge_regression_of_its_teachers(
    name: str, shape: Any, tokens: torch.Tensor
) -> None:
    student = convert(family_teacher(name), **shape, calibration=tokens.split(12))
    decoder, config = student.model, student.config
    context = decoder.make_context(tokens)
    x = context.hidden
    for i in range(config.num_key_value_layers):
        if i not in config.layer_map.bypassed_layers:
            x = decoder.run_layer(i, x, context)
    h = decoder.norm_swiftkv(x).flatten(0, 1).double()
    for i in config.layer_map.leaders:
        attention = decoder.layers[i].self_attn
        outputs: dict[str, torch.Tensor] = {}
        for module in dict.fromkeys(
            attention.locate_teacher_rows(config, each)[0] for each in attention.decode_modules
        ):
            getattr(attention, module).register_forward_hook(partial(keep_output, outputs, module))
        student.swiftkv(False)(tokens)
        for each in attention.decode_modules:
            module, rows = attention.locate_teacher_rows(config, each)
            fitted = getattr(attention, f"{each}_swiftkv")
            inputs = h if fitted.bias is None else torch.cat((h, h.new_ones(len(h), 1)), dim=1)
            size = inputs.shape[1]
            penalty = (RIDGE * inputs.square().sum() / size).sqrt() * torch.eye(size, dtype=h.dtype)
            wanted = outputs[module][:, slice(None) if rows is None else rows]
            wanted = torch.cat((wanted, wanted.new_zeros(size, wanted.shape[1])))
            expected = torch.linalg.lstsq(torch.cat((inputs, penalty)), wanted).solution.T.float()
            torch.testing.assert_close(fitted.weight, expected[:, : h.shape[1]], atol=1e-4, rtol=1e-4)
            if fitted.bias is not None:
                torch.testing.assert_close(fitted.bias, expected[:, -1], atol=1e-4, rtol=1e-4)


def keep_output(outputs: dict[str, torch.Tensor], name: str, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
    outputs[name] = output.flatten(0, 1).double()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *in_turn(FAMILY_CONFIGS, [{"key_value_group_size": 1}, {"key_value_group_size": 2}], KINDS),
        ("llama-biased", {"key_value_group_size": 1, "sharing": "mqa"}),
        ("llama-biased", {"key_value_group_size": 2, "sharing": "mha"}),
    ],
)
def test_calibrated_start_beats_the_copied_one(name: str, shape: dict[str, Any], tokens: torch.Tensor) -> None:
    copied = convert(family_teacher(name), num_key_value_layers=2, **shape)
    calibrated = convert(family_teacher(name), num_key_value_layers=2, **shape, calibration=tokens[:24].split(8))
    assert divergence(calibrated, tokens[24:]) < 0.9 * divergence(copied, tokens[24:])


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_calibration_runs_the_teacher_without_dropout(family: str, tokens: torch.Tensor) -> None:
    """A teacher in memory may be in training mode; two conversions of it agree."""
    teacher = family_teacher(family)
    teacher.config.attention_dropout = 0.5
    shape: dict[str, Any] = {"num_key_value_layers": 3, "early_exit": True, "calibration": [tokens[:4]]}
    first, second = (convert(copy.deepcopy(teacher).train(), **shape).state_dict() for _ in range(2))
    assert [name for name, tensor in first.items() if not torch.equal(tensor, second[name])] == []


def test_the_exit_head_starts_from_the_final_hidden_state_that_is_to_be_expected(tokens: torch.Tensor) -> None:
    shape: dict[str, Any] = {"num_key_value_layers": 3, "early_exit": True}
    copied = convert(random_teacher(), **shape)
    calibrated = convert(random_teacher(), **shape, calibration=tokens[:24].split(8))
    assert exit_divergence(calibrated, tokens[24:]) < 0.9 * exit_divergence(copied, tokens[24:])


@torch.no_grad()
def exit_divergence(student: Any, tokens: torch.Tensor) -> float:
    """Mean KL(teacher || exit head) in nats."""
    decoder = student.model
    x = decoder.run_lower_layers(decoder.make_context(tokens))
    teacher_log = student.swiftkv(False)(tokens).logits.log_softmax(-1)
    exit_log = student.exit_logits(x).log_softmax(-1)
    return float(F.kl_div(exit_log, teacher_log, log_target=True, reduction="none").sum(-1).mean())


@pytest.mark.parametrize(("family", "form"), [("llama", "shared"), ("phi3-partial", "shared"), ("llama", "own")])
def test_layers_whose_keys_differ_by_a_rotation_share_one_key_exactly(
    family: str, form: str, tokens: torch.Tensor
) -> None:
    """Layer 4's keys are layer 3's, rotated and scaled per frequency: averaging loses them, the joint fit does not.
    With partial RoPE, the dimensions without RoPE are rotated in pairs of their own."""
    teacher = teacher_with_turned_keys(random_teacher() if family == "llama" else family_teacher(family))
    shape: dict[str, Any] = {"num_key_value_layers": 3, "key_value_group_size": 2, "decode_key_value": form}
    copied = convert(copy.deepcopy(teacher), **shape)
    calibrated = convert(copy.deepcopy(teacher), **shape, calibration=[tokens])
    options = {} if form == "shared" else {"prompt_length": 1}
    assert attention_error(copied, 4, tokens, **options) > 0.1
    assert attention_error(calibrated, 4, tokens, **options) < 0.02


@torch.no_grad()
def teacher_with_turned_keys(teacher: Any) -> Any:
    """Return a teacher whose layer 4 has layer 3's values, and layer 3's keys rotated and scaled per frequency."""
    layers, config = teacher.model.layers, teacher.config
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    for layer in layers[3:]:  # upper layers barely change the residual stream: all see the same hidden state
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.mul_(1e-3)
        projections(layer)[0].mul_(3)  # sharp attention, sensitive to wrong keys
        layer.input_layernorm.weight.copy_(layers[3].input_layernorm.weight)
    (_, keys, values), (_, turned_keys, same_values) = projections(layers[3]), projections(layers[4])
    rotated = int(size * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    parts = keys.unflatten(0, (heads, size)).split([rotated, size - rotated], dim=1)
    turned_keys.copy_(torch.cat([turn(part) for part in parts if part.shape[1]], dim=1).flatten(0, 1))
    same_values.copy_(values)
    return teacher


def projections(layer: Any) -> tuple[torch.Tensor, ...]:
    """Return a layer's query, key and value weights; Phi-3 stores them as parts of one weight."""
    attention = layer.self_attn
    if not hasattr(attention, "qkv_proj"):
        return attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
    whole, outputs = attention.qkv_proj.weight, attention.o_proj.in_features
    keys = (len(whole) - outputs) // 2
    parts: tuple[torch.Tensor, ...] = whole.split([outputs, keys, keys])
    return parts


def turn(keys: torch.Tensor) -> torch.Tensor:
    """Rotate and scale each RoPE pair of `keys`, [heads, dims, inputs], by a random complex number."""
    first, second = keys.chunk(2, dim=1)
    angle = torch.rand(*first.shape[:2], 1) * 6.28
    size = 0.5 + torch.rand_like(angle)
    turned = (angle.cos() * first - angle.sin() * second, angle.sin() * first + angle.cos() * second)
    return torch.cat([size * part for part in turned], dim=1)


@torch.no_grad()
def test_layers_with_other_orders_of_heads_and_other_bases_of_values_share_both(tokens: torch.Tensor) -> None:
    """Layer 4 has layer 3's heads in another order, and their values in another basis. A student with its own output
    projections makes up for both; with frozen ones it cannot."""
    teacher = teacher_with_turned_keys(random_teacher())
    heads = teacher.config.num_key_value_heads
    attention = teacher.model.layers[4].self_attn
    for projection in (attention.k_proj, attention.v_proj):
        by_head = projection.weight.unflatten(0, (heads, -1)).roll(1, 0)
        if projection is attention.v_proj:
            by_head = torch.randn(heads, by_head.shape[1], by_head.shape[1]) / by_head.shape[1] ** 0.5 @ by_head
        projection.weight.copy_(by_head.flatten(0, 1))
    shape: dict[str, Any] = {"num_key_value_layers": 3, "key_value_group_size": 2, "calibration": [tokens]}
    frozen = convert(copy.deepcopy(teacher), **shape)
    own = convert(copy.deepcopy(teacher), **shape, own_output_projection=True)
    for layer in (3, 4):
        assert attention_error(frozen, layer, tokens) > 0.1
        assert attention_error(own, layer, tokens) < 0.02


@pytest.mark.parametrize(
    ("family", "sharing"),
    [("llama", "gqa"), ("llama", "mqa"), ("qwen2", "gqa"), ("qwen3", "mqa"), ("deepseek_v2", "gqa")],
)
def test_output_projections_of_its_own_bring_a_student_nearer(family: str, sharing: Any, tokens: torch.Tensor) -> None:
    shape: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 3, "sharing": sharing}
    shape["calibration"] = tokens[:24].split(8)
    frozen = convert(family_teacher(family), **shape)
    own = convert(family_teacher(family), **shape, own_output_projection=True)
    assert divergence(own, tokens[24:]) < 0.95 * divergence(frozen, tokens[24:])
    assert {name.split(".")[2] for name in own.swiftkv_parameters() if "o_proj_swiftkv" in name} == set("234")


@torch.no_grad()
def attention_error(student: Any, layer: int, tokens: torch.Tensor, **options: Any) -> float:
    """Return the error of a layer's attention output, relative to the teacher's."""
    outputs: list[torch.Tensor] = []
    handle = student.model.layers[layer].self_attn.register_forward_hook(lambda _m, _a, out: outputs.append(out[0]))
    student.swiftkv(True)(tokens, **options)
    student.swiftkv(False)(tokens)
    handle.remove()
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())


def test_heads_that_differ_by_a_rotation_share_one_key_exactly(tokens: torch.Tensor) -> None:
    """Layer 3's second key head is its first, rotated and scaled per frequency: one calibrated head serves both."""
    teacher = random_teacher(num_hidden_layers=4)
    attention = teacher.model.layers[3].self_attn
    with torch.no_grad():
        attention.q_proj.weight.mul_(3)  # sharp attention, sensitive to wrong keys
        attention.k_proj.weight[8:].copy_(turn(attention.k_proj.weight[None, :8])[0])
        attention.v_proj.weight[8:].copy_(attention.v_proj.weight[:8])
    shape: dict[str, Any] = {"num_key_value_layers": 3, "sharing": "mqa"}
    copied = convert(copy.deepcopy(teacher), **shape)
    calibrated = convert(copy.deepcopy(teacher), **shape, calibration=[tokens])
    assert divergence(calibrated, tokens) < 0.01 * divergence(copied, tokens)


@torch.no_grad()
def test_layers_with_other_bases_share_one_latent(tokens: torch.Tensor) -> None:
    """Layer 3 is layer 2 with its latent in another basis, its keys under a linear map and its RoPE key rotated."""
    teacher = family_teacher("deepseek_v2")
    layers, config = teacher.model.layers, teacher.config
    rank, plain, heads = config.kv_lora_rank, config.qk_nope_head_dim, config.num_attention_heads
    for layer in layers[2:]:  # upper layers barely change the residual stream: all see the same hidden state
        for weight in (layer.mlp.experts.down_proj, layer.mlp.shared_experts.down_proj.weight):
            weight.zero_()
        layer.self_attn.o_proj.weight.mul_(1e-3)
        layer.self_attn.q_proj.weight.mul_(3)  # sharp attention, sensitive to wrong keys
        layer.input_layernorm.weight.copy_(layers[2].input_layernorm.weight)
        layer.self_attn.kv_a_layernorm.weight.fill_(1.0)
    ours, theirs = layers[2].self_attn, layers[3].self_attn
    basis = torch.linalg.qr(torch.randn(rank, rank))[0]
    latent, rotary = ours.kv_a_proj_with_mqa.weight.split([rank, config.qk_rope_head_dim])
    pairs = torch.view_as_complex(rotary.T.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(0.5 + torch.rand(pairs.shape[1]), torch.rand(pairs.shape[1]) * 6.28)
    turned = torch.view_as_real(turned).flatten(-2).T
    theirs.kv_a_proj_with_mqa.weight.copy_(torch.cat((basis @ latent, turned)))
    keys, values = (ours.kv_b_proj.weight @ basis.T).unflatten(0, (heads, -1)).split([plain, config.v_head_dim], dim=1)
    theirs.kv_b_proj.weight.copy_(
        torch.cat((torch.randn(heads, plain, plain) / plain**0.5 @ keys, values), 1).flatten(0, 1)
    )
    shape = {"num_key_value_layers": 2, "key_value_group_size": 2}
    copied = convert(copy.deepcopy(teacher), **shape)
    calibrated = convert(copy.deepcopy(teacher), **shape, calibration=[tokens])
    errors = attention_error(copied, 3, tokens), attention_error(calibrated, 3, tokens)
    assert errors[1] < 0.2 * errors[0], errors


def test_batches_of_every_form_calibrate_alike(tokens: torch.Tensor) -> None:
    """A batch calibrates like its rows one by one, and packed rows like their samples apart."""

    def calibrated(batches: Any) -> torch.Tensor:
        student = convert(random_teacher(), num_key_value_layers=3, calibration=batches)
        return torch.cat([parameter.flatten() for parameter in student.swiftkv_parameters().values()])

    whole = calibrated([tokens])
    for rows in (list(tokens), tokens, (row.int() for row in tokens), tokens.split(16)):
        torch.testing.assert_close(calibrated(rows), whole, atol=1e-5, rtol=1e-4)
    positions = torch.cat((torch.arange(40), torch.arange(24))).expand(len(tokens), -1)
    packed = calibrated([{"input_ids": tokens, "position_ids": positions, "loss_mask": tokens > 0}])
    torch.testing.assert_close(packed, calibrated([tokens[:, :40], tokens[:, 40:]]), atol=1e-4, rtol=1e-3)


def test_batches_that_are_no_token_ids_are_named() -> None:
    cases: list[tuple[list[Any], str]] = [
        ([torch.tensor([[5, 300]])], r"token id 300; this model's vocabulary accepts 0\.\.257"),
        ([torch.tensor([-1, 5])], "token id -1"),
        ([torch.ones(1, 4)], "torch.float32 of shape"),
        ([torch.ones(1, 1, 4, dtype=torch.long)], r"shape \[1, 1, 4\]"),
        (["a text"], "a batch of str"),
        ([[1, 2, 3]], "a batch of list"),
        ([], "calibration got no tokens"),
    ]
    for batches, named in cases:
        with pytest.raises(InvalidInputError, match=named):
            convert(random_teacher(), num_key_value_layers=3, calibration=batches)


def test_a_model_in_memory_hands_over_its_tensors() -> None:
    teacher = random_teacher()
    student = convert(teacher, num_key_value_layers=3)
    ours, theirs = (model.model.layers[5].mlp.up_proj.weight for model in (student, teacher))
    assert ours.data_ptr() == theirs.data_ptr()


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
    source = LazyStudent.open(path, RequestedStudentShape(**shape), {}, dtype=torch.float32)
    found = {name: t.clone() for name, t in calibrate_layerwise(source, batches, workers=Workers(), **options)}
    assert all(parameter.is_meta for parameter in source.model.parameters())
    return found


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].float() - tensor.float()).norm() <= share * tensor.float().norm(), name


@pytest.mark.parametrize(
    ("name", "own_output_projection"), in_turn([*FAMILY_CONFIGS, "fbgemm"], [False, True], [*KINDS, "fbgemm"])
)
def test_layer_by_layer_from_files_as_in_memory(
    name: str, own_output_projection: bool, batches: Any, tmp_path: Path
) -> None:
    shape = SHAPE | {"own_output_projection": own_output_projection}
    shape["decode_key_value"] = "shared" if own_output_projection else "own"
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
        load_trained_tensors(student, found)
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
    source = LazyStudent.open(tmp_path, RequestedStudentShape(**SHAPE), {}, dtype=torch.float32)
    held: list[int] = []
    load_parameters = source.load_parameters

    def watched(module: torch.nn.Module, *, with_added: bool = True) -> None:
        load_parameters(module, with_added=with_added)
        held.append(sum(p.numel() for p in source.model.parameters() if not p.is_meta))

    source.load_parameters = watched  # type: ignore[method-assign]
    told: list[tuple[int, int]] = []
    list(calibrate_layerwise(source, batches, workers=Workers(), progress=lambda *counts: told.append(counts)))
    model = source.model.model
    num_layers = len(model.layers)
    assert told == [(done, num_layers) for done in range(num_layers + 1)]
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.layers)
    assert max(held) <= max(2 * layer, model.embed_tokens.weight.numel() + layer)
    with pytest.raises(InvalidInputError, match="no tokens"):
        streamed(tmp_path, [], SHAPE)
