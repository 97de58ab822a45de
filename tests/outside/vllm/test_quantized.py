"""Quantised students are as close to their float versions as vLLM's dense class is to its own, in every layout.

vLLM's CPU build has kernels for int8 and 4 bits. Its FP8 kernels are for GPUs, so FP8 weights run here with a small
kernel, which shows that each scale is applied to its weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization import fbgemm_fp8, fp8
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8
from vllm.model_executor.layers.quantization.online import fp8 as online_fp8

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import export
from swiftkv_platform.model.export import Quantization
from swiftkv_platform.model.weights.quantization import exclude_swiftkv_modules
from tests.outside.vllm.engines import (
    OWN,
    SHAPE,
    VOCAB,
    complete,
    make_student,
    next_logprobs,
    prompts,
    recorded_sizes,
    serving,
)
from tests.outside.vllm.quantize import FORMATS, quantize
from tests.outside.vllm.test_compiled import COMPILED, halves_are_compiled
from tests.outside.vllm.test_precision import LENGTHS, last_logprobs, rms
from tests.support.tiny_models import family_teacher

WIDE = {"head_dim": 32}
"""A head size that vLLM's own classes support on CPUs."""
BATCH = prompts(LENGTHS)
OPTIONS = {"dtype": "bfloat16", "max_logprobs": VOCAB, "allow_deprecated_quantization": True}
"""fbgemm_fp8 is deprecated in vLLM, and must be allowed."""


def error(logprobs: torch.Tensor, directory: Path, **arguments: Any) -> float:
    """Return the RMS distance from PyTorch's float32 log-probabilities, relative to their spread."""
    exact = last_logprobs(directory, BATCH, torch.float32, **arguments)
    return rms(logprobs - exact) / rms(exact - exact.mean(-1, keepdim=True))


def rounding(directory: Path) -> float:
    """Return 1.7 times the error of PyTorch in bfloat16: with AMX vLLM also rounds 4-bit weights to bfloat16."""
    return 1.7 * error(last_logprobs(directory, BATCH, torch.bfloat16), directory)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """Function that measures the error of vLLM's own Llama class in a layout."""
    known: dict[str, float] = {}

    def measure(layout: str) -> float:
        if layout not in known:
            directory = tmp_path_factory.mktemp("dense")
            family_teacher("llama", **WIDE).save_pretrained(directory / "float")
            quantized, _ = quantize(directory / "float", directory / "quantized", layout)
            with serving(quantized, **OPTIONS) as llm:
                known[layout] = error(next_logprobs(llm, BATCH), directory / "float")
        return known[layout]

    return measure


