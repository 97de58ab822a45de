"""Tiny models and engines on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from swiftkv_platform.engine import LLMEngine
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.unit.engine.tiny_models import make_model, save_dense, save_swiftkv


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def swiftkv_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


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
    """Function that answers by transformers' own greedy `generate()`, ignoring the end of sequence."""

    def generate(directory: Path, prompt: list[int], max_tokens: int) -> list[int]:
        model: Any = AutoModelForCausalLM.from_pretrained(directory)
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[int] = generated[0, len(prompt) :].tolist()
        return tokens

    return generate
