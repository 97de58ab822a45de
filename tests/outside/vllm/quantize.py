"""Quantised copies of tiny models in the layouts of published checkpoints, written in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
"""Columns of a weight that share a scale in 4 bits; rows and columns of a block in FP8."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Quantized = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The checkpoint's tensors by kind, and the weight that they decode to."""


def _pack(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight numbers from 0 to 15 into an int32, along `dim`."""
    by_eight = values.unflatten(dim, (-1, 8)).index_select(dim + 1, torch.tensor(order)).long()
    shifts = torch.arange(0, 32, 4).view([-1 if at == dim + 1 else 1 for at in range(by_eight.ndim)])
    packed = (by_eight << shifts).sum(dim + 1)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def int8(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round()
    return {"weight": rounded.to(torch.int8), "weight_scale": scale}, rounded * scale


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers from 0 to 15 (8 is zero) [out, in], scales [out, in / GROUP], and the decoded weight."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scale = (grouped.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    rounded = (grouped / scale).round().clamp(-8, 7)
    return rounded.add(8).flatten(1).int(), scale.squeeze(-1).bfloat16(), (rounded * scale).flatten(1)


def int4(weight: torch.Tensor) -> Quantized:
    values, scale, meant = _four_bits(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _pack(values, 1), "weight_scale": scale, "weight_shape": shape}, meant


def gptq(weight: torch.Tensor) -> Quantized:
    values, scale, meant = _four_bits(weight)
    zeros = torch.full((scale.shape[1], len(scale)), 7)
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    packed = {"qweight": _pack(values.t(), 0), "qzeros": _pack(zeros, 1)}
    return packed | {"scales": scale.t(), "g_idx": order}, meant


def awq(weight: torch.Tensor) -> Quantized:
    values, scale, meant = _four_bits(weight)
    zeros = torch.full((scale.shape[1], len(scale)), 8)
    return {
        "qweight": _pack(values.t(), 1, AWQ_ORDER),
        "qzeros": _pack(zeros, 1, AWQ_ORDER),
        "scales": scale.t(),
    }, meant


def fp8_whole(weight: torch.Tensor) -> Quantized:
    scale = (weight.abs().amax() / 448).reshape(1)
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def fp8_rows(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": rounded, "weight_scale": scale}, rounded.float() * scale


def fp8_blocks(weight: torch.Tensor) -> Quantized:
    blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    rounded = (blocks / scale).to(torch.float8_e4m3fn)
    meant = (rounded.float() * scale).flatten(0, 1).flatten(1)
    return {"weight": rounded.flatten(0, 1).flatten(1), "weight_scale_inv": scale[:, 0, :, 0]}, meant


def _compressed(form: str, kind: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    weights |= {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if bits == 8 else None}
    method = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return method | {"config_groups": {"group_0": group}, "ignore": ["lm_head", "exit_head"]}


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Quantized], dict[str, Any]]] = {
    "int8": (int8, _compressed("int-quantized", "int", 8, "channel")),
    "int4": (int4, _compressed("pack-quantized", "int", 4, "group", group_size=GROUP)),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8-rows": (fp8_rows, _compressed("float-quantized", "float", 8, "channel")),
    "fp8": (fp8_whole, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fbgemm": (
        fp8_rows,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8-blocks": (
        fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
    ),
}


def quantize(
    source: Path, target: Path, name: str, spares: Callable[[str], bool] = lambda _: False, **fields: Any
) -> tuple[Path, Path]:
    """Write a copy of a model with quantised projections, and one with the weights that they decode to. Projections in
    `spares` stay as they are; `fields` of `quantization_config` list them."""
    apply, method = FORMATS[name]
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    meant = dict(tensors)
    for weight in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
        module = weight.removesuffix(".weight")
        if not spares(module):
            parts, meant[weight] = apply(tensors.pop(weight).float())
            tensors |= {f"{module}.{kind}": part.contiguous() for kind, part in parts.items()}
    exact = target.with_name(f"{target.name}-meant")
    quantized = config | {"quantization_config": method | fields}
    for directory, state, values in ((target, tensors, quantized), (exact, meant, config)):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(values))
        save_file(
            {name: t.contiguous() for name, t in state.items()}, directory / "model.safetensors", {"format": "pt"}
        )
    return target, exact
