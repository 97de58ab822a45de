"""In bfloat16 and with an 8-bit cache: as far from the float32 model as PyTorch's own arithmetic, not further."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests.outside.vllm.engines import prompts, serving
from tests.outside.vllm.students import make_student

LENGTHS = tuple(range(20, 148, 4))
VOCAB = 258


def last_logprobs(directory: Path, batch: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Log-probabilities after each prompt [num_prompts, vocab_size] by PyTorch."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.no_grad():
        logits = [model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1] for ids in batch]
    return torch.stack(logits).float().log_softmax(-1)


def served_logprobs(directory: Path, batch: list[list[int]], **options: object) -> torch.Tensor:
    """The same by vLLM."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=VOCAB)
    with serving(directory, max_logprobs=VOCAB, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    rows = [output.outputs[0].logprobs[0] for output in outputs]
    return torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])


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