@pytest.fixture(params=["shared", "own"])
def wide(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A student, with shared K and V or with deep tokens that keep their own."""
    return make_student(tmp_path / "float", shape=SHAPE if request.param == "shared" else OWN, **WIDE)


@pytest.mark.parametrize("layout", ["int8", "int4"])
def test_logits_are_as_near_as_a_dense_models(
    layout: str, wide: Path, dense: Callable[[str], float], tmp_path: Path
) -> None:
    quantized, meant = quantize(wide, tmp_path / "quantized", layout)
    with serving(quantized, **OPTIONS) as llm:
        logprobs = next_logprobs(llm, BATCH)
        with recorded_sizes(llm) as sizes:
            text = complete(llm, BATCH[:3])
    assert 0 < error(logprobs, wide) <= 1.2 * dense(layout)
    assert error(logprobs, meant) < (rounding(meant) if layout == "int4" else 1.2 * dense(layout))
    assert sizes[0] == (sum(map(len, BATCH[:3])), 3), "only a prompt's last token enters the upper half"
    with serving(quantized, **OPTIONS | COMPILED) as llm:
        assert halves_are_compiled(llm)
        alike = [one == other for one, other in zip(complete(llm, BATCH[:3]), text, strict=True)]
        assert sum(alike) >= 2, "in bfloat16 one answer may differ at a near tie"


@pytest.mark.parametrize("layout", ["int8", "int4", "mixed"])
def test_what_export_writes(layout: Quantization, wide: Path, dense: Callable[[str], float], tmp_path: Path) -> None:
    """vLLM reads the integers that PyTorch reads as floats."""
    calibration = None if layout == "int8" else [torch.tensor(BATCH[0])]
    exported = export(wide, tmp_path / "exported", quantize=layout, calibration=calibration)
    with serving(exported, **OPTIONS) as llm:
        logprobs = next_logprobs(llm, BATCH)
    assert error(logprobs, exported) < (rounding(exported) if layout == "int4" else 1.2 * dense("int8"))


def test_four_bits_in_the_layouts_of_others(tmp_path: Path) -> None:
    student = make_student(tmp_path / "float", shape=OWN | {"own_output_projection": True}, **WIDE)
    for layout in ("gptq", "awq"):
        quantized, meant = quantize(student, tmp_path / layout, layout)
        with serving(quantized, **OPTIONS) as llm:
            assert error(next_logprobs(llm, BATCH), meant) < rounding(meant)


def test_teacher_mode_beside_projections_that_are_not_quantised(dense: Callable[[str], float], tmp_path: Path) -> None:
    """The teacher's weights are quantised, and the student's own projections are not."""
    student = make_student(tmp_path / "float", **WIDE)
    fields = FORMATS["int8"][1] | {"quant_method": "compressed-tensors"}
    quantized, meant = quantize(
        student,
        tmp_path / "quantized",
        "int8",
        lambda name: name.endswith("_swiftkv"),
        **exclude_swiftkv_modules(fields),
    )
    with serving(quantized, **OPTIONS) as llm:
        assert error(next_logprobs(llm, BATCH), meant) <= 1.2 * dense("int8")
    with serving(quantized, **OPTIONS, hf_overrides={"swiftkv": False}) as llm:
        assert error(next_logprobs(llm, BATCH), student, swiftkv=False) == pytest.approx(dense("int8"), rel=1e-3)


class PlainKernel:
    """Multiplies by FP8 weights times their scales, in float32."""

    def __init__(self, **_: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        block, weight = getattr(layer, "weight_block_size", None), layer.weight.float()
        if block:
            scales = layer.weight_scale_inv.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            weight = weight * scales[: weight.shape[0], : weight.shape[1]]
        else:
            weight = (weight * layer.weight_scale.flatten()).t()
        return F.linear(x.float(), weight).to(x.dtype) if bias is None else F.linear(x, weight.to(x.dtype), bias)


@pytest.fixture
def fp8_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fp8, fbgemm_fp8, compressed_tensors_w8a8_fp8, online_fp8):
        monkeypatch.setattr(module, "init_fp8_linear_kernel", PlainKernel)
    monkeypatch.setattr(compressed_tensors_w8a8_fp8, "expose_input_quant_key", lambda *_: None)
    monkeypatch.setattr(fbgemm_fp8, "prepare_fp8_layer_for_marlin", lambda _: None)
    monkeypatch.setattr(
        ops, "scaled_fp8_quant", lambda x, scale, **_: ((x.float() / scale).to(torch.float8_e4m3fn), scale)
    )


@pytest.mark.parametrize(
    ("layout", "shape", "kept"),
    [("fp8-rows", OWN, False), ("fp8-blocks", SHAPE, True), ("fp8", SHAPE, False), ("fbgemm", SHAPE, True)],
)
def test_fp8_scales_meet_their_weights(
    layout: str, shape: dict[str, Any], kept: bool, tmp_path: Path, fp8_kernel: None
) -> None:
    """`kept`: the student as `convert` writes it from an FP8 teacher, its own projections unquantised and listed by
    name suffix."""
    student = make_student(tmp_path / "float", shape=shape, **WIDE)
    fields = exclude_swiftkv_modules(FORMATS[layout][1]) if kept else {}
    quantized, meant = quantize(
        student, tmp_path / "quantized", layout, lambda name: kept and name.endswith("_swiftkv"), **fields
    )
    with serving(quantized, **OPTIONS) as llm:
        # With one scale per tensor, vLLM gives a fused projection the largest scale and rounds again.
        assert error(next_logprobs(llm, BATCH), meant) < (0.1 if layout == "fp8" else rounding(meant))


def test_fp8_while_loading(tmp_path: Path, fp8_kernel: None) -> None:
    student = make_student(tmp_path / "float", shape=OWN, **WIDE)
    with serving(student, **OPTIONS, quantization="fp8") as llm:
        assert rounding(student) < error(next_logprobs(llm, BATCH), student) < 0.1


@pytest.mark.parametrize("layout", ["fp8-rows", "fbgemm"])
def test_fp8_copies_of_the_references_checkpoints(
    layout: str, golden: tuple[Path, Path], tmp_path: Path, fp8_kernel: None
) -> None:
    """The reference's tensor names and config.json, in the layouts of published FP8 checkpoints of Llama 3.1."""
    quantized, meant = quantize(golden[0], tmp_path / "quantized", layout)
    with serving(quantized, **OPTIONS) as llm:
        assert error(next_logprobs(llm, BATCH, 256), meant) < rounding(meant)


def test_a_scale_that_is_not_there(tmp_path: Path) -> None:
    quantized, _ = quantize(make_student(tmp_path / "float", **WIDE), tmp_path / "quantized", "int8")
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.4.self_attn.v_proj_swiftkv.weight_scale"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    lacks = pytest.raises(ModelError, match=r"lacks 1 .*layers\.4\.self_attn\.v_proj_swiftkv\.weight_scale")
    with lacks, serving(quantized, **OPTIONS):
        pass


def test_a_block_that_two_groups_share(tmp_path: Path, fp8_kernel: None) -> None:
    quantized, _ = quantize(make_student(tmp_path / "float", **WIDE), tmp_path / "quantized", "fp8-blocks")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"a rank has 64 rows .* blocks of 128 rows"), serving(quantized, **OPTIONS):
        pass
