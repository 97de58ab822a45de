"""Packing changes no loss and no gradient, and no token attends to another sample: every family, both attention
backends."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from swiftkv_platform.data.packing import PackedRows, pack
from swiftkv_platform.distillation import model as distillation_module
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.engine import kernels
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert, packed_attention
from swiftkv_platform.model.packed_attention import TOKENS_MULTIPLE, to_tensors
from swiftkv_platform.specs import DistillationSpec
from tests.numerics.packed_steps import assert_same_step, pack_random_samples, varlen_on_cpu
from tests.support.parameters import KINDS, few, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, WINDOW, disturb, family_teacher

LENGTHS = (40, 24, 30, 20, 9)
MAX_LENGTH = 64
BACKENDS = ("sdpa", "eager")
every_family = pytest.mark.parametrize("name", few(FAMILY_CONFIGS))
every_setting = pytest.mark.parametrize(("name", "backend"), in_turn(FAMILY_CONFIGS, BACKENDS, KINDS))


def make_student(name: str, backend: str) -> Any:
    student = convert(family_teacher(name), num_key_value_layers=2, key_value_group_size=2, early_exit=True)
    student.set_attn_implementation(backend)
    assert student.config._attn_implementation == backend
    return disturb(student)


def make_rows(*, packing: bool) -> PackedRows:
    rng = np.random.default_rng(0)
    return pack_random_samples(rng, LENGTHS, rng.random(sum(LENGTHS)) < 0.7, max_length=MAX_LENGTH, packing=packing)


def step(
    student: Any, rows: PackedRows, *, all_tokens: bool = False, multiple: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return losses and gradients of one step over all rows, divided by the number of counted positions."""
    distillation_model = DistillationModel(student, DistillationSpec(hidden_loss_weight=1.0), dtype=dtype)
    distillation_model.uses_static_shapes = all_tokens
    distillation_model.zero_grad()
    batch, lengths = rows.make_padding_free_batch(range(len(rows)), multiple=multiple)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        sums = distillation_model(**to_tensors(batch), sample_lengths=lengths)
    sum(
        weight * sums[name] / rows.num_counted_tokens for name, weight in distillation_model.loss_weights.items()
    ).backward()
    gradients = {name: p.grad.clone() for name, p in student.swiftkv_parameters().items() if p.grad is not None}
    return {name: float(total.detach()) / rows.num_counted_tokens for name, total in sums.items()}, gradients


@every_setting
def test_packed_and_unpacked_rows_give_the_same_step(name: str, backend: str) -> None:
    student, packed, unpacked = make_student(name, backend), make_rows(packing=True), make_rows(packing=False)
    assert len(packed) == 2 < len(unpacked) == len(LENGTHS)
    assert_same_step(step(student, packed), step(student, unpacked))


@every_family
def test_one_operator_for_all_samples_gives_the_same_step(name: str) -> None:
    """The GPU path, by an operator with the same signature: windows, grouped heads, narrow values, padding at the
    end."""
    student, rows = make_student(name, "sdpa"), make_rows(packing=True)
    expected = step(student, rows)

    def operator(*arguments: Any, **options: Any) -> torch.Tensor:
        assert arguments[3] is arguments[4], "queries and keys have the same borders"
        return varlen_on_cpu(*arguments, **options)

    with patch("swiftkv_platform.model.packed_attention.choose_operator", return_value=operator) as chosen:
        actual = step(student, rows, multiple=16)
    assert chosen.called
    assert_same_step(actual, expected)


@every_family
def test_tokens_that_do_not_count_change_nothing(name: str) -> None:
    """Uncounted tokens skip the student's layers above l; losses and gradients equal those with all tokens in them."""
    student, rows = make_student(name, "sdpa"), make_rows(packing=True)
    expected = step(student, rows, all_tokens=True, multiple=MAX_LENGTH)
    entered: list[int] = []
    norm = student.model.layers[-1].post_attention_layernorm
    handle = norm.register_forward_hook(lambda _module, inputs, _output: entered.append(inputs[0].shape[1]))
    with patch.object(distillation_module, "TOKENS_MULTIPLE", 16):
        actual = step(student, rows)
    handle.remove()
    assert rows.num_counted_tokens == 74
    assert entered == [sum(LENGTHS), 80], "the teacher runs all tokens, the student the counted ones and the padding"
    assert_same_step(actual, expected)


