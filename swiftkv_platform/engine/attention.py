"""Attention of a flat batch of sequences to their paged contexts: transformers' attention function `swiftkv_paged`.

On a GPU one operator reads block tables (`varlen.py`). On a CPU `kernels.attend` is used where possible. Otherwise each
sequence attends separately, and its context is read in place: a run of adjacent blocks is a view, and the outputs of
several runs are merged by their log-sum-exp. A context with very short runs is copied, which is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.batch import PagedAttentionMetadata, SequenceQueries, VarlenCall
from swiftkv_platform.engine.kv_cache import PagedTensor, SlotRun

PAGED_ATTENTION = "swiftkv_paged"
"""Name of the attention function in transformers."""
MIN_AVERAGE_RUN_TOKENS = 64
"""Contexts with a shorter average run are copied to contiguous memory."""
MIN_MATMUL_QUERIES, MIN_MATMUL_TOKENS = 128, 256
"""Min queries and context tokens of a bfloat16 chunk that uses matrix products. Smaller chunks use torch's fused
operator."""
ROWS_PER_MATMUL = 256
"""Rows of a matrix product per key head: queries * query heads per key head."""
MAX_MATMUL_SCORES = 1 << 21
"""Approximate max number of scores computed at a time, so that they fit into the processor's caches."""


def paged_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: PagedTensor | torch.Tensor,
    value: PagedTensor | torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    paged: PagedAttentionMetadata | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention. transformers' attention interface calls this function.

    Args:
        query: concatenated queries of all sequences, [1, num_heads, num_tokens, head_dim].
        key: keys of all slots; or, from a model that expands latents (MLA), of the concatenated contexts, [1,
            num_heads, sum of context lengths, head_dim].
        value: values, in the layout of `key`.
        paged: metadata; None: no query attends, and the output is 0.
        sliding_window: number of tokens that a query attends to, including itself; None: all tokens up to itself.

    Returns:
        The output [1, num_tokens, num_heads, head_dim], and None for the weights.
    """
    # 1. one operator with block tables, or attention to expanded contexts
    if paged is None:
        return torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format), None
    if paged.varlen is not None:
        return _attend_varlen(query, key, value, paged.varlen, scaling, sliding_window), None
    if isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor):
        contexts = [_ExpandedKeyValues(key, value, sequence.context_start) for sequence in paged.sequences]
        output = _attend_sequences(query, paged, contexts, scaling, sliding_window)
        return output[..., : value.shape[-1]].transpose(1, 2), None
    assert isinstance(key, PagedTensor)
    assert isinstance(value, PagedTensor)
    # 2. the native kernels, views of a decode step's contexts, or each sequence separately
    if key.uses_kernels:
        output = kernels.attend(
            query,
            key.rows,
            value.rows,
            *paged.kernel_tables,
            scaling=scaling,
            window=sliding_window,
            quantized_dtype=key.quantized_dtype,
        )
        return output, None
    if key.rows.dtype == query.dtype:
        spans = paged.get_decode_spans(sliding_window)
        if spans is not None:
            return _attend_decode_spans(query, key.rows[None], value.rows[None], spans, scaling), None
    stored = [_PagedKeyValues(key, value, sequence) for sequence in paged.sequences]
    return _attend_sequences(query, paged, stored, scaling, sliding_window).transpose(1, 2), None


AttentionInterface.register(PAGED_ATTENTION, paged_attention)


def _attend_varlen(
    query: torch.Tensor,
    key: PagedTensor | torch.Tensor,
    value: PagedTensor | torch.Tensor,
    call: VarlenCall,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attend with one operator for all sequences. Returns [1, num_tokens, num_heads, dim of values]."""
    dim = query.shape[-1]
    if isinstance(key, PagedTensor) and isinstance(value, PagedTensor):
        keys, values = (key.view_blocks(call.settings.block_size), value.view_blocks(call.settings.block_size))
    else:
        assert isinstance(key, torch.Tensor)
        assert isinstance(value, torch.Tensor)
        dim = value.shape[-1]
        keys, values = key[0].transpose(0, 1), _pad_values(value, key)[0].transpose(0, 1)
    output = call.arguments.attend(
        call.settings.operator, query[0].transpose(0, 1), keys, values, scaling=scaling, window=window
    )
    return output[None, ..., :dim]


