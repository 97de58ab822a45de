"""In bfloat16 and with an 8-bit cache, the error against float32 is that of PyTorch's own arithmetic; memory is
saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.outside.vllm.engines import VOCAB, make_student, next_logprobs, prompts, runner, serving

LENGTHS = tuple(range(20, 148, 4))


def last_logprobs(directory: Path, batch: list[list[int]], dtype: torch.dtype, **arguments: object) -> torch.Tensor:
    """Return PyTorch's log-probabilities after each prompt, [num_prompts, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **arguments)
    with torch.no_grad():
        logits = [model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1] for ids in batch]
    return torch.stack(logits).float().log_softmax(-1)


def served_logprobs(directory: Path, batch: list[list[int]], **options: object) -> torch.Tensor:
    """Return vLLM's log-probabilities after each prompt, [num_prompts, vocab_size]."""
    with serving(directory, max_logprobs=VOCAB, **options) as llm:
        return next_logprobs(llm, batch)


def rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_bfloat16(name: str, tmp_path: Path) -> None:
    make_student(tmp_path, name)
    batch = prompts(LENGTHS)
    exact = last_logprobs(tmp_path, batch, torch.float32)
    own = rms(last_logprobs(tmp_path, batch, torch.bfloat16) - exact)
    served = rms(served_logprobs(tmp_path, batch, dtype="bfloat16") - exact)
    assert 0 < served <= 1.3 * own


def test_fp8_cache(llama: Path) -> None:
    batch = prompts(LENGTHS)
    exact = last_logprobs(llama, batch, torch.float32)
    served = served_logprobs(llama, batch, kv_cache_dtype="fp8")
    spread = float((exact - exact.mean(-1, keepdim=True)).square().mean().sqrt())
    assert 0 < rms(served - exact) < 0.1 * spread


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student of 16 layers with l = 8 and g = 2: 12 KV-cache layers."""
    shape = {"num_key_value_layers": 8, "key_value_group_size": 2}
    return make_student(tmp_path_factory.mktemp("sixteen"), shape=shape, num_hidden_layers=16)


def blocks(directory: Path, **options: object) -> tuple[int, int]:
    """Return the number of KV-cache blocks, and of layers with their own cache memory."""
    with serving(directory, **options) as llm:
        layers = {cache.data_ptr() for cache in runner(llm).kv_caches}
        return runner(llm).kv_cache_config.num_blocks, len(layers)


def test_blocks_grow_by_16_to_12(sixteen: Path) -> None:
    ours, our_layers = blocks(sixteen)
    dense, dense_layers = blocks(sixteen, hf_overrides={"swiftkv": False})
    assert (our_layers, dense_layers) == (12, 16)
    assert abs(12 * ours - 16 * dense) < 16  # each count is rounded down to whole blocks
