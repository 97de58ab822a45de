"""Checkpoints of tiny models, written and changed for tests of conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.fakes.tokenizers import byte_tokenizer

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2}  # of 5 layers: the last group is short


def save(model: PreTrainedModel, directory: Path, **arguments: Any) -> Path:
    model.save_pretrained(directory, **arguments)
    byte_tokenizer().save_pretrained(directory)
    return directory


def rewrite(directory: Path, change: Any) -> None:
    """Write a directory's tensors again as `change` leaves them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
