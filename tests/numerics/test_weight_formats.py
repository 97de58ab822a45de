"""Students with integer weights: the values that a file decodes to, whole, in parts, and in every family's layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.export import Quantization
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.loading import StoredWeights
from swiftkv_platform.model.weights.quantization import WeightFormat, pack_int4, quantize_weight, unpack_int32
from tests.support.checkpoints import ROWS, rewrite, save, save_fp8
from tests.support.tiny_models import family_teacher, random_teacher, random_tokens

STUDENT: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True}
OWN: dict[str, Any] = {"decode_key_value": "own"}
ERROR = {"int8": 0.02, "int4": 0.13}
"""RMS error of random weights, relative to their own RMS."""


@pytest.mark.parametrize("form", ERROR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_are_near_and_clip_where_that_is_nearer(form: WeightFormat, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0] = 0
    weight[1, 3] = 6.0 if form == "int4" else weight[1, 3]
    group = 128 if form == "int4" else None
    integers, scale = quantize_weight(weight, form, group)
    assert (scale.dtype, scale.shape) == (dtype, (24, 2 if group else 1))
    back = integers * scale.float().repeat_interleave(group or 256, 1)
    assert (back - weight.float()).norm() < ERROR[form] * weight.float().norm()
    assert not back[0].any()
    top = {"int8": 127.0, "int4": 7.5}[form]
    plain = (weight.float().unflatten(1, (-1, group or 256)).abs().amax(-1) / top).clamp(min=1e-9)
    plain = plain.repeat_interleave(group or 256, 1)
    rounded = (weight.float() / plain).round().clamp(-top - 0.5, top) * plain
    error, without = (back - weight.float()).norm(), (rounded - weight.float()).norm()
    assert error < without if group else error <= 1.01 * without, "the search for a clip did not help"
    if group:
        assert torch.equal(unpack_int32(pack_int4(integers), 4), integers)


@pytest.mark.parametrize(
    ("family", "form", "in_memory"),
    [
        ("llama", "int8", False),
        ("qwen2", "int4", True),
        ("mixtral", "mixed", False),
        ("deepseek_v2", "int8", True),
        ("deepseek_v2-lora", "mixed", False),
        ("olmo2", "int8", False),
        ("phi3", "mixed", False),
    ],
)
def test_a_quantized_student_is_what_its_files_say(
    family: str, form: Quantization, in_memory: bool, prompt: torch.Tensor, tmp_path: Path
) -> None:
    student = convert(family_teacher(family), **STUDENT).to(torch.bfloat16)
    source = student if in_memory else save(student, tmp_path / "student", max_shard_size="100KB")
    export(source, tmp_path / "served", quantize=form)
    (file,) = (tmp_path / "served").glob("*.safetensors")
    stored = load_file(file)
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "exit_head"} <= set(config["ignore"])
    targets = [group["targets"] for group in config["config_groups"].values()]
    in_mixed = rf"re:.*self_attn\.(?!o_proj)\w+|.*layers\.({student.config.num_hidden_layers - 1})\.mlp\.\w+_proj$"
    assert targets == [[in_mixed], ["Linear"]][form != "mixed" :]
    in_int8 = {name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype == torch.int8}
    quantized = {name.removesuffix(".weight_scale") for name in stored if name.endswith("_scale")}
    assert any("q_proj_swiftkv" in name or "q_b_proj_swiftkv" in name for name in quantized)
    assert quantized.isdisjoint(config["ignore"])
    makes_heads = {name for name in quantized if "self_attn" in name and "o_proj" not in name}
    last = f"layers.{student.config.num_hidden_layers - 1}.mlp."
    last_mlp = {name for name in quantized if last in name and "expert" not in name}
    assert in_int8 == {"int8": quantized, "int4": set(), "mixed": makes_heads | last_mlp}[form]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    assert not hasattr(model.config, "quantization_config")
    weights = StoredWeights(Checkpoint.open(tmp_path / "served"), read_config(tmp_path / "served"))
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name).to(parameter.dtype), parameter), name
    assert (
        torch.nn.functional.cosine_similarity(
            model(prompt[None]).logits.float().flatten(), student(prompt[None]).logits.float().flatten(), 0
        )
        > {"int8": 0.999, "int4": 0.9, "mixed": 0.9}[form]
    )
    name = next(name for name in sorted(quantized) if "experts" not in name) + ".weight"
    part = (slice(3, 20), slice(5, 27))  # not at a boundary of packed words
    whole = weights.read(name)
    assert torch.equal(weights.read(name, part), whole[part])
    with pytest.raises(ModelError, match="to integers already"):
        export(tmp_path / "served", tmp_path / "again", quantize=form)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("form", ERROR)
def test_the_engine_reads_the_floats_that_pytorch_reads(
    form: WeightFormat, prompt: torch.Tensor, tmp_path: Path
) -> None:
    export(convert(random_teacher(), **STUDENT), tmp_path / "served", quantize=form)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    expected = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=8, do_sample=False
    )
    engine = LLMEngine.from_pretrained(tmp_path / "served", EngineConfig(dtype="float32"))
    (output,) = engine.generate([prompt.tolist()], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert list(output.token_ids) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "form", "shape"),
    [
        ("llama", "int4", OWN | {"key_value_group_size": 2}),
        ("qwen2", "mixed", {"key_value_group_size": 3, "own_output_projection": True}),
        ("deepseek_v2", "int8", OWN | {"key_value_group_size": 3}),
        ("mixtral", "int4", {}),
        ("olmo3", "int4", OWN | {"key_value_group_size": 2}),
        ("phi3-partial", "int8", {"key_value_group_size": 2}),
    ],
)
def test_rounding_by_text_is_nearer_to_the_float_student(
    family: str, form: Quantization, shape: dict[str, Any], tmp_path: Path
) -> None:
    """Rounding uses each projection's inputs, gives other integers than rounding to nearest, and keeps the format."""
    student = convert(family_teacher(family), num_key_value_layers=2, **shape)
    text = random_tokens(9, 96) % 24
    batches = [{"input_ids": rows, "loss_mask": torch.arange(96).expand_as(rows) >= 32} for rows in text[:8].split(4)]
    batches.append({"input_ids": random_tokens(1, 96) % 24})
    export(save(student, tmp_path / "student"), tmp_path / "nearest", quantize=form, teacher=True)
    export(tmp_path / "student", tmp_path / "calibrated", quantize=form, teacher=True, calibration=batches)
    nearest, calibrated = (
        {name: t for file in (tmp_path / each).glob("*.safetensors") for name, t in load_file(file).items()}
        for each in ("nearest", "calibrated")
    )
    assert {name: t.shape for name, t in nearest.items()} == {name: t.shape for name, t in calibrated.items()}
    integers = {name for name, t in nearest.items() if t.dtype in (torch.int8, torch.int32)}
    changed = {name for name in integers if not torch.equal(nearest[name], calibrated[name])}
    only_teacher = tuple(f"{module}." for module in student.list_teacher_modules(student.config))
    assert changed == {name for name in integers if not name.startswith(only_teacher) and ".experts." not in name}

    def error(directory: str) -> float:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        first = {"first_deep": 32} if student.config.layer_map.deep_leaders else {}
        logits, expected = (m(text[8:], **first).logits[:, 32:].log_softmax(-1) for m in (model, student))
        return float((expected.exp() * (expected - logits)).sum(-1).mean())

    assert error("calibrated") < 0.9 * error("nearest")


