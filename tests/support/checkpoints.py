"""Checkpoints of tiny models, written and changed by tests of conversion."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import random_teacher

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2}  # with 5 layers the last group is short

ROWS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def save(model: PreTrainedModel, directory: Path, **arguments: Any) -> Path:
    model.save_pretrained(directory, **arguments)
    byte_tokenizer().save_pretrained(directory)
    return directory


def rewrite(directory: Path, change: Any) -> None:
    """Rewrite a directory's tensors as `change` modifies them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def save_fp8(
    directory: Path, quantization: dict[str, Any], model: PreTrainedModel | None = None
) -> dict[str, torch.Tensor]:
    """Write a teacher whose linear layers are FP8 in the given format; return the decoded weights."""
    model = (random_teacher() if model is None else model).to(torch.bfloat16)
    model.save_pretrained(directory)
    tensors, exact = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        if quantization is ROWS:
            scale = weight.abs().amax(1, keepdim=True) / 448
            whole, stored = scale, f"{name}_scale"
        elif quantization is TENSORS:
            scale = whole = (weight.abs().max() / 448).reshape(1)
            stored = f"{name}_scale"
        else:
            scale = (
                weight.unflatten(0, (-1, 32 if len(weight) % 32 == 0 else 16)).unflatten(2, (-1, 32)).abs().amax((1, 3))
                / 448
            )
            block = len(weight) // len(scale)
            whole, stored = scale.repeat_interleave(block, 0).repeat_interleave(32, 1), f"{name}_scale_inv"
        quantized = (weight / whole).to(torch.float8_e4m3fn)
        exact[name] = (quantized.float() * whole).to(torch.bfloat16)
        tensors |= {name: quantized, stored: scale}
        if quantization is TENSORS:
            tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return exact
