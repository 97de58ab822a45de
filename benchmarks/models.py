"""The random models that benchmarks run on, and the arguments that shape them."""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def add_shape(
    parser: argparse.ArgumentParser,
    *,
    layers: int = 16,
    hidden_size: int = 1024,
    intermediate_size: int = 2816,
    heads: int = 16,
    kv_heads: int = 8,
    vocab_size: int = 8192,
) -> None:
    """`--layers`, `--hidden-size` and so on, with these defaults."""
    for name, default in list(locals().items())[1:]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def random_llama(args: argparse.Namespace, max_position_embeddings: int) -> LlamaForCausalLM:
    """A float32 Llama of that shape, the same every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=max_position_embeddings,
    )
    return LlamaForCausalLM(config).eval()
