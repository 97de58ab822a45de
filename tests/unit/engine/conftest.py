"""Tiny random models on disk: a dense Llama, its SwiftKV student, and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swiftkv_platform.engine import LLMEngine
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


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    directory = tmp_path_factory.mktemp("dense")
    make_model().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def swiftkv_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    directory = tmp_path_factory.mktemp("swiftkv")
    convert(make_model(), num_key_value_layers=2, key_value_group_size=2).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def bare_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    directory = tmp_path_factory.mktemp("bare")
    make_model().save_pretrained(directory)
    return directory


@pytest.fixture(params=["dense", "swiftkv"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    directory: Path = request.getfixturevalue(f"{request.param}_dir")
    return directory


@pytest.fixture
def engine(model_dir: Path) -> LLMEngine:
    return LLMEngine.from_pretrained(model_dir)


@pytest.fixture
def dense_engine(dense_dir: Path) -> LLMEngine:
    return LLMEngine.from_pretrained(dense_dir)


Reference = Callable[[Path, list[int], int], list[int]]


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What transformers' own greedy `generate()` answers, the end of sequence ignored."""

    def generate(directory: Path, prompt: list[int], max_tokens: int) -> list[int]:
        model: Any = AutoModelForCausalLM.from_pretrained(directory)
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[int] = generated[0, len(prompt) :].tolist()
        return tokens

    return generate
