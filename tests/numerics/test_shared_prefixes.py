"""Samples that share the tokens of a common prompt have the losses and gradients of separate samples."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from swiftkv_platform.data import packing
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.model import DistillationModel, supports_shared_prefixes
from swiftkv_platform.model import convert
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import DistillationSpec, JobSpec
from tests.numerics.packed_steps import assert_same_step, varlen_on_cpu
from tests.support.parameters import KINDS, few, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, WINDOW, disturb, family_teacher, random_teacher

PREFIX_LENGTH, MAX_LENGTH = 24, 72
assert_equal = partial(assert_same_step, floor=1e-3)
OWN = {"decode_key_value": "own", "num_key_value_layers": 2}
BYPASSING = {"decode_key_value": "own", "prefill_layers": [0, 2, 3]}
STUDENTS: tuple[dict[str, Any], ...] = (
    {"decode_key_value": "shared", "num_key_value_layers": 2, "key_value_group_size": 2},
    OWN,
    OWN | {"deep_tail": 5},
    OWN | {"deep_tail": 40, "key_value_group_size": 2},
    BYPASSING,
    BYPASSING | {"deep_tail": 5},
)
"""A deep tail of 5 tokens lies in the sample's own tokens, or begins in its prefix; one of 40 is the whole prompt."""


def make_rows(*, share_prefixes: bool) -> PackedRows:
    """Make seven samples. Of the four with the same text, the second and third also have the same question. The fifth
    and sixth have another text, and the seventh is short."""
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 256, (2, PREFIX_LENGTH))
    question = rng.integers(0, 256, 8)
    prompts = (
        [*texts[0]],
        [*texts[0], *question],
        [*texts[0], *question, 9],
        [*texts[0], 7, 7],
        [*texts[1], 3],
        [*texts[1], 4, 4, 4, 4, 4, 4, 4],
        [5, 6],
    )
    tokens, counts = list[int](), list[bool]()
    for number, prompt in enumerate(prompts):
        num_targets = 4 + number % 3
        tokens += [*prompt, *rng.integers(0, 256, num_targets + 1)]
        counts += [*[False] * len(prompt), *[True] * num_targets, False]
    starts = np.cumsum([0, *(len(prompt) + 5 + number % 3 for number, prompt in enumerate(prompts))])
    samples = Samples(np.array(tokens, dtype=np.int32), np.array(counts), starts)
    with patch.object(packing, "MIN_PREFIX_LENGTH", 16):
        rows = pack(
            samples, np.arange(len(prompts)), max_length=MAX_LENGTH, pad_token_id=0, share_prefixes=share_prefixes
        )
    assert (rows.prefix_lengths is not None) == share_prefixes
    return rows


def take_step(
    student: Any, rows: PackedRows, counted: int | None = None, trainable: Any = "qkv"
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the sums of the losses over all rows and the gradients of their mean. `counted`: the only sample that
    counts."""
    samples = rows.samples
    if counted is not None:
        loss_mask = np.zeros_like(samples.loss_mask)
        own = slice(samples.starts[counted], samples.starts[counted + 1])
        loss_mask[own] = samples.loss_mask[own]
        rows = replace(rows, samples=replace(samples, loss_mask=loss_mask))
    spec = DistillationSpec(hidden_loss_weight=1.0, hidden_loss_layer=-1, trainable=trainable, vary_deep_tail=False)
    model = DistillationModel(student, spec, dtype=torch.float32)
    model.zero_grad()
    batch, lengths = rows.make_padding_free_batch(range(len(rows)), multiple=16)
    sums = model(**to_tensors(batch), sample_lengths=lengths)
    sum(sums.values()).backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    return {name: float(total.detach()) for name, total in sums.items()}, gradients


def make_student(name: str, shape: dict[str, Any]) -> Any:
    return disturb(convert(family_teacher(name), early_exit=True, **shape))


def test_the_rows_have_each_prompt_once() -> None:
    shared, separate = make_rows(share_prefixes=True), make_rows(share_prefixes=False)
    assert shared.num_tokens == separate.num_tokens - (2 * PREFIX_LENGTH + PREFIX_LENGTH + 8) - PREFIX_LENGTH
    assert shared.num_counted_tokens == separate.num_counted_tokens
    assert len(shared) < len(separate)


@pytest.mark.parametrize("trainable", ["qkv", "all"])
@pytest.mark.parametrize("shape", STUDENTS, ids=lambda shape: "-".join(map(str, shape.values())))
def test_a_step_equals_that_of_separate_samples(shape: dict[str, Any], trainable: str) -> None:
    steps = [
        take_step(make_student("llama", shape), make_rows(share_prefixes=shares), trainable=trainable)
        for shares in (True, False)
    ]
    assert_equal(*steps)


@pytest.mark.parametrize("shape", [STUDENTS[0], STUDENTS[2], STUDENTS[5]], ids=["shared", "own", "bypassing"])
def test_each_sample_has_the_loss_of_a_separate_one(shape: dict[str, Any]) -> None:
    student = make_student("llama", shape)
    shared, separate = make_rows(share_prefixes=True), make_rows(share_prefixes=False)
    for counted in range(len(shared.samples)):
        assert_equal(take_step(student, shared, counted), take_step(student, separate, counted))


@pytest.mark.parametrize(("name", "shape"), in_turn(FAMILY_CONFIGS, STUDENTS[:4], KINDS))
def test_every_family_shares_prefixes(name: str, shape: dict[str, Any]) -> None:
    assert max(make_rows(share_prefixes=False).samples.lengths) > WINDOW
    student = make_student(name, shape)
    shared, separate = (take_step(student, make_rows(share_prefixes=shares)) for shares in (True, False))
    assert_equal(shared, separate)


@pytest.mark.parametrize("name", few(["llama", "qwen2-mixed", "deepseek_v2"]))
def test_one_operator_attends_to_shared_prefixes(name: str) -> None:
    """The GPU path, by an operator with the same signature."""
    for shape in (STUDENTS[0], STUDENTS[2]):
        student = make_student(name, shape)
        expected = take_step(student, make_rows(share_prefixes=False))
        with patch("swiftkv_platform.model.packed_attention.choose_operator", return_value=varlen_on_cpu):
            assert_equal(take_step(student, make_rows(share_prefixes=True)), expected)


@pytest.mark.parametrize(
    ("attention", "own", "sections", "expected"),
    [
        ("sdpa", False, {}, True),
        ("eager", True, {}, True),
        ("eager", False, {}, False),
        ("sdpa", True, {"training": {"compile": True}}, False),
        ("sdpa", True, {"sharding": {"strategy": "fsdp2", "sequence_parallel_size": 2}}, False),
    ],
)
def test_prefixes_are_shared_where_attention_knows_them(
    attention: str, own: bool, sections: dict[str, Any], expected: bool
) -> None:
    mode: Any = "own" if own else "shared"
    student = convert(random_teacher(), num_key_value_layers=2, decode_key_value=mode)
    student.config._attn_implementation = attention
    document = {"name": "t", "data": {"sources": [{"name_or_path": "a.jsonl"}]}, **sections}
    spec = JobSpec.model_validate(document | {"resources": {"num_workers": 2}})
    assert supports_shared_prefixes(spec, student.config) == expected
