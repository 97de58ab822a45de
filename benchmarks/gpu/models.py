"""Dense model of the run and its students, as directories that share the dense model's weight files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from swiftkv_platform.model import convert_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
}
"""Shapes of random models: Llama 3.1 8B's, and one for a test."""


@dataclass(frozen=True)
class Model:
    """A model under test."""

    name: str
    """`dense`, or `swiftkv_gG` of a student with groups of G layers."""
    directory: Path


def prepare(
    model: Path | str, directory: Path, *, dtype: torch.dtype, device: str, group_sizes: list[int]
) -> list[Model]:
    """The dense model and its students, half of whose layers compute no KV of their own.

    The students are converted, not distilled: a step costs the same whatever the weights are.

    Args:
        model: a dense model's directory, or one of `SHAPES`, which is made with random weights.
        device: where random weights are drawn.

    Raises:
        ModelError: the model's family is not known.
    """
    dense = Path(model)
    if isinstance(model, str) and model in SHAPES:
        dense = directory / "dense"
        _save_random(SHAPES[model], dense, dtype, device)
    num_layers = AutoConfig.from_pretrained(dense).num_hidden_layers
    models = [Model("dense", dense)]
    for group_size in group_sizes:
        student = Model(f"swiftkv_g{group_size}", directory / f"swiftkv_g{group_size}")
        convert_checkpoint(
            dense, student.directory, num_key_value_layers=num_layers // 2, key_value_group_size=group_size
        )
        models.append(student)
    return models


def _save_random(shape: dict[str, Any], directory: Path, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**shape))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(directory)
