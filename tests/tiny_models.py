"""Random teachers small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes.tokenizers import byte_tokenizer


def teacher_config(**overrides: Any) -> LlamaConfig:
    values = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return LlamaConfig(**(values | overrides))


def random_teacher(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A float32 Llama whose weights and biases are all drawn from a wide normal, so that every layer matters."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(teacher_config(**overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_teacher(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    random_teacher(seed, **overrides).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
