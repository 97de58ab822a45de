"""The cache of `generate()`: its layers and bytes, the loss from 8 bits on a real model, and tokens that stop at layer
l."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

import swiftkv_platform.sources
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert
from swiftkv_platform.model.cache import count_cache_bytes, make_cache
from swiftkv_platform.model.context import TokenSelection
from tests.numerics.test_families import make_student
from tests.support.parameters import in_turn, pairwise
from tests.support.tiny_models import random_tokens

BUILT_IN_TEACHER = Path(swiftkv_platform.sources.__file__).parent / "teacher"
MAX_KL = {"fp8": 1.5e-3, "int8": 1e-4}
"""Bounds in nats: mean KL(unquantized cache || quantized cache) over positions, in float32."""


@pytest.fixture(scope="module")
def real_text() -> torch.Tensor:
    """[6, 192] tokens of Python source, which the built-in teacher was trained to continue."""
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_TEACHER)
    token_ids = tokenizer(Path(argparse.__file__).read_text(encoding="utf-8"))["input_ids"]
    return torch.tensor(token_ids[: 6 * 192]).view(6, 192)


@pytest.fixture(scope="module")
def real_student() -> Any:
    return convert(BUILT_IN_TEACHER, num_key_value_layers=6, key_value_group_size=2).float().eval()


def log_probs(model: Any, token_ids: torch.Tensor, cache: Any, chunk_size: int) -> torch.Tensor:
    with torch.no_grad():
        chunks = [model(chunk, past_key_values=cache).logits for chunk in token_ids.split(chunk_size, dim=1)]
    return torch.cat(chunks, dim=1).log_softmax(-1)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_eight_bits_stay_near_on_real_text(kv_cache_dtype: str, real_student: Any, real_text: torch.Tensor) -> None:
    caches = [make_cache(real_student.config, kv_cache_dtype=dtype) for dtype in ("auto", kv_cache_dtype)]
    exact, quantized = (log_probs(real_student, real_text, cache, real_text.shape[1]) for cache in caches)
    kl = (exact.exp() * (exact - quantized)).sum(-1)
    assert 0 < kl.mean() < MAX_KL[kv_cache_dtype]
    assert kl.max() < 50 * MAX_KL[kv_cache_dtype]
    config, rows = real_student.config, real_text.numel() * real_student.config.num_key_value_heads
    assert [len(cache.layers) for cache in caches] == [9, 9]  # 6 + 6 / 2
    assert count_cache_bytes(caches[0]) == 9 * 2 * rows * config.head_dim * 4
    assert count_cache_bytes(caches[1]) == 9 * 2 * rows * (config.head_dim + 2)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "max_cache_len"),
    pairwise(["llama", "mistral", "qwen2-mixed", "deepseek_v2"], ["fp8", "int8"], [None, 64]),
)
def test_chunks_read_what_one_pass_reads(name: str, kv_cache_dtype: str, max_cache_len: int | None) -> None:
    """Attention reads what is stored, so the result does not depend on how the prompt is split.

    Not to the last bit: a rounding error can move an element to the next quantization step.
    """
    student = make_student(name)
    prompts = random_tokens(2, 40)

    def run(chunk_size: int, dtype: str) -> torch.Tensor:
        cache = make_cache(student.config, kv_cache_dtype=dtype, max_cache_len=max_cache_len)
        return log_probs(student, prompts, cache, chunk_size)

    whole = run(40, kv_cache_dtype)
    for chunk_size in (11, 1):
        torch.testing.assert_close(run(chunk_size, kv_cache_dtype), whole, atol=2e-3, rtol=0)
    assert (whole - run(40, "auto")).abs().max() > 1e-2, "nothing was quantized"


@pytest.mark.parametrize("swiftkv", [True, False])
def test_a_cache_of_the_other_mode_is_refused(swiftkv: bool) -> None:
    student = make_student("llama").swiftkv(swiftkv)
    prompt = torch.arange(5)[None]
    other = make_cache(student.config, swiftkv=not swiftkv)
    with pytest.raises(ModelError, match=r"make_cache\(model.config") as caught:
        student(prompt, past_key_values=other)
    assert caught.value.field == "past_key_values"
    own = DynamicCache()  # grows as layers write to it
    student(prompt, past_key_values=own)
    assert len(own.layers) == (4 if swiftkv else 5)


# Tokens dropped at layer l: the remaining tokens get the same result as when every token goes on.

SELECTIONS = {
    "everything": TokenSelection(),
    "suffix": TokenSelection(3),
    "last": TokenSelection(1),
    "more than there are": TokenSelection(99),
    "one token": TokenSelection(torch.tensor([4])),
    "tokens": TokenSelection(torch.tensor([1, 5, 18])),
    "rows": TokenSelection(rows=torch.tensor([0, 2])),
    "last of one row": TokenSelection(1, rows=torch.tensor([1])),
    "nothing": TokenSelection(0),
    "no row": TokenSelection(rows=torch.tensor([], dtype=torch.long)),
}


@pytest.mark.parametrize(("name", "implementation"), in_turn(["llama", "qwen2-mixed"], ["sdpa", "eager"]))
@pytest.mark.parametrize("num_padding", [0, 4])
@torch.no_grad()
def test_selected_tokens_get_what_they_get_among_all(name: str, implementation: str, num_padding: int) -> None:
    student, prompts = make_student(name), random_tokens(3, 20)
    student.set_attn_implementation(implementation)
    decoder, mask = student.model, torch.ones_like(prompts)
    mask[1, :num_padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if num_padding else None
    context = decoder.make_context(prompts, attention_mask=mask if num_padding else None, position_ids=positions)
    x = decoder.run_lower_layers(context)
    whole = decoder.run_student_upper(x, context)
    for what, selection in SELECTIONS.items():
        kept = decoder.run_student_upper(
            x, context, selection=selection, shared=decoder.compute_shared_key_values(x, context)
        )
        torch.testing.assert_close(kept, selection.select(whole), atol=1e-5, rtol=1e-5, msg=what)


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"), [("llama", "auto"), ("qwen2-mixed", "auto"), ("llama", "fp8"), ("deepseek_v2", "fp8")]
)
@torch.no_grad()
def test_rows_leave_a_decode_batch_and_their_key_values_are_complete(name: str, kv_cache_dtype: str) -> None:
    """Row 1 of the second step stops at layer l; its third step reads the keys and values that it left in the cache."""
    student, prompts, rows = make_student(name), random_tokens(3, 20), torch.tensor([0, 2])
    decoder, steps = student.model, (prompts[:, -2:-1], prompts[:, -1:])
    caches = [make_cache(student.config, kv_cache_dtype=kv_cache_dtype) for _ in range(2)]
    for cache in caches:
        student(prompts[:, :-2], past_key_values=cache, logits_to_keep=1)
    whole = [student(step, past_key_values=caches[0]).logits[:, 0] for step in steps]
    context = decoder.make_context(prompts[:, -2:-1], past_key_values=caches[1])
    hidden = decoder.run_student_upper(decoder.run_lower_layers(context), context, selection=TokenSelection(rows=rows))
    torch.testing.assert_close(student.lm_head(hidden[:, 0]), whole[0][rows], atol=1e-5, rtol=1e-5)
    actual = student(prompts[:, -1:], past_key_values=caches[1]).logits[:, 0]
    torch.testing.assert_close(actual, whole[1], atol=1e-5, rtol=1e-5)
    if kv_cache_dtype == "auto":
        for step, logits in zip((-1, None), whole, strict=True):
            torch.testing.assert_close(student(prompts[:, :step]).logits[:, -1], logits, atol=1e-5, rtol=1e-5)
