"""Model directories of the benchmarks; students share the dense model's weight files."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swiftkv_platform.model import convert_checkpoint

MODEL_SHAPES: dict[str, dict[str, Any]] = {
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
"""Shapes of random Llamas: Llama 3.1 8B's, and one for tests."""
_SMALL_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
SMALL_SHAPES: dict[str, dict[str, Any]] = {
    "multi_head": _SMALL_SHAPE,
    "grouped": _SMALL_SHAPE | {"num_key_value_heads": 2},
    "windows": _SMALL_SHAPE | {"num_key_value_heads": 2, "model_type": "mistral", "sliding_window": 300},
}
"""Shapes of random models so small that attention splits keys (`agreement.check_small_models`)."""


def prepare_models(
    model: Path | str, directory: Path, *, dtype: torch.dtype, device: str, group_sizes: list[int]
) -> dict[str, Path]:
    """Create the dense model and its students, whose prompts skip half of the layers.

    The students are converted, not distilled: a step costs the same whatever the weights are.

    Args:
        model: a dense model's directory, or one of `MODEL_SHAPES` and `SMALL_SHAPES`, made with random weights.
        device: device on which random weights are drawn.

    Returns:
        Directories by name: `dense`, or `swiftkv_gG` for a student with groups of G layers, plus `_own` if deep tokens
        keep their own K and V.

    Raises:
        ModelError: the model's family is unknown.
    """
    dense = Path(model)
    shapes = MODEL_SHAPES | SMALL_SHAPES
    if isinstance(model, str) and model in shapes:
        dense = directory / "dense"
        _save_random(shapes[model], dense, dtype, device)
    num_layers = AutoConfig.from_pretrained(dense).num_hidden_layers
    models = {"dense": dense}
    for group_size, form in [(group_sizes[0], "own"), *((g, "shared") for g in group_sizes)]:
        name = f"swiftkv_g{group_size}{'_own' * (form == 'own')}"
        models[name] = directory / name
        convert_checkpoint(
            dense,
            models[name],
            num_key_value_layers=num_layers // 2,
            key_value_group_size=group_size,
            decode_key_value=form,
        )
    return models


def _save_random(shape: dict[str, Any], directory: Path, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama"} | shape))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(directory)


def release_memory() -> None:
    """Free unused device memory of this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
