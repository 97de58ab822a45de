"""FlashAttention as the engine calls it, compared to plain operators in float32 over the shapes of the engine's
steps."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from swiftkv_platform.engine.varlen import FLASH_BLOCK_MULTIPLE, VarlenArguments, reference_varlen_attn
from tests.outside.gpu.device import DEVICE, ON_GPU, needs_gpu

pytestmark = needs_gpu
OPERATOR = varlen_attn if ON_GPU else reference_varlen_attn
Runs = Sequence[tuple[int, int]]
"""For each run, the number of queries, and of keys that its last query sees."""
STEPS: dict[str, Runs] = {
    "one short prompt": [(5, 5)],
    "a prompt of several blocks": [(700, 700)],
    "prompts of mixed lengths": [(1, 1), (300, 300), (17, 17), (256, 256), (257, 257)],
    "a decode step": [(1, 1), (1, 255), (1, 256), (1, 257), (1, 3000)],
    "one decode": [(1, 9000)],
    "many decodes": [(1, 100 + 37 * at) for at in range(64)],
    "decodes beside a short prompt": [(1, 3000), (1, 700), (5, 5)],
    "decodes beside a chunk": [(1, 3000), (512, 2048), (1, 1)],
    "a chunk behind a long context": [(64, 8192)],
    "drafts": [(5, 3000), (5, 260), (3, 3)],
}
HEADS = {
    "multi-head": (4, 4, 64),
    "grouped": (9, 3, 64),
    "one key head": (8, 1, 128),
    "wide": (4, 2, 256),
    "small": (8, 2, 16),
}
"""Query heads, key heads and head dimension."""


def step(
    runs: Runs, heads: tuple[int, int, int], *, by_tables: bool
) -> tuple[VarlenArguments, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a step's random queries, keys and values; its blocks are shuffled and end in junk after the contexts."""
    draw = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, dim = heads
    num_blocks = [-(-context // FLASH_BLOCK_MULTIPLE) for _, context in runs]
    total = sum(num_blocks)
    order = torch.randperm(total, generator=draw)
    table = torch.zeros(len(runs), max(num_blocks), dtype=torch.int32)
    for row, (begin, count) in enumerate(zip(accumulate(num_blocks, initial=0), num_blocks, strict=False)):
        table[row, :count] = order[begin : begin + count]
    sizes, contexts = zip(*runs, strict=True)

    def borders(lengths: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(DEVICE, torch.bfloat16)

    laid_out = borders(contexts) if not by_tables else borders(sizes)
    arguments = VarlenArguments(
        cu_seq_q=borders(sizes),
        cu_seq_k=laid_out,
        seqused_k=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE) if by_tables else None,
        max_q=max(sizes),
        max_k=max(contexts),
    )
    stored = (total, FLASH_BLOCK_MULTIPLE) if by_tables else (sum(contexts),)
    key, value = random(*stored, num_kv_heads, dim), random(*stored, num_kv_heads, dim)
    return arguments, random(sum(sizes), num_heads, dim), key, value


def attended(operator: Any, arguments: VarlenArguments, *tensors: torch.Tensor, window: int | None) -> torch.Tensor:
    scaling = tensors[0].shape[-1] ** -0.5
    return arguments.attend(operator, *tensors, scaling=scaling, window=window).float()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error, by norm, of a query and head."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("by_tables", [True, False])
@pytest.mark.parametrize("window", [None, 16, 300])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_attended_to_as_by_plain_operators(
    name: str, heads: str, window: int | None, by_tables: bool
) -> None:
    arguments, *tensors = step(STEPS[name], HEADS[heads], by_tables=by_tables)
    expected = attended(reference_varlen_attn, arguments, *(tensor.float() for tensor in tensors), window=window)
    found = attended(OPERATOR, arguments, *tensors, window=window)
    assert found.isfinite().all()
    assert distance(found, expected) < 0.02  # bfloat16 has 8 bits of precision


@pytest.mark.skipif(not ON_GPU, reason="plain operators have no such fault")
def test_split_keys_are_still_combined_wrongly_behind_block_tables() -> None:
    """pytorch/pytorch#194167. When this fails, PyTorch has fixed it, and `VarlenArguments.choose_num_splits` can be
    removed."""
    arguments, *tensors = step(STEPS["decodes beside a short prompt"], HEADS["multi-head"], by_tables=True)
    expected = attended(reference_varlen_attn, arguments, *(tensor.float() for tensor in tensors), window=None)

    def splitting(*given: Any, **options: Any) -> Any:
        return varlen_attn(*given, **options | {"num_splits": None})

    assert distance(attended(splitting, arguments, *tensors, window=None), expected) > 0.1
