"""Paged attention equals attention to the whole context, wherever its blocks lie: read by runs of slots, by our own
kernel, and by the block tables of `varlen_attn`, whose place an operator of its signature takes here."""

import inspect
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from swiftkv_platform.engine import SamplingParams, attention, kernels
from swiftkv_platform.engine.attention import paged_attention
from swiftkv_platform.engine.batch import PagedAttentionMetadata, SequenceQueries, add_block_tables
from swiftkv_platform.engine.kv_cache import KVCacheFormat, PagedTensor, SlotRun, TokenShape
from swiftkv_platform.engine.varlen import (
    VarlenArguments,
    VarlenSettings,
    choose_block_size,
    choose_operator,
    reference_varlen_attn,
    split_consecutive_runs,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.cache import dequantize_from_bytes, quantize_to_bytes
from swiftkv_platform.model.context import TokenSelection
from tests.support.parameters import pairwise

HEADS, KV_HEADS, DIM, SLOTS, BLOCK, SCALE = 6, 2, 8, 6000, 4, 0.3
KERNEL_CHUNK = 16
"""Number of queries of a sequence from which the kernel rounds 8-bit cache values to bfloat16."""
BF16, CPU = torch.bfloat16, torch.device("cpu")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def scattered(length: int, size: int, draw: random.Random, taken: set[int]) -> tuple[SlotRun, ...]:
    """Place `length` tokens in runs of `size` slots that are not taken, in any order."""
    runs: list[SlotRun] = []
    while length > 0:
        start = draw.randrange(0, (SLOTS - size) // BLOCK) * BLOCK
        if taken.isdisjoint(range(start, start + size + 1)):
            taken.update(range(start, start + size + 1))
            runs.append((start, start + min(size, length)))
            length -= size
    return tuple(runs)


class Case:
    """Sequences over one cache layer, with the expected and the actual result of attention."""

    def __init__(
        self,
        contexts: list[tuple[int, list[int]]],
        run_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        query_size: float = 1.0,
        dim: int = DIM,
        uses_kernels: bool = False,
        quantized_dtype: torch.dtype | None = None,
        block_tables: bool = False,
    ) -> None:
        torch.manual_seed(0)
        draw, taken = random.Random(0), set[int]()
        storage = KVCacheFormat(dtype, torch.uint8 if quantized_dtype else dtype, quantized_dtype)
        self.key, self.value = (
            PagedTensor(TokenShape(KV_HEADS, dim), SLOTS, storage, CPU, uses_kernels=uses_kernels) for _ in "kv"
        )
        sequences, self.keys, self.values, start = [], [], [], 0
        for tensor in (self.key, self.value) if block_tables else ():
            tensor.rows.fill_(float("nan"))  # slots without context are NaN
        for length, positions in contexts:
            runs = scattered(length, run_size, draw, taken)
            slots = torch.tensor([slot for first, end in runs for slot in range(first, end)])
            for tensor, kept in ((self.key, self.keys), (self.value, self.values)):
                rows = torch.randn(KV_HEADS, length, dim).to(dtype)
                tensor.write(slots, rows)
                exact = uses_kernels and len(positions) < KERNEL_CHUNK
                kept.append(
                    dequantize_from_bytes(
                        quantize_to_bytes(rows, quantized_dtype), quantized_dtype, torch.float32 if exact else dtype
                    )
                    if quantized_dtype
                    else rows
                )
            blocks = tuple(first // BLOCK for first, _ in runs)
            sequences.append(SequenceQueries(positions, () if block_tables else runs, start, blocks))
            start += len(blocks) * BLOCK if block_tables else length
        self.paged = PagedAttentionMetadata(tuple(sequences))
        if block_tables:
            varlen_settings = VarlenSettings(reference_varlen_attn, BLOCK, CPU, expands_contexts=False)
            (self.paged,), _ = add_block_tables([self.paged], varlen_settings)
        num_queries = sum(len(positions) for _, positions in contexts)
        self.query = (torch.randn(1, num_queries, HEADS, dim) * query_size).to(dtype).transpose(1, 2)

    def expected(self, window: int | None) -> torch.Tensor:
        outputs, row = [], 0
        for sequence, keys, values in zip(self.paged.sequences, self.keys, self.values, strict=True):
            for position in sequence.positions:
                seen = slice(0 if window is None else max(position + 1 - window, 0), position + 1)
                query = self.query[0, :, row].float().unflatten(0, (KV_HEADS, -1))  # [KV_HEADS, group, DIM]
                weights = (query @ keys[:, seen].float().transpose(1, 2) * SCALE).softmax(-1)
                outputs.append((weights @ values[:, seen].float()).flatten(0, 1))
                row += 1
        return torch.stack(outputs)[None]

    def actual(self, window: int | None, **changes: Any) -> torch.Tensor:
        arguments = {"query": self.query, "paged": self.paged, "key": self.key, "value": self.value} | changes
        output, weights = paged_attention(
            torch.nn.Identity(), _attention_mask=None, scaling=SCALE, sliding_window=window, **arguments
        )
        assert weights is None
        return output


Contexts = dict[str, list[tuple[int, list[int]]]]
CONTEXTS: Contexts = {
    "decodes": [(1, [0]), (40, [39]), (17, [16])],
    "first chunk": [(20, list(range(20)))],
    "later chunk": [(50, list(range(31, 50)))],
    "mixed": [(33, [32]), (50, list(range(20, 50))), (9, list(range(9))), (5, [4])],
    "selected": [(30, [3, 4, 9, 29]), (12, [11]), (20, [0, 19])],
}
LARGE: Contexts = {
    "one sequence": [(600, list(range(600)))],
    "a later chunk, a decode, a first chunk": [(700, list(range(500, 700))), (1, [0]), (300, list(range(300)))],
    "long decodes": [(900, [899]), (513, [512]), (700, list(range(690, 700)))],
    "long selected": [(900, [3, 4, 9, 400, 700, 899]), (700, [*range(100), *range(300, 350), 699])],
}


@pytest.mark.parametrize(
    ("name", "run_size", "window", "min_run"), pairwise(CONTEXTS, [3, 16, 200], [None, 7, 100], [1, 64])
)
def test_it_equals_attention(
    name: str, run_size: int, window: int | None, min_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of `min_run` tokens or more are read in place, shorter ones are gathered."""
    monkeypatch.setattr(attention, "MIN_AVERAGE_RUN_TOKENS", min_run)
    case = Case(CONTEXTS[name], run_size)
    torch.testing.assert_close(case.actual(window), case.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "window"), [("mixed", None), ("mixed", 7), ("selected", 100), ("decodes", 7)])
def test_other_layouts_are_read_as_well(name: str, window: int | None) -> None:
    """Other layouts are contexts laid end to end, and block tables."""
    case = Case(CONTEXTS[name], 16)
    keys, values = torch.cat(case.keys, dim=1)[None], torch.cat(case.values, dim=1)[None, ..., :5]
    actual = case.actual(window, key=keys, value=values)
    torch.testing.assert_close(actual, case.expected(window)[..., :5], atol=2e-6, rtol=1e-5)
    case = Case(CONTEXTS[name], BLOCK, block_tables=True)
    torch.testing.assert_close(case.actual(window), case.expected(window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "run_size"), [("one sequence", 700), ("a later chunk, a decode, a first chunk", 100)])
def test_products_of_large_chunks_are_as_exact_as_the_operator(
    name: str, run_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(LARGE[name], run_size, dtype=BF16, query_size=8.0)  # scores of up to 30 or so
    expected = case.expected(None)
    by_products = case.actual(None)
    monkeypatch.setattr(attention, "MIN_MATMUL_QUERIES", 10_000)
    fused = case.actual(None)
    errors = [(output.float() - expected).square().mean().sqrt() for output in (by_products, fused)]
    assert not torch.equal(by_products, fused)
    assert errors[0] < 2.5 * errors[1]
    assert errors[0] < 0.01 * expected.square().mean().sqrt()


@pytest.mark.parametrize(
    ("name", "run_size", "window", "dim", "quantized_dtype"),
    pairwise([*CONTEXTS, *LARGE], [16, 1000], [None, 7, 300], [32, 96], [None, torch.float8_e4m3fn, torch.int8]),
)
def test_the_kernel_is_exact_to_the_last_bits_of_bfloat16(
    name: str, run_size: int, window: int | None, dim: int, quantized_dtype: torch.dtype | None, native_kernels: None
) -> None:
    contexts = (CONTEXTS | LARGE)[name]
    case = Case(
        contexts, run_size, dtype=BF16, query_size=4.0, dim=dim, uses_kernels=True, quantized_dtype=quantized_dtype
    )
    actual, expected = case.actual(window), case.expected(window)
    assert actual.dtype == BF16
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=1 / 64)
    assert (actual.float() - expected).square().mean() < 1e-5 * expected.square().mean()


@pytest.mark.parametrize("num_queries", [1, 64])
@pytest.mark.parametrize("steps", [(0, 8, 15, 17), (0, 40, 300, 900), (0, -40, -300, 5), (-900, 0, 1, 2)])
def test_weights_are_exact_however_scores_rise(steps: tuple[int, ...], num_queries: int, native_kernels: None) -> None:
    """The kernel reads 256 keys at a time, and keeps the largest score so far where that is close enough."""
    torch.manual_seed(0)
    num_keys = 256 * len(steps)
    query, values = torch.randn(1, 1, num_queries, 32).to(BF16), torch.randn(1, num_keys, 32).to(BF16)
    query[..., 0] = 1.0
    keys = torch.randn(1, num_keys, 32)
    keys[..., 0] = torch.tensor(steps).repeat_interleave(256)  # added to the scores of each tile, in nats
    keys = keys.to(BF16)
    positions = torch.arange(num_keys - num_queries, num_keys)
    tables = torch.tensor([[0, num_queries, 0, 1]]), positions, torch.tensor([[0, num_keys]])
    actual = kernels.attend(query, keys, values, *tables, scaling=1.0)[0].float()
    scores = query[0].double() @ keys.double().mT
    scores = scores.masked_fill(torch.arange(num_keys) > positions[:, None], -torch.inf)
    expected = (scores.softmax(-1) @ values.double()).float()
    torch.testing.assert_close(actual.reshape(expected.shape), expected, atol=0.02, rtol=1 / 64)


@pytest.mark.parametrize("name", ["decodes", "first chunk"])
def test_a_nan_stays_with_its_sequence_and_its_head(name: str, native_kernels: None) -> None:
    case = Case([*CONTEXTS[name], (20, [*range(20)])], 200, dtype=BF16, dim=32, uses_kernels=True)
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


def test_a_selection_reads_the_same_blocks() -> None:
    paged = Case(CONTEXTS["mixed"], BLOCK, block_tables=True).paged
    kept = (0, 5, 6, 30, 40)
    selected = paged.select_tokens(TokenSelection(torch.tensor(kept), indices=kept))
    arguments = selected.varlen.arguments
    assert arguments.cu_seq_q.tolist() == [0, 1, 3, 4, 5]
    assert arguments.seqused_k.tolist() == [33, 26, 50, 5]
    assert arguments.block_table[1].tolist() == arguments.block_table[2].tolist()
    assert (arguments.max_q, arguments.max_k) == (2, 50)
    assert selected is paged.select_tokens(TokenSelection(torch.tensor(kept)))
    for positions, runs in (([5], [(1, 6)]), (range(3, 9), [(6, 9)]), ([0, 1, 4, 7, 8], [(2, 2), (1, 5), (2, 9)])):
        assert split_consecutive_runs(positions) == runs


def test_blocks_are_as_large_as_the_operator_reads_them() -> None:
    assert choose_block_size(None, None, 16) == 16
    assert choose_block_size(reference_varlen_attn, 4, 16) == 4
    assert choose_block_size(varlen_attn, None, 16) == 256
    assert choose_block_size(varlen_attn, 512, 16) == 512
    refused = "block_size is 16; attention on a GPU needs a multiple of 256"
    with pytest.raises(InvalidInputError, match=refused):
        choose_block_size(varlen_attn, 16, 16)


def test_the_operator_is_the_one_that_can() -> None:
    for capability, dtype, head_dim, flash in (
        ((8, 0), torch.bfloat16, 128, True),
        ((9, 0), torch.float16, 256, True),
        ((7, 5), torch.float16, 128, False),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 20, False),
        ((9, 0), torch.bfloat16, 264, False),
    ):
        with patch.object(torch.cuda, "get_device_capability", return_value=capability):
            operator = choose_operator(torch.device("cuda"), dtype, head_dim)
        assert operator is (varlen_attn if flash else reference_varlen_attn)
        assert choose_operator(CPU, dtype, head_dim) is None
    real = inspect.signature(varlen_attn).parameters
    for name, parameter in inspect.signature(reference_varlen_attn).parameters.items():
        assert real[name].kind == parameter.kind, f"the engine's arguments bind to the real operator's: {name}"


@pytest.mark.parametrize("max_q", [1, 2, 300])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("by_tables", [False, True])
def test_keys_are_split_only_where_the_kernel_does_it_right(
    max_q: int, grouped: bool, window: int | None, by_tables: bool
) -> None:
    """The fault (pytorch/pytorch#194167) raises no error, so only the rule is tested here."""
    table = torch.zeros(2, 1, dtype=torch.int32) if by_tables else None
    borders = torch.tensor([0, max_q, 2 * max_q], dtype=torch.int32)
    arguments = VarlenArguments(borders, borders, borders.diff(), table, max_q, max_q)
    query, key = torch.zeros(2 * max_q, 4, 8), torch.zeros(4, 16, 2 if grouped else 4, 8)
    asked: list[Any] = []

    def operator(query: torch.Tensor, *_: Any, num_splits: int | None, **__: Any) -> torch.Tensor:
        asked.append(num_splits)
        return query

    arguments.attend(operator, query, key, key, scaling=1.0, window=window)
    splits_right = not by_tables or (max_q == 1 and grouped and window is None)
    assert asked == [None if splits_right else 1]
