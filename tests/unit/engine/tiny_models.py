"""Tiny random models on disk: a dense Llama, its SwiftKV student, and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swiftkv_platform.model import convert

BOS, EOS = 256, 257
CONTEXT = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


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


def save_dense(directory: Path) -> Path:
    """The Llama and its tokenizer."""
    make_model().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def save_swiftkv(directory: Path, context: int = CONTEXT) -> Path:
    """Its student, layers 2 and 3 sharing one KV, and the tokenizer."""
    convert(make_model(context), num_key_value_layers=2, key_value_group_size=2).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
