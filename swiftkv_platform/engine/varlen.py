"""Attention of concatenated queries to a paged cache, with one operator for all sequences.

On a GPU the operator is PyTorch's `torch.nn.attention.varlen.varlen_attn` (FlashAttention). For models that it does not
support, and in tests on a CPU, `reference_varlen_attn` has the same signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.packed_attention import VarlenOperator, find_flash_obstacle

FLASH_BLOCK_MULTIPLE = 256
"""FlashAttention 2, as part of PyTorch, needs a block size that is a multiple of this."""


@dataclass(frozen=True)
class VarlenSettings:
    """Settings of attention with block tables."""

    operator: VarlenOperator
    block_size: int
    device: torch.device
    expands_contexts: bool
    """Whether the operator gets the keys and values of concatenated contexts instead of the cache's tensors (MLA)."""


@dataclass(frozen=True)
class VarlenArguments:
    """Arguments of a call besides queries, keys and values: the same in all layers, int32, on the device.

    A run is a sequence's queries at consecutive positions.
    """

    cu_seq_q: torch.Tensor
    """First query of each run, and the number of all queries, [num_runs + 1]."""
    cu_seq_k: torch.Tensor
    """First key of each run's context in the concatenated contexts, and their end, [num_runs + 1]. Runs of a sequence
    have the same context."""
    seqused_k: torch.Tensor
    """Number of keys that a run's last query attends to, [num_runs]."""
    block_table: torch.Tensor | None
    """Blocks of each run's context, [num_runs, max blocks]; None if contexts are concatenated."""
    max_q: int
    """Max number of queries of a run."""
    max_k: int
    """Max number of keys of a run."""

    def attend(
        self,
        operator: VarlenOperator,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend from queries [num_tokens, num_heads, head_dim] to keys and values [num_blocks, block_size,
        num_kv_heads, head_dim] or, without a block table, [num_keys, num_kv_heads, head_dim]. Returns the shape of
        `query`."""
        # A single query is its context's last token, so it needs no causal mask. Without one, FlashAttention 2 reads
        # each key head once for all query heads that share it.
        right = -1 if self.max_q == 1 else 0
        grouped = query.shape[1] != key.shape[-2]
        output: torch.Tensor = operator(
            query,
            key,
            value,
            self.cu_seq_q,
            self.cu_seq_k,
            self.max_q,
            self.max_k,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, right),
            enable_gqa=grouped,
            seqused_k=self.seqused_k,
            block_table=self.block_table,
            num_splits=self.choose_num_splits(grouped=grouped, window=window),
        )
        return output

    def choose_num_splits(self, *, grouped: bool, window: int | None) -> int | None:
        """Return into how many splits a run's keys are divided; None: the kernel chooses.

        With block tables and several splits, FlashAttention 2 silently writes each run's result to the first run's rows
        (pytorch/pytorch#194167). Single queries of grouped heads without a window use another layout, where splitting
        is correct and faster."""
        decodes_grouped = self.max_q == 1 and grouped and window is None
        return None if self.block_table is None or decodes_grouped else 1


def reference_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute `varlen_attn` on any device and dtype: gather the contexts, pad them to the longest, and mask explicitly.
    `num_splits` is ignored."""
    del num_splits
    # 1. gather keys and values of each run's context
    device, num_tokens = query.device, query.shape[0]
    starts, lengths = cu_seq_q[:-1, None].long(), cu_seq_q.diff()[:, None]  # [num_runs, 1]
    rows = torch.arange(max_q, device=device)
    keys_at = torch.arange(max_k, device=device)
    if block_table is None:
        slots = (cu_seq_k[:-1, None].long() + keys_at).clamp(max=key.shape[0] - 1)
    else:
        block_size = key.shape[1]
        slots = block_table[:, keys_at // block_size].long() * block_size + keys_at % block_size
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    used = keys_at < seqused_k[:, None]  # [num_runs, max_k]
    # Slots after a context's end may hold NaN, which stays NaN with weight 0. So they are filled with 0.
    keys, values = (x[slots].masked_fill(~used[..., None, None], 0.0).transpose(1, 2) for x in (key, value))
    # 2. mask by position and window
    positions = (seqused_k[:, None] - lengths + rows)[:, :, None]  # [num_runs, max_q, 1]
    seen = used[:, None].expand(-1, max_q, -1)
    if window_size[1] >= 0:
        seen = seen & (keys_at <= positions + window_size[1])
    if window_size[0] >= 0:
        seen = seen & (keys_at >= positions - window_size[0])
    # 3. attend, and concatenate the runs' outputs
    queries = query[(starts + rows).clamp(max=num_tokens - 1)].transpose(1, 2)  # [num_runs, num_heads, max_q, head_dim]
    output = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen[:, None], scale=scale, enable_gqa=enable_gqa
    )
    tokens = torch.arange(num_tokens, device=device)
    run = torch.searchsorted(cu_seq_q[1:], tokens.to(cu_seq_q.dtype), right=True)
    return output.transpose(1, 2)[run, tokens - cu_seq_q[run]]


def choose_operator(device: torch.device, dtype: torch.dtype, head_dim: int) -> VarlenOperator | None:
    """Return the attention operator of a model; None on a CPU, where `attention.py` reads runs of slots."""
    if device.type == "cpu":
        return None
    reason = find_flash_obstacle(device, dtype, head_dim)
    if reason is None:
        return varlen_attn
    get_logger().warning("flash_attention_unavailable", reason=reason, instead="plain operators, which are slow")
    return reference_varlen_attn


def choose_block_size(operator: VarlenOperator | None, requested: int | None, default: int) -> int:
    """Return the block size: `requested`, or a default. Raises `InvalidInputError`: FlashAttention needs a multiple of
    `FLASH_BLOCK_MULTIPLE`."""
    if operator is not varlen_attn:
        return requested or default
    if requested is not None and requested % FLASH_BLOCK_MULTIPLE:
        raise InvalidInputError(
            f"block_size is {requested}; attention on a GPU needs a multiple of {FLASH_BLOCK_MULTIPLE} tokens: set a "
            "multiple, or leave block_size out",
            field="block_size",
            value=requested,
        )
    return requested or FLASH_BLOCK_MULTIPLE


def split_consecutive_runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Split ascending positions into runs of consecutive positions: (number of positions, last position + 1) each."""
    if positions[-1] - positions[0] == len(positions) - 1:
        return [(len(positions), positions[-1] + 1)]
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0] + 1, position + 1)
        else:
            runs.append((1, position + 1))
    return runs