@every_setting
@torch.no_grad()
def test_no_token_sees_another_sample(name: str, backend: str) -> None:
    """Changing all tokens of one sample changes no logit of another, in either mode, with and without windows."""
    assert max(LENGTHS) > WINDOW
    student, row = make_student(name, backend), to_tensors(make_rows(packing=True).make_padded_batch([0]))
    begins = (row["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(begins) >= 2
    for swiftkv in (True, False):
        student.swiftkv(swiftkv)
        inputs = {"position_ids": row["position_ids"], "use_cache": False}
        logits = student(row["input_ids"], **inputs).logits[0]
        for begin, end in zip(begins, [*begins[1:], MAX_LENGTH], strict=True):
            changed = row["input_ids"].clone()
            changed[0, begin:end] = (changed[0, begin:end] + 1) % 256
            difference = (student(changed, **inputs).logits[0] - logits).abs().amax(-1)
            assert (difference[begin:end] > 1e-3).all()
            assert torch.cat((difference[:begin], difference[end:])).max() <= 1e-5


class _AttentionLengths(TorchDispatchMode):
    """Records the query lengths that attention's CPU operator is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.seen.append(args[0].shape[2])
        return function(*args, **(kwargs or {}))


def test_attention_of_a_narrow_dtype_meets_few_lengths() -> None:
    """A CPU compiles operators for each length; the padding after a sample changes neither losses nor gradients."""
    student, rows = make_student("llama", "sdpa").bfloat16(), make_rows(packing=True)
    kernels.is_available()  # the first call in a process checks the kernels against attention of other lengths
    with _AttentionLengths() as padded:
        actual = step(student, rows, dtype=torch.bfloat16)
    assert set(padded.seen) == {TOKENS_MULTIPLE}
    with patch.object(packed_attention, "TOKENS_MULTIPLE", 1), _AttentionLengths() as bare:
        expected = step(student, rows, dtype=torch.bfloat16)
    assert set(bare.seen) == set(LENGTHS)
    assert_same_step(actual, expected, tolerance=2e-3)


class _Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "deepseek_v2"])
def test_nothing_is_as_large_as_a_row_by_a_row(name: str) -> None:
    """Neither packed rows nor a row of one sample and padding build a mask; the latter is causal already."""
    student = make_student(name, "sdpa")
    for packing in (True, False):
        with _Shapes() as shapes:
            step(student, make_rows(packing=packing))
        squares = {shape for shape in shapes.seen if shape[-2:] == (MAX_LENGTH, MAX_LENGTH)}
        assert not squares - {tuple(parameter.shape) for parameter in student.parameters()}
    if name != "qwen2-mixed":
        batch = to_tensors(make_rows(packing=False).make_padded_batch(range(len(LENGTHS))))
        context = student.model.make_context(batch["input_ids"], position_ids=batch["position_ids"])
        assert context.masks.by_layer == (None,) * len(context.masks.by_layer)


def count_flops(student: Any, rows: PackedRows) -> int:
    no_filling = patch.object(distillation_module, "TOKENS_MULTIPLE", 1)
    with no_filling, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step(student, rows)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", few(["llama", "mistral", "qwen3_moe", "deepseek_v2"]))
def test_packed_rows_take_the_operations_of_their_samples(name: str) -> None:
    """Counted by torch, the FLOPs are the sum over the samples, each in a row of its own length."""
    student, rows = make_student(name, "sdpa"), make_rows(packing=True)
    options: Any = {"pad_token_id": 0, "packing": False}
    alone = sum(
        count_flops(student, pack(rows.samples, np.array([member]), max_length=length, **options))
        for member, length in enumerate(LENGTHS)
    )
    assert sum(LENGTHS) < len(rows) * MAX_LENGTH, "the rows have padding"
    assert count_flops(student, rows) == alone


@torch.no_grad()
def test_flash_attention_refuses_packed_rows_that_it_would_mix() -> None:
    """Transformers detects packed samples only in batches of one row."""
    student, rows = make_student("llama", "sdpa"), make_rows(packing=True)
    student.config._attn_implementation = "flash_attention_2"
    batch = to_tensors(rows.make_padded_batch([0, 1]))
    with pytest.raises(ModelError, match=r"packed samples .* one row") as error:
        student.model.make_context(batch["input_ids"], position_ids=batch["position_ids"])
    assert error.value.field == "attn_implementation"
    student.model.make_context(batch["input_ids"][:1], position_ids=batch["position_ids"][:1])
    alone = to_tensors(make_rows(packing=False).make_padded_batch([0, 1]))
    student.model.make_context(alone["input_ids"], position_ids=alone["position_ids"])