@dataclass(frozen=True)
class _PagedKeyValues:
    """Keys and values of a sequence's context, in slots of the cache."""

    keys: PagedTensor
    values: PagedTensor
    sequence: SequenceQueries

    def read_parts(self, first: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Read keys and values of positions `first` to `end` - 1 in one or more parts, each [1, num_kv_heads, tokens,
        dim]."""
        runs = self.sequence.find_slot_runs(first, end)
        scattered = end - first < MIN_AVERAGE_RUN_TOKENS * len(runs)
        together = [runs] if scattered or self.keys.quantized_dtype is not None else [[run] for run in runs]
        return [(self.keys.read(some)[None], self.values.read(some)[None]) for some in together]


@dataclass(frozen=True)
class _ExpandedKeyValues:
    """Keys and values of a sequence's context, from index `start` of [1, num_heads, sum of context lengths, dim] on."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int

    def read_parts(self, first: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = (x[:, :, self.start + first : self.start + end] for x in (self.keys, self.values))
        return [(keys, _pad_values(values, keys))]


_ContextKeyValues = _PagedKeyValues | _ExpandedKeyValues


def _pad_values(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Pad values to the width of keys, as operators require. MLA's values are narrower; callers cut the output."""
    missing = keys.shape[-1] - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def _read_contiguous(context: _ContextKeyValues, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values of positions `first` to `end` - 1, each as one tensor."""
    parts = context.read_parts(first, end)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([keys for keys, _ in parts], dim=2), torch.cat([values for _, values in parts], dim=2)


def _attend_sequences(
    query: torch.Tensor,
    paged: PagedAttentionMetadata,
    contexts: Sequence[_ContextKeyValues],
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Attend for one sequence after another. Returns [1, num_heads, num_tokens, dim]."""
    outputs, row = [], 0
    for sequence, context in zip(paged.sequences, contexts, strict=True):
        end = row + len(sequence.positions)
        outputs.append(_attend_sequence(query[:, :, row:end], sequence, context, scaling, window))
        row = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_decode_spans(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: list[SlotRun], scaling: float
) -> torch.Tensor:
    """Attend with one query per sequence to a view of keys and values [1, num_kv_heads, num_slots, head_dim]. Query
    heads that share a key head become its queries, so keys are not repeated. Returns [1, num_sequences, num_heads,
    head_dim]."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    queries = query.unflatten(1, (keys.shape[1], -1)).unbind(3)  # each [1, num_kv_heads, heads per key head, head_dim]
    outputs = [
        attend(one, keys.narrow(2, first, length), values.narrow(2, first, length), scale=scaling)[0]
        for one, (first, length) in zip(queries, spans, strict=True)
    ]
    return torch.cat(outputs).flatten(1, 2)[None]


def _attend_sequence(
    query: torch.Tensor, sequence: SequenceQueries, context: _ContextKeyValues, scaling: float, window: int | None
) -> torch.Tensor:
    """Attend for one sequence: query [1, num_heads, num_queries, head_dim] -> the same shape."""
    positions = sequence.positions
    last = positions[-1] + 1
    if len(positions) == 1:
        return _attend_decode(query, context.read_parts(0 if window is None else max(last - window, 0), last), scaling)
    if window is not None and last <= window:
        window = None
    if window is None and sequence.is_consecutive:
        return _attend_chunk(query, positions[0], context, scaling)
    return _attend_masked(query, positions, context, scaling, window)


def _attend_decode(query: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]], scaling: float) -> torch.Tensor:
    """Attend with one query to all `parts`. Query heads that share a key head become its queries."""
    num_kv_heads = parts[0][0].shape[1]
    grouped = query.reshape(1, num_kv_heads, -1, query.shape[-1])
    return _merge_parts([_attend_part(grouped, keys, values, scaling) for keys, values in parts]).reshape(query.shape)


def _attend_chunk(query: torch.Tensor, first: int, context: _ContextKeyValues, scaling: float) -> torch.Tensor:
    """Attend with consecutive queries from position `first` on: causally to each other, and to all earlier tokens."""
    end = first + query.shape[2]
    large = query.shape[2] >= MIN_MATMUL_QUERIES and end >= MIN_MATMUL_TOKENS
    if large and query.dtype == torch.bfloat16:
        return _attend_by_matmul(query, first, *_read_contiguous(context, 0, end), scaling)
    own = _read_contiguous(context, first, end)
    parts = [_attend_part(query, *own, scaling, causal=True)]
    if first:
        parts += [_attend_part(query, keys, values, scaling) for keys, values in context.read_parts(0, first)]
    return _merge_parts(parts)


def _attend_by_matmul(
    query: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Compute `_attend_chunk` by matrix products, which some CPUs run much faster in bfloat16 than torch's fused
    operator.

    Scores are rounded to bfloat16, whose error grows with the magnitude. So each row of scores is shifted before it is
    rounded, by its largest score for the nearest and the first tokens, which usually get the most attention. The
    largest scores are then near 0 and exact, and softmax is invariant to the shift: softmax(s - c) = softmax(s).
    """
    num_queries, num_kv_heads = query.shape[2], keys.shape[1]
    queries = query[0].unflatten(0, (num_kv_heads, -1))  # [kv heads, heads per kv head, queries, head_dim]
    output = torch.empty_like(queries)
    size = max(ROWS_PER_MATMUL // queries.shape[1], 1)
    future = queries.new_full((size, size), float("-inf")).triu(1)
    for start in range(0, num_queries, size):
        end = min(start + size, num_queries)
        heads = max(MAX_MATMUL_SCORES // (ROWS_PER_MATMUL * (first + end)), 1)
        for block, result, block_keys, block_values in zip(
            queries[:, :, start:end].split(heads),
            output[:, :, start:end].split(heads),
            keys[0, :, : first + end].split(heads),
            values[0, :, : first + end].split(heads),
            strict=True,
        ):
            weights = _compute_block_weights(block, block_keys.transpose(1, 2), future, scaling)
            result.copy_((weights @ block_values).view_as(block))
    return output.flatten(0, 1)[None]


def _compute_block_weights(
    queries: torch.Tensor, keys: torch.Tensor, future: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return the attention weights [kv heads, heads per kv head * queries, tokens].

    Args:
        queries: of the last tokens, [kv heads, heads per kv head, queries, head_dim].
        keys: of all tokens, [kv heads, head_dim, tokens].
        future: mask that adds minus infinity to later tokens.
    """
    shape = queries.shape[:3]
    rows, own, mask = queries.flatten(1, 2), keys.shape[2] - shape[2], future[: shape[2], : shape[2]]
    nearest = rows @ keys[:, :, own:]
    nearest.view(*shape, -1).add_(mask)
    largest = nearest.amax(-1, keepdim=True)
    if own:
        largest = torch.maximum(largest, (rows @ keys[:, :, : min(own, 16)]).amax(-1, keepdim=True))
    scores = torch.baddbmm(largest, rows, keys, beta=-scaling, alpha=scaling)
    scores.view(*shape, -1)[..., own:].add_(mask)
    return scores.softmax(-1)


def _attend_masked(
    query: torch.Tensor, positions: Sequence[int], context: _ContextKeyValues, scaling: float, window: int | None
) -> torch.Tensor:
    """Attend with an explicit mask [num_queries, tokens], for queries at any positions."""
    start = 0 if window is None else max(positions[0] - window + 1, 0)
    end = positions[-1] + 1
    keys, values = _read_contiguous(context, start, end)
    query_positions = torch.tensor(list(positions), device=query.device)[:, None]
    key_positions = torch.arange(start, end, device=query.device)
    mask = key_positions <= query_positions
    if window is not None:
        mask &= key_positions > query_positions - window
    output: torch.Tensor = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )
    return output


PartialAttention = tuple[torch.Tensor, torch.Tensor]
"""Attention output for a part of the context, and the log-sum-exp of its scores [1, num_heads, num_queries]."""


def _attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, *, causal: bool = False
) -> PartialAttention:
    """Attend to keys [1, num_kv_heads, tokens, head_dim]. Query heads may share key heads."""
    part: PartialAttention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, scale=scaling
    )
    return part


def _merge_parts(parts: list[PartialAttention]) -> torch.Tensor:
    """Return the attention output of all parts: sum of softmax(log-sum-exps)_i * output_i."""
    if len(parts) == 1:
        return parts[0][0]
    sums = torch.stack([part_sums for _, part_sums in parts])  # [num_parts, 1, num_heads, num_queries]
    weights = sums.softmax(dim=0)[..., None]
    outputs = torch.stack([output for output, _ in parts]).float()
    return (outputs * weights).sum(dim=0).to(parts[0][0].dtype)
