"""Dropping tokens at layer l: whatever drops them, the rest get what they get when every token goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from swiftkv_platform.model.selection import TokenSelection
from tests.numerics.test_families import make_student

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


@pytest.fixture
def prompts() -> torch.Tensor:
    return torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("num_padding", [0, 4])
@torch.no_grad()
def test_selected_tokens_get_what_they_get_among_all(
    name: str, implementation: str, selection: TokenSelection, num_padding: int, prompts: torch.Tensor
) -> None:
    student = make_student(name)
    student.set_attn_implementation(implementation)
    decoder = student.model
    mask = torch.ones_like(prompts)
    mask[1, :num_padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if num_padding else None
    context = decoder.begin(prompts, attention_mask=mask if num_padding else None, position_ids=positions)
    x = decoder.lower(context)
    whole = decoder.student_upper(x, context)
    kept = decoder.student_upper(x, context, kept=selection, shared=decoder.shared_key_values(x, context))
    torch.testing.assert_close(kept, selection.take(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
@torch.no_grad()
def test_rows_leave_a_decode_batch_and_their_key_values_are_complete(name: str, prompts: torch.Tensor) -> None:
    """Row 1 of the second step stops at layer l; what it left in the cache serves its third step."""
    student = make_student(name)
    decoder = student.model
    expected = student(prompts).logits[:, -1]
    cache = student(prompts[:, :-2], use_cache=True, logits_to_keep=1).past_key_values
    context = decoder.begin(prompts[:, -2:-1], past_key_values=cache)
    rows = torch.tensor([0, 2])
    hidden = decoder.student_upper(decoder.lower(context), context, kept=TokenSelection(rows=rows))
    torch.testing.assert_close(student.lm_head(hidden[:, 0]), student(prompts[:, :-1]).logits[rows, -1])
    actual = student(prompts[:, -1:], past_key_values=cache).logits[:, 0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class Metadata:
    """Metadata of queries for an attention backend."""

    sequence_of: torch.Tensor
    """[num_queries]"""

    def select_tokens(self, selection: TokenSelection) -> Metadata:
        return Metadata(selection.take(self.sequence_of[None])[0])


@torch.no_grad()
def test_metadata_follows_the_selection_of_a_flat_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_student("llama")
    seen: list[tuple[int, list[int], float]] = []
    for i, layer in enumerate(student.model.layers):
        original = layer.self_attn.forward

        def spy(*args: Any, i: int = i, original: Any = original, **kwargs: Any) -> Any:
            seen.append((i, kwargs.pop("metadata").sequence_of.tolist(), kwargs.pop("factor")))
            return original(*args, **kwargs)

        monkeypatch.setattr(layer.self_attn, "forward", spy)
    ids = torch.arange(5)[None]
    metadata = Metadata(torch.tensor([0, 0, 1, 1, 1]))
    context = student.model.begin(ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), metadata=metadata, factor=0.5)
    x = student.model.lower(context)
    student.model.student_upper(x, context, kept=TokenSelection(torch.tensor([1, 4])))
    everything, ends = [0, 0, 1, 1, 1], [0, 1]
    assert seen == [(i, everything if i < 2 else ends, 0.5) for i in range(len(student.model.layers))]
    assert metadata.sequence_of.tolist() == everything


@torch.no_grad()
def test_nothing_kept_runs_no_upper_layer(prompts: torch.Tensor) -> None:
    student = make_student("llama")
    ran = []
    for i, layer in enumerate(student.model.layers):
        layer.register_forward_pre_hook(lambda _module, _arguments, i=i: ran.append(i))
    output = student(prompts, use_cache=True, logits_to_keep=torch.tensor([], dtype=torch.long))
    assert ran == [0, 1]
    assert output.logits.shape == (3, 0, 258)
    assert {layer.get_seq_length() for layer in output.past_key_values.layers} == {20}
