"""Tiny random models on disk: a dense Llama and its SwiftKV student."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftkv_platform.model import convert
from tests.support.fakes.tokenizers import BOS, EOS, byte_tokenizer

CONTEXT = 64


def make_model(context: int = CONTEXT) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def save_dense(directory: Path, context: int = CONTEXT) -> Path:
    """The Llama and its tokenizer."""
    make_model(context).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_swiftkv(directory: Path, context: int = CONTEXT) -> Path:
    """Its student, layers 2 and 3 sharing one KV, and the tokenizer."""
    convert(make_model(context), num_key_value_layers=2, key_value_group_size=2).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
