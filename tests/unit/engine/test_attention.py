"""Paged attention equals attention to the context written out, wherever its blocks lie."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from swiftkv_platform.engine import attention
from swiftkv_platform.engine.attention import paged_attention
from swiftkv_platform.engine.attention_metadata import PagedAttention, SequenceQueries
from swiftkv_platform.engine.kv_cache import PagedTensor, Run, StorageFormat, TensorShape
from swiftkv_platform.model.quantization import pack, unpack
from swiftkv_platform.model.selection import TokenSelection

HEADS, KV_HEADS, DIM, SLOTS, SCALE = 6, 2, 8, 6000, 0.3
CPU = torch.device("cpu")


def scattered(length: int, size: int, draw: random.Random, taken: set[int]) -> tuple[Run, ...]:
    """`length` tokens in runs of `size` slots that are not taken, in any order."""
    runs: list[Run] = []
    while length > 0:
        start = draw.randrange(0, SLOTS - size)
        if taken.isdisjoint(range(start, start + size + 1)):
            taken.update(range(start, start + size + 1))
            runs.append((start, start + min(size, length)))
            length -= size
    return tuple(runs)


class Case:
    """Sequences over one cache layer, and what attention to them must come to."""

    def __init__(
        self,
        contexts: list[tuple[int, list[int]]],
        run_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        query_size: float = 1.0,
        dim: int = DIM,
        native: bool = False,
        payload: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(0)
        draw, taken = random.Random(0), set[int]()
        storage = StorageFormat(dtype, torch.uint8 if payload else dtype, payload)
        self.key, self.value = (
            PagedTensor(TensorShape(KV_HEADS, dim), SLOTS, storage, CPU, native=native) for _ in "kv"
        )
        sequences, self.keys, self.values, start = [], [], [], 0
        for length, positions in contexts:
            runs = scattered(length, run_size, draw, taken)
            slots = torch.tensor([slot for first, end in runs for slot in range(first, end)])
            for tensor, kept in ((self.key, self.keys), (self.value, self.values)):
                rows = torch.randn(KV_HEADS, length, dim).to(dtype)
                tensor.write(slots, rows)
                kept.append((unpack(pack(rows, payload), payload, dtype) if payload else rows).float())
            sequences.append(SequenceQueries(positions, runs, start))
            start += length
        self.paged = PagedAttention(tuple(sequences))
        num_queries = sum(len(positions) for _, positions in contexts)
        self.query = (torch.randn(1, num_queries, HEADS, dim) * query_size).to(dtype).transpose(1, 2)

    def expected(self, window: int | None) -> torch.Tensor:
        outputs, row = [], 0
        for sequence, keys, values in zip(self.paged.sequences, self.keys, self.values, strict=True):
            for position in sequence.positions:
                seen = slice(0 if window is None else max(position + 1 - window, 0), position + 1)
                query = self.query[0, :, row].float().unflatten(0, (KV_HEADS, -1))  # [KV_HEADS, group, DIM]
                weights = (query @ keys[:, seen].transpose(1, 2) * SCALE).softmax(-1)
                outputs.append((weights @ values[:, seen]).flatten(0, 1))
                row += 1
        return torch.stack(outputs)[None]

    def actual(self, window: int | None, **changes: Any) -> torch.Tensor:
        arguments = {"query": self.query, "paged": self.paged, "key": self.key, "value": self.value} | changes
        output, weights = paged_attention(
            torch.nn.Identity(), _attention_mask=None, scaling=SCALE, sliding_window=window, **arguments
        )
        assert weights is None
        return output


CONTEXTS: dict[str, list[tuple[int, list[int]]]] = {
    "decodes": [(1, [0]), (40, [39]), (17, [16])],
    "first chunk": [(20, list(range(20)))],
    "later chunk": [(50, list(range(31, 50)))],
    "mixed": [(33, [32]), (50, list(range(20, 50))), (9, list(range(9))), (5, [4])],
    "selected": [(30, [3, 4, 9, 29]), (12, [11]), (20, [0, 19])],
}


@pytest.mark.parametrize("min_run", [1, 64], ids=["merged", "gathered"])
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("run_size", [3, 16, 200])
@pytest.mark.parametrize("name", CONTEXTS)
def test_it_equals_attention_written_out(
    name: str, run_size: int, window: int | None, min_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MIN_RUN_TOKENS", min_run)
    case = Case(CONTEXTS[name], run_size)
    torch.testing.assert_close(case.actual(window), case.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_laid_end_to_end_are_read_as_well(name: str, window: int | None) -> None:
    case = Case(CONTEXTS[name], 16)
    keys, values = torch.cat(case.keys, dim=1)[None], torch.cat(case.values, dim=1)[None, ..., :5]
    actual = case.actual(window, key=keys, value=values)
    torch.testing.assert_close(actual, case.expected(window)[..., :5], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "contexts",
    [[(600, list(range(600)))], [(700, list(range(500, 700))), (1, [0]), (300, list(range(300)))]],
    ids=["one sequence", "a later chunk, a decode, a first chunk"],
)
@pytest.mark.parametrize("run_size", [100, 700])
def test_large_chunks_in_bfloat16_go_through_products_that_are_about_as_exact_as_the_fused_operator(
    contexts: list[tuple[int, list[int]]], run_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(contexts, run_size, dtype=torch.bfloat16, query_size=8.0)  # scores of up to 30 or so
    expected = case.expected(None)
    by_products = case.actual(None)
    monkeypatch.setattr(attention, "MIN_PRODUCT_QUERIES", 10_000)
    fused = case.actual(None)
    errors = [(output.float() - expected).square().mean().sqrt() for output in (by_products, fused)]
    assert not torch.equal(by_products, fused)
    assert errors[0] < 2.5 * errors[1]
    assert errors[0] < 0.01 * expected.square().mean().sqrt()


LARGE: dict[str, list[tuple[int, list[int]]]] = {
    "one sequence": [(600, list(range(600)))],
    "a later chunk, a decode, a first chunk": [(700, list(range(500, 700))), (1, [0]), (300, list(range(300)))],
    "long decodes": [(900, [899]), (513, [512]), (700, list(range(690, 700)))],
    "selected": [(900, [3, 4, 9, 400, 700, 899]), (700, [*range(100), *range(300, 350), 699])],
}


@pytest.mark.parametrize("payload", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dim", [32, 96])
@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("run_size", [16, 1000])
@pytest.mark.parametrize("name", [*CONTEXTS, *LARGE])
def test_the_kernel_is_exact_to_the_last_bits_of_bfloat16(
    name: str, run_size: int, window: int | None, dim: int, payload: torch.dtype | None, native_kernels: None
) -> None:
    contexts, bf16 = (CONTEXTS | LARGE)[name], torch.bfloat16
    case = Case(contexts, run_size, dtype=bf16, query_size=4.0, dim=dim, native=True, payload=payload)
    actual, expected = case.actual(window), case.expected(window)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=1 / 64)
    assert (actual.float() - expected).square().mean() < 1e-5 * expected.square().mean()


@pytest.mark.parametrize("name", ["decodes", "first chunk"])
def test_a_nan_stays_with_its_sequence_and_its_head(name: str, native_kernels: None) -> None:
    case = Case([*CONTEXTS[name], (20, [*range(20)])], 200, dtype=torch.bfloat16, dim=32, native=True)
    first, _ = case.paged.sequences[-1].runs[0]
    case.key.rows[1, first + 3] = float("nan")
    poisoned = case.actual(None).isnan()  # [1, num_queries, HEADS, dim]
    expected = torch.zeros_like(poisoned)
    expected[:, -17:, HEADS // 2 :] = True  # queries at 3 and later see it
    assert torch.equal(poisoned, expected)


def test_a_selection_makes_new_metadata() -> None:
    case = Case(CONTEXTS["mixed"], 16)
    kept = torch.tensor([0, 5, 30, 40])  # rows: one of the first, 30 of the second, 9 of the third, one of the fourth
    selected = case.paged.select_tokens(TokenSelection(kept))
    assert [list(sequence.positions) for sequence in selected.sequences] == [[32], [24, 49], [4]]
    assert [len(sequence.positions) for sequence in case.paged.sequences] == [1, 30, 9, 1]
    part = case.actual(None, query=case.query[:, :, kept], paged=selected)
    torch.testing.assert_close(part, case.expected(None)[:, kept], atol=2e-6, rtol=1e-5)