def test_calibration_says_what_it_lacks(tmp_path: Path) -> None:
    student = convert(random_teacher(), **STUDENT)
    with pytest.raises(ModelError, match="calibration needs quantize"):
        export(student, tmp_path / "served", calibration=[random_tokens(8)])
    with pytest.raises(InvalidInputError, match="calibration got no tokens"):
        export(student, tmp_path / "served", quantize="int4", calibration=[])
    assert not (tmp_path / "served").exists()


def test_a_projection_whose_inputs_make_no_group_stays_as_it_is_and_is_named(tmp_path: Path) -> None:
    teacher = random_teacher(intermediate_size=100)
    export(convert(teacher, **STUDENT), tmp_path / "served", quantize="int4")
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert "model.layers.4.mlp.down_proj" in config["ignore"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    AutoModelForCausalLM.from_pretrained(tmp_path / "served")


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("int8", lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale"), "has no .*up_proj.weight_scale"),
        ("int4", lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale"), "has no .*up_proj.weight_scale"),
        ("int4", lambda t: t.pop("model.layers.0.mlp.up_proj.weight_shape"), "has no .*up_proj.weight_shape"),
        ("int4", lambda t: t["model.layers.0.mlp.up_proj.weight_shape"].fill_(7), "does not hold .7, 7. integers"),
        ("int4", lambda t: t.pop("model.layers.0.mlp.up_proj.weight_packed"), "up_proj"),
    ],
)
def test_damaged_files_are_refused(form: WeightFormat, change: Any, message: str, tmp_path: Path) -> None:
    export(convert(random_teacher(), **STUDENT), tmp_path, quantize=form)
    (file,) = tmp_path.glob("*.safetensors")
    file.rename(tmp_path / "model.safetensors")
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


UP = "model.layers.0.mlp.up_proj.weight"


def index_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the group of each column of `UP`."""
    size, groups = int(tensors[f"{UP}_shape"][1]), tensors[f"{UP}_scale"].shape[1]
    return torch.arange(size, dtype=torch.int32) // (size // groups)


def packed_points(tensors: dict[str, torch.Tensor], point: int) -> torch.Tensor:
    """Return equal zero points, packed along the rows as compressed-tensors does, with words of 0 as padding."""
    rows, groups = int(tensors[f"{UP}_shape"][0]), tensors[f"{UP}_scale"].shape[1]
    points = torch.full((groups, -(-rows // 8) * 8), -8, dtype=torch.int8)
    points[:, :rows] = point
    return pack_int4(points).t().contiguous()


@pytest.mark.parametrize(
    ("form", "suffix", "make", "message"),
    [
        ("int8", "_zero_point", lambda t: torch.zeros_like(t[UP + "_scale"], dtype=torch.int8), None),
        ("int8", "_zero_point", lambda t: torch.zeros(1), None),
        ("int8", "_zero_point", lambda t: torch.zeros_like(t[UP + "_scale"]).index_fill_(0, torch.tensor(3), 1), "up_"),
        ("int4", "_zero_point", lambda t: torch.zeros_like(t[UP + "_scale"], dtype=torch.int32), None),
        ("int4", "_zero_point", lambda t: packed_points(t, 0), None),
        ("int4", "_zero_point", lambda t: packed_points(t, 1), "has zero points other than 0; use symmetric weights"),
        ("int4", "_g_idx", index_of, None),
        ("int4", "_g_idx", lambda t: torch.full_like(index_of(t), -1), None),
        ("int4", "_g_idx", lambda t: index_of(t).flip(0), "reorders columns; quantize with actorder null or 'static'"),
        ("int8", "_g_idx", lambda t: torch.zeros(t[UP].shape[1], dtype=torch.int64), None),
    ],
)
def test_parameters_that_change_nothing_are_accepted_and_others_refused(
    form: WeightFormat, suffix: str, make: Any, message: str | None, tmp_path: Path
) -> None:
    export(convert(random_teacher(hidden_size=128), **STUDENT), tmp_path, quantize=form)
    (file,) = tmp_path.glob("*.safetensors")
    file.rename(tmp_path / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    rewrite(tmp_path, lambda tensors: tensors.update({f"{UP}{suffix}": make(tensors)}))
    if message is not None:
        for load in (AutoModelForCausalLM.from_pretrained, LLMEngine.from_pretrained):
            with pytest.raises(ModelError, match=message):
                load(tmp_path)
        return
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_students_of_fp8_teachers_are_exported_too(tmp_path: Path) -> None:
    save_fp8(tmp_path / "teacher", ROWS)
    convert_checkpoint(tmp_path / "teacher", tmp_path / "student", num_key_value_layers=2)
    export(tmp_path / "student", tmp_path / "served", quantize="int8")
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "served", output_loading_info=True)
    assert not any(report.values())
