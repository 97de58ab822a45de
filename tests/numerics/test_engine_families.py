"""The engine on every family: chunks, batches, windows, latents and expert layers give the plain forward's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, kernels, memory
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.model import convert, load_dense
from swiftkv_platform.model.packed_attention import VarlenOperator
from tests.tiny_models import FAMILY_CONFIGS, disturb, family_teacher

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=17, block_size=4, kv_cache_bytes=1 << 20)


def prompts() -> list[list[int]]:
    """Longer than the sliding windows, and shorter."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (size,), generator=generator).tolist() for size in (40, 3, 25)]


@torch.no_grad()
def check(plain: Any, output: RequestOutput) -> None:
    """Each token is the plain forward's best, within 1e-4; prompt log-probabilities, if any, are its as well."""
    text = torch.tensor([output.prompt_token_ids + output.token_ids])
    logits = plain(text, use_cache=False).logits[0, :-1]
    size = len(output.prompt_token_ids)
    behind = logits.amax(-1) - logits.gather(1, text[0, 1:, None]).squeeze(1)
    assert len(output.token_ids) == PARAMS.max_tokens
    assert behind[size - 1 :].max() < 1e-4
    expected = logits.log_softmax(-1).gather(1, text[0, 1:, None])[: size - 1, 0].tolist()
    if output.prompt_logprobs is None:
        return
    found = [next(iter(one.values())) for one in output.prompt_logprobs if one is not None]
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("operator", [None, reference_varlen_attn], ids=["runs", "block tables"])
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
@pytest.mark.parametrize("g", [2, None], ids=["student", "dense"])
def test_every_family_is_served(name: str, g: int | None, operator: VarlenOperator | None, tmp_path: Path) -> None:
    model: Any = family_teacher(name)
    if g is not None:
        model = disturb(convert(model, num_key_value_layers=2, key_value_group_size=g))
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path) if g else load_dense(tmp_path)
    with patch.object(memory, "choose_operator", return_value=operator):
        engine = LLMEngine.from_pretrained(tmp_path, CONFIG)
    for params in (PARAMS, replace(PARAMS, prompt_logprobs=None)):
        for output in engine.generate(prompts(), params):
            check(plain.eval(), output)
    engine.check()
    assert engine.num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("sharing", [1, 8])
def test_students_with_their_own_number_of_heads_are_served(sharing: int, tmp_path: Path) -> None:
    student = convert(
        family_teacher("llama"),
        num_key_value_layers=2,
        key_value_group_size=2,
        sharing={1: "mqa", 8: "mha"}[sharing],
        own_output_projection=sharing == 1,
    )
    disturb(student).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for output in LLMEngine.from_pretrained(tmp_path, CONFIG).generate(prompts(), PARAMS):
        check(plain, output)


@pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if not name.startswith("deepseek")])
@pytest.mark.parametrize("g", [2, None], ids=["student", "dense"])
def test_in_bfloat16_the_kernels_are_as_exact_as_torch(name: str, g: int | None, tmp_path: Path) -> None:
    model: Any = family_teacher(name, head_dim=32)
    if g is not None:
        model = disturb(convert(model, num_key_value_layers=2, key_value_group_size=g))
    model.to(torch.bfloat16).save_pretrained(tmp_path)

    def logprobs(**options: Any) -> torch.Tensor:
        engine = LLMEngine.from_pretrained(tmp_path, CONFIG.model_copy(update=options))
        found = [output.prompt_logprobs for output in engine.generate(prompts(), PARAMS)]
        engine.check()
        return torch.tensor([next(iter(one.values())) for some in found if some for one in some if one is not None])

    exact, native, by_torch = logprobs(dtype="float32"), logprobs(), logprobs(native_kernels=False)
    assert torch.equal(native, by_torch) != kernels.available()
    assert (native - exact).square().mean().sqrt() < 1.3 * (by_torch - exact).square().mean().sqrt()
