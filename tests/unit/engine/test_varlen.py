"""The operator that stands for `varlen_attn` equals attention written out, and a whole engine runs on its metadata."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams, memory
from swiftkv_platform.engine.attention import paged_attention
from swiftkv_platform.engine.attention_metadata import PagedAttention, SequenceQueries, with_block_tables
from swiftkv_platform.engine.kv_cache import PagedTensor, StorageFormat, TensorShape
from swiftkv_platform.engine.varlen import (
    Pages,
    block_size_for,
    choose_operator,
    consecutive_runs,
    reference_varlen_attn,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.selection import TokenSelection

HEADS, KV_HEADS, DIM, BLOCK, NUM_BLOCKS, SCALE = 6, 2, 8, 4, 64, 0.3
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
CPU = torch.device("cpu")
CONTEXTS: dict[str, list[tuple[int, list[int]]]] = {
    "decodes": [(1, [0]), (40, [39]), (17, [16])],
    "first chunk": [(20, list(range(20)))],
    "mixed": [(33, [32]), (50, list(range(20, 50))), (9, list(range(9))), (5, [4])],
    "selected": [(30, [3, 4, 9, 29]), (12, [11]), (20, [0, 19])],
}


def laid_out(contexts: list[tuple[int, list[int]]], *, expanded: bool) -> PagedAttention:
    """Contexts in blocks anywhere."""
    free = random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences, start = [], 0
    for length, positions in contexts:
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        sequences.append(SequenceQueries(positions, (), start, tuple(blocks)))
        start += len(blocks) * BLOCK
    pages = Pages(reference_varlen_attn, BLOCK, CPU, expanded)
    (placed,), _ = with_block_tables([PagedAttention(tuple(sequences))], pages)
    return placed


def expected(paged: PagedAttention, query: torch.Tensor, key: Any, value: Any, window: int | None) -> torch.Tensor:
    outputs, row = [], 0
    for sequence in paged.sequences:
        slots = torch.tensor([block * BLOCK + at for block in sequence.blocks for at in range(BLOCK)])
        keys, values = key.rows[:, slots], value.rows[:, slots]
        for position in sequence.positions:
            seen = slice(0 if window is None else max(position + 1 - window, 0), position + 1)
            one = query[0, :, row].unflatten(0, (KV_HEADS, -1))
            weights = (one @ keys[:, seen].transpose(1, 2) * SCALE).softmax(-1)
            outputs.append((weights @ values[:, seen]).flatten(0, 1))
            row += 1
    return torch.stack(outputs)[None]


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("name", CONTEXTS)
def test_it_equals_attention_written_out(name: str, window: int | None) -> None:
    torch.manual_seed(0)
    paged = laid_out(CONTEXTS[name], expanded=False)
    key, value = (
        PagedTensor(TensorShape(KV_HEADS, DIM), NUM_BLOCKS * BLOCK, StorageFormat(torch.float32, torch.float32), CPU)
        for _ in "kv"
    )
    for tensor in (key, value):
        tensor.rows.fill_(float("nan"))  # where no context lies
        for sequence, (length, _) in zip(paged.sequences, CONTEXTS[name], strict=True):
            slots = torch.tensor([block * BLOCK + at for block in sequence.blocks for at in range(BLOCK)][:length])
            tensor.write(slots, torch.randn(KV_HEADS, length, DIM))
    query = torch.randn(1, HEADS, len(paged.positions), DIM)
    actual, _ = paged_attention(
        torch.nn.Identity(), query, key, value, None, paged=paged, scaling=SCALE, sliding_window=window
    )
    torch.testing.assert_close(actual, expected(paged, query, key, value, window), atol=2e-6, rtol=1e-5)


def test_a_selection_reads_the_same_blocks() -> None:
    paged = laid_out(CONTEXTS["mixed"], expanded=False)
    kept = (0, 5, 6, 30, 40)
    selected = paged.select_tokens(TokenSelection(torch.tensor(kept), indices=kept))
    assert selected.varlen is not None
    arguments = selected.varlen.arguments
    assert arguments.cu_seq_q.tolist() == [0, 1, 3, 4, 5]
    assert arguments.seqused_k.tolist() == [33, 26, 50, 5]
    assert arguments.block_table is not None
    assert arguments.block_table[1].tolist() == arguments.block_table[2].tolist()
    assert (arguments.max_q, arguments.max_k) == (2, 50)
    assert selected is paged.select_tokens(TokenSelection(torch.tensor(kept)))


def test_runs_of_positions() -> None:
    assert consecutive_runs([5]) == [(1, 6)]
    assert consecutive_runs(range(3, 9)) == [(6, 9)]
    assert consecutive_runs([0, 1, 4, 7, 8]) == [(2, 2), (1, 5), (2, 9)]


def test_blocks_are_as_large_as_the_operator_reads_them() -> None:
    assert block_size_for(None, None, 16) == 16
    assert block_size_for(reference_varlen_attn, 4, 16) == 4
    assert block_size_for(varlen_attn, None, 16) == 256
    assert block_size_for(varlen_attn, 512, 16) == 512
    with pytest.raises(
        InvalidInputError, match="block_size is 16; attention on a GPU reads blocks of a multiple of 256"
    ):
        block_size_for(varlen_attn, 16, 16)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "flash"),
    [
        ((8, 0), torch.bfloat16, 128, True),
        ((9, 0), torch.float16, 256, True),
        ((7, 5), torch.float16, 128, False),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 20, False),
        ((9, 0), torch.bfloat16, 264, False),
    ],
)
def test_the_operator_is_the_one_that_can(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, flash: bool
) -> None:
    with patch.object(torch.cuda, "get_device_capability", return_value=capability):
        operator = choose_operator(torch.device("cuda"), dtype, head_dim)
    assert operator is (varlen_attn if flash else reference_varlen_attn)
    assert choose_operator(CPU, dtype, head_dim) is None


def test_the_signature_is_that_of_torch() -> None:
    """The engine's arguments bind to the real operator's parameters."""
    import inspect

    wanted = inspect.signature(varlen_attn).parameters
    for name, parameter in inspect.signature(reference_varlen_attn).parameters.items():
        assert wanted[name].kind == parameter.kind, name


def test_an_engine_on_block_tables_answers_as_one_on_runs(model_dir: Path) -> None:
    prompts = [list(range(40)), [7], [1, 2, 3] * 6]
    config = EngineConfig(max_num_batched_tokens=16, block_size=4, kv_cache_bytes=1 << 20)
    plain = LLMEngine.from_pretrained(model_dir, config).generate(prompts, GREEDY)
    with patch.object(memory, "choose_operator", return_value=reference_varlen_attn):
        engine = LLMEngine.from_pretrained(model_dir, config)
    assert engine._runner.cache.pages is not None
    assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == [one.token_ids for one in plain]
