"""LongRoPE: rotary factors for short sequences and others for long ones, in batches of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.errors import ModelError

ORIGINAL, EXTENDED = 32, 128
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL,
        "factor": EXTENDED / ORIGINAL,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    }
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=EXTENDED,
        initializer_range=0.4,
        rope_parameters=rope,
    )
    path = tmp_path_factory.mktemp("longrope")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def scores(engine: LLMEngine, prompts: list[list[int]]) -> list[float]:
    """Log-probabilities of the first prompt's tokens, answered beside the others."""
    found = engine.generate(prompts, GREEDY)[0].prompt_logprobs
    assert found is not None
    return [next(iter(one.values())) for one in found if one is not None]


def test_an_answer_does_not_depend_on_the_lengths_of_other_requests(directory: Path) -> None:
    engine = LLMEngine.from_pretrained(directory, EngineConfig(max_model_len=ORIGINAL, enable_prefix_caching=False))
    short, long = list(range(20)), list(range(100, 130))
    assert scores(engine, [short, long]) == pytest.approx(scores(engine, [short]), abs=1e-4)


def test_lengths_at_which_the_factors_would_change_are_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match=f"max_model_len is {EXTENDED}.*{ORIGINAL}") as error:
        LLMEngine.from_pretrained(directory, EngineConfig())
    assert error.value.field == "max_model_len"
    with pytest.raises(ModelError, match=f"max_model_len is {ORIGINAL + 1}"):
        LLMEngine.from_pretrained(directory, EngineConfig(max_model_len=ORIGINAL + 1))
    assert LLMEngine.from_pretrained(directory, EngineConfig(max_model_len=ORIGINAL)).max_model_len == ORIGINAL


def test_within_the_original_length_it_is_the_plain_forward(directory: Path) -> None:
    engine = LLMEngine.from_pretrained(directory, EngineConfig(max_model_len=ORIGINAL, max_num_batched_tokens=7))
    prompt = list(range(30))
    plain: Any = LlamaForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        wanted = plain(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1]
    expected = wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert scores(engine, [prompt]) == pytest.approx(expected, abs=1e-3)
