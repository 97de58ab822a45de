"""The engine on a GPU: plain operators give the reference's tokens in float32; FlashAttention agrees in bfloat16."""

import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu.agreement import compare_with_pytorch, convert_outputs, generate_greedily
from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.varlen import FLASH_BLOCK_MULTIPLE, reference_varlen_attn
from swiftkv_platform.model import convert
from tests.outside.gpu.device import DEVICE, ON_GPU, needs_gpu
from tests.support.engine_schedules import (
    ServedModel,
    check_outputs,
    count_events,
    make_drafts_free,
    make_random_arrivals,
    make_random_config,
    randomize_exit_head,
    run_schedule,
)
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher, random_teacher, random_tokens

pytestmark = needs_gpu
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "shared": {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True},
    "own": {"num_key_value_layers": 2, "early_exit": True, "decode_key_value": "own"},
    "own-g2": {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True, "decode_key_value": "own"},
}
PROMPTS = [random_tokens(size, seed=size).tolist() for size in (240, 250, 245, 700, 1, 3)]
"""Some of the prompts grow into another block of `FLASH_BLOCK_MULTIPLE` tokens."""


@pytest.mark.parametrize("form", FORMS)
def test_random_schedules_give_the_tokens_of_the_plain_forward(form: str, tmp_path: Path) -> None:
    model: Any = random_teacher(seed=1)
    if FORMS[form]:
        model = randomize_exit_head(convert(model, **FORMS[form]))
    model.save_pretrained(tmp_path)
    subject, seen = ServedModel.load(tmp_path), Counter[str]()
    assert subject.loaded.model.device.type == DEVICE
    for seed in range(12):
        draw = random.Random(seed)
        arrivals = make_random_arrivals(draw, subject.plain.config.vocab_size, exits=form != "dense")
        engine = LLMEngine(subject.loaded, make_random_config(draw, subject, arrivals))
        if ON_GPU:
            assert engine._runner.kv_cache.varlen_settings is not None
            assert engine._runner.kv_cache.varlen_settings.operator is reference_varlen_attn, "float32"
        finished = run_schedule(engine, arrivals)
        check_outputs(subject, arrivals, finished)
        seen["preemptions"] += engine.state.num_preemptions
        seen += count_events([output for one in finished.values() for output in one])
    assert seen["preemptions"]
    assert seen["cached"]


def saved(name: str, form: str, directory: Path) -> Path:
    """Save a family's random model in bfloat16, with a head size that FlashAttention supports."""
    wide = {"qk_nope_head_dim": 24, "first_k_dense_replace": 5} if "deepseek" in name else {"head_dim": 32}
    model: Any = family_teacher(name, max_position_embeddings=1024, **wide)
    if FORMS[form]:
        model = disturb(convert(model, **FORMS[form]))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


LOADS: dict[str, tuple[dict[str, int], int, int]] = {
    "at once": ({"max_num_batched_tokens": 2048}, 64, 40),
    "in chunks": ({"max_num_batched_tokens": 48, "max_num_seqs": 4}, 64, 40),
    "with preemption": ({"max_num_batched_tokens": 1024, "max_num_seqs": 3}, 5, 300),
}
"""Engine settings, number of blocks, and tokens per answer."""


@pytest.mark.parametrize(
    ("name", "form", "load"),
    [
        (name, form, load)
        for name in FAMILY_CONFIGS
        if name not in ("mixtral", "qwen3_moe")  # in bfloat16, near ties route tokens to other experts
        for form in (FORMS if name == "llama" else ("dense", "own-g2"))
        for load in (LOADS if name == "llama" else ("in chunks",))
    ],
)
def test_answers_agree_with_pytorch_in_the_same_type(name: str, form: str, load: str, tmp_path: Path) -> None:
    path, (settings, num_blocks, num_tokens) = saved(name, form, tmp_path), LOADS[load]
    with patch("swiftkv_platform.engine.memory._choose_num_blocks", return_value=num_blocks):
        engine = LLMEngine.from_pretrained(
            path, EngineConfig(kv_cache_bytes=1 << 28, block_size=FLASH_BLOCK_MULTIPLE, **settings)
        )
    answers = generate_greedily(engine, PROMPTS, num_tokens)
    engine.assert_consistent()
    assert (load == "with preemption") == bool(engine.state.num_preemptions)
    found = compare_with_pytorch(path, answers, torch.bfloat16, DEVICE)
    assert found["agrees"], found


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dense"])
def test_lossless_exit_and_lookup_agree_as_well(form: str, tmp_path: Path) -> None:
    path = saved("llama", form, tmp_path)
    with make_drafts_free():
        engine = LLMEngine.from_pretrained(path, EngineConfig(kv_cache_bytes=1 << 28))
    params = SamplingParams(
        max_tokens=40,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0,
        num_lookup_tokens=4,
        early_exit=EarlyExit("lossless"),
    )
    outputs = engine.generate(PROMPTS, params, progress=False)
    assert sum(output.num_draft_tokens for output in outputs)
    answers = convert_outputs(outputs)
    assert compare_with_pytorch(path, answers, torch.bfloat16, DEVICE)["agrees"]


@pytest.mark.skipif(not ON_GPU, reason="a CPU's memory is not measured")
def test_the_cache_takes_what_is_left_and_the_fullest_step_fits(tmp_path: Path) -> None:
    path = saved("llama", "own", tmp_path)
    engine = LLMEngine.from_pretrained(path, EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192))
    assert engine.num_blocks > 256
    prompts = [random_tokens(100, seed=at).tolist() for at in range(512)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    assert all(len(one.token_ids) == 16 for one in engine.generate(prompts, params, progress=False))
    free, total = torch.cuda.mem_get_info()
    assert free > 0.02 * total
