"""A step's schedule as the tensors the model takes: all sequences' tokens laid end to end, and what each attends to, on
the model's device. Knows no weights.

A blocking copy to a GPU waits until the GPU has done all that was asked of it so far. Those of `to_device` do not: CUDA
takes small copies from pageable memory over before the call returns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from swiftkv_platform.engine.block_manager import BlockTable
from swiftkv_platform.engine.kv_cache import KVCache, Run
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.varlen import Pages, VarlenArguments, consecutive_runs
from swiftkv_platform.model.decoder import DecoderContext
from swiftkv_platform.model.masks import Masks
from swiftkv_platform.model.selection import TokenSelection


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence, and where they stand in it."""

    positions: Sequence[int]
    """Ascending."""
    block_table: BlockTable
    token_ids: Sequence[int] = ()
    """Empty where the tokens' hidden states are known."""


@dataclass(frozen=True)
class Layout:
    """Spans of several sequences, end to end."""

    input_ids: torch.Tensor
    """[1, num_tokens]; empty where the spans have no token ids."""
    position_ids: torch.Tensor
    """[1, num_tokens]."""
    slot_mapping: torch.Tensor
    """Slot that each token's KV goes to, or is in, [num_tokens]."""
    attention: PagedAttention
    contexts: Sequence[Run] | torch.Tensor
    """All sequences' contexts, for a cache whose contents the model expands."""
    selection: TokenSelection | None = None
    """The rows that were prepared to go on to layers >= l; None: all of them, or none were."""

    def select(self, rows: Sequence[int]) -> TokenSelection | None:
        """The selection of `rows`, ascending; None where that is all."""
        if len(rows) == self.position_ids.shape[1]:
            return None
        if self.selection is not None and self.selection.indices == tuple(rows):
            return self.selection
        return TokenSelection(index_tensor(rows, self.position_ids.device), indices=tuple(rows))


@dataclass(frozen=True)
class Batch:
    """One step's tokens."""

    layout: Layout
    next_token_rows: dict[int, range]
    """Rows, by index into the schedule, whose logits choose the sequence's next token and, of tokens found in the
    text, verify them."""
    prompt_rows: dict[int, range]
    """Rows, by index into the schedule, whose logits are asked for as prompt log-probabilities."""
    first_rows: tuple[int, ...]
    """Each sequence's first row, and the number of all."""
    written_rows: tuple[int, ...]
    """Rows of tokens from a prompt's last one on, which run through every layer below l."""
    recomputed_rows: dict[int, list[int]]
    """Rows, by index into the schedule, of tokens that go through layers >= l once more, for the K and V that they keep
    there; those of `next_token_rows` are not among them."""

    def upper_rows(self, exits: Container[int]) -> list[int]:
        """The rows that go through layers >= l, ascending; `exits` are the sequences that have their token already."""
        rows = _rows(self.next_token_rows, exits) | _rows(self.recomputed_rows)
        return sorted(rows.union(*self.prompt_rows.values()))

    def deep_rows(self, exits: Container[int]) -> set[int]:
        """Those among them that keep K and V of their own, where a student does."""
        return _rows(self.next_token_rows, exits) | _rows(self.recomputed_rows)


def _rows(by_index: Mapping[int, Iterable[int]], exits: Container[int] = ()) -> set[int]:
    return {row for index, some in by_index.items() if index not in exits for row in some}


def begin_pass(decoder: Any, layout: Layout, cache: KVCache, hidden: torch.Tensor) -> DecoderContext:
    """Context of a pass of `decoder` over the layout's tokens, whose embeddings or hidden states are `hidden`."""
    return DecoderContext(
        hidden=hidden,
        position_ids=layout.position_ids,
        rotation=decoder.rotations(hidden, layout.position_ids),
        masks=Masks((None,) * decoder.layer_map.num_hidden_layers),
        past_key_values=cache.at(layout.slot_mapping, layout.contexts),  # type: ignore[arg-type]
        layer_arguments={"paged": layout.attention},
    )


def make_batch(scheduled: Sequence[ScheduledSequence], cache: KVCache, *, keeps_own: bool = False) -> Batch:
    """Lay the scheduled tokens, and the drafts that are known already, end to end. `keeps_own`: deep tokens, from a
    prompt's last one on, keep K and V of their own, which after a preemption they compute again."""
    spans: list[Span] = []
    next_token_rows: dict[int, range] = {}
    prompt_rows: dict[int, range] = {}
    recomputed_rows: dict[int, list[int]] = {}
    written_rows: list[int] = []
    first_rows = [0]
    for index, item in enumerate(scheduled):
        sequence, row = item.sequence, first_rows[-1]
        first = sequence.num_computed_tokens
        end = first + item.num_scheduled_tokens
        token_ids = [*sequence.token_ids[first:end], *item.draft.token_ids]
        spans.append(Span(range(first, first + len(token_ids)), sequence.block_table, token_ids))
        first_rows.append(row + len(token_ids))
        if item.needs_token:
            next_token_rows[index] = range(row + item.num_scheduled_tokens - 1, first_rows[-1])
        if sequence.generates:
            written_rows += range(row + max(sequence.num_prompt_tokens - 1 - first, 0), first_rows[-1])
        if keeps_own and sequence.generates:
            stop = first_rows[-1] if index not in next_token_rows else next_token_rows[index].start
            deep = range(max(sequence.num_prompt_tokens - 1, first), first + stop - row)
            again = [row + at - first for at in deep if at not in sequence.exited_positions]
            recomputed_rows |= {index: again} if again else {}
        if sequence.wants_prompt_logprobs:
            known = len(sequence.prompt_logprobs)  # the next one to find belongs to the token at this position
            begin, stop = max(known - 1, first), min(end, sequence.num_prompt_tokens - 1)
            prompt_rows[index] = range(row + begin - first, row + stop - first)
    rows = _rows(next_token_rows) | _rows(recomputed_rows)
    layout = lay_out(spans, cache, sorted(rows.union(*prompt_rows.values())))
    return Batch(layout, next_token_rows, prompt_rows, tuple(first_rows), tuple(written_rows), recomputed_rows)


def lay_out(spans: Sequence[Span], cache: KVCache, selected: Sequence[int] = ()) -> Layout:
    """Each span reads the context up to its own last token. `selected` rows will go on to layers >= l, most likely."""
    slots: list[int] = []
    queries: list[SequenceQueries] = []
    block_size, context_start = cache.block_size, 0
    for span in spans:
        first, end = span.positions[0], span.positions[-1] + 1
        blocks = () if cache.pages is None else span.block_table.blocks[: -(-end // block_size)]
        query = SequenceQueries(
            span.positions, _runs(span.block_table.runs, block_size, end), context_start, tuple(blocks)
        )
        at = [slot for start, stop in query.slots(first, end) for slot in range(start, stop)]
        slots += at if query.consecutive else [at[position - first] for position in span.positions]
        queries.append(query)
        context_start += end if cache.pages is None else len(blocks) * block_size
    attention = PagedAttention(tuple(queries), tuple(slots))
    return place(attention, [token for span in spans for token in span.token_ids], cache, selected)


def place(attention: PagedAttention, token_ids: Sequence[int], cache: KVCache, selected: Sequence[int] = ()) -> Layout:
    """The layout on the cache's device; to a GPU everything goes in one copy."""
    if len(selected) == len(attention.slots):
        selected = ()
    own = [np.array(numbers, dtype=np.int64) for numbers in (token_ids, attention.positions, attention.slots, selected)]
    contexts: Sequence[Run] | torch.Tensor = attention.contexts if cache.expanded else ()
    if cache.pages is None:
        there = to_device(own, cache.device)
    else:
        if cache.expanded:
            own.append(np.array([block for one in attention.sequences for block in one.blocks], dtype=np.int64))
        metadata = [attention, attention.select(selected)] if selected else [attention]
        (attention, *prepared), there = with_block_tables(metadata, cache.pages, own)
        for one in prepared:
            attention.prepare(selected, one)
        contexts = there[4] if cache.expanded else ()
    return Layout(
        input_ids=there[0][None],
        position_ids=there[1][None],
        slot_mapping=there[2],
        attention=attention,
        contexts=contexts,
        selection=TokenSelection(there[3], indices=tuple(selected)) if selected else None,
    )


def _runs(blocks: Sequence[tuple[int, int]], block_size: int, num_tokens: int) -> tuple[Run, ...]:
    """Runs of slots that hold the first `num_tokens` tokens, from runs of blocks."""
    runs: list[Run] = []
    for first, end in blocks:
        size = min((end - first) * block_size, num_tokens)
        if size <= 0:
            break
        runs.append((first * block_size, first * block_size + size))
        num_tokens -= size
    assert num_tokens == 0, "tokens without a block"
    return tuple(runs)


@dataclass(frozen=True)
class SequenceQueries:
    """One sequence's part of a flat batch: the positions it asks from, and where its context lies."""

    positions: Sequence[int]
    """Ascending positions of its queries, whose rows follow each other in the batch."""
    runs: tuple[Run, ...]
    """Slots of its context in the order of its tokens, the queries' own included."""
    context_start: int
    """Start of its context among those of the whole batch, laid end to end."""
    blocks: Sequence[int] = ()
    """Blocks of its context, where attention reads block tables."""

    @property
    def consecutive(self) -> bool:
        return self.positions[-1] - self.positions[0] == len(self.positions) - 1

    def slots(self, first: int, end: int) -> list[Run]:
        """Runs of the tokens at positions `first` to `end` - 1."""
        found: list[Run] = []
        at = 0
        for start, stop in self.runs:
            low, high = max(first - at, 0), min(end - at, stop - start)
            if low < high:
                found.append((start + low, start + high))
            at += stop - start
        return found


@dataclass(frozen=True)
class VarlenCall:
    """A step's attention by block tables: the operator and its arguments, on the device."""

    pages: Pages
    arguments: VarlenArguments


@dataclass(frozen=True)
class PagedAttention:
    """Metadata of a flat batch: the tokens that its queries read. A `SelectsTokens`: a selection makes new metadata."""

    sequences: tuple[SequenceQueries, ...]
    slots: tuple[int, ...] = ()
    """Slot of each query's own token."""
    varlen: VarlenCall | None = None
    """Call over block tables; None where contexts are read in runs."""
    _selections: dict[tuple[int, ...], PagedAttention] = field(default_factory=dict, compare=False)
    """Selections that were prepared."""
    _decode_spans: dict[int | None, list[Run] | None] = field(default_factory=dict, compare=False)
    """Spans by window; every layer asks for the same."""

    @property
    def positions(self) -> list[int]:
        """Position of each query in its sequence."""
        return [position for sequence in self.sequences for position in sequence.positions]

    def on_host(self) -> PagedAttention:
        """The same without what is on a device."""
        return replace(self, varlen=None, _selections={}, _decode_spans={})

    @cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequences, positions and runs, as `kernels.attend` takes them."""
        sequences: list[tuple[int, int, int, int]] = []
        positions: list[int] = []
        runs: list[Run] = []
        for sequence in self.sequences:
            sequences.append((len(positions), len(sequence.positions), len(runs), len(sequence.runs)))
            positions += sequence.positions
            runs += sequence.runs
        return torch.tensor(sequences), torch.tensor(positions), torch.tensor(runs)

    def varlen_arrays(self, pages: Pages) -> tuple[list[np.ndarray], int, int]:
        """The tensors of `VarlenArguments`, on the host and in its order, its `max_q` and its `max_k`."""
        runs = [(sequence, *run) for sequence in self.sequences for run in consecutive_runs(sequence.positions)]
        used = np.array([end for _, _, end in runs], dtype=np.int32)
        lengths = [length for _, length, _ in runs]
        cu_seq_q = np.zeros(len(runs) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seq_q[1:])
        ends = [sequence.context_start + len(sequence.blocks) * pages.block_size for sequence in self.sequences]
        starts = [sequence.context_start for sequence, _, _ in runs]
        arrays = [cu_seq_q, np.array([*starts, max(ends)], dtype=np.int32), used]
        if not pages.expanded:
            table = np.zeros((len(runs), max(len(sequence.blocks) for sequence in self.sequences)), dtype=np.int32)
            for row, (sequence, _, _) in zip(table, runs, strict=True):
                row[: len(sequence.blocks)] = sequence.blocks
            arrays.append(table)
        return arrays, max(lengths), int(used.max())

    @property
    def contexts(self) -> list[Run]:
        """All sequences' contexts, one after another."""
        return [run for sequence in self.sequences for run in sequence.runs]

    def decode_spans(self, window: int | None) -> list[Run] | None:
        """First slot and length of what each decode sees; None unless all are decodes with one run of slots each."""
        if window not in self._decode_spans:
            self._decode_spans[window] = self._find_decode_spans(window)
        return self._decode_spans[window]

    def _find_decode_spans(self, window: int | None) -> list[Run] | None:
        spans: list[Run] = []
        for sequence in self.sequences:
            if len(sequence.positions) != 1 or len(sequence.runs) != 1:
                return None
            first, length = sequence.runs[0][0], sequence.positions[0] + 1
            skipped = 0 if window is None else max(length - window, 0)
            spans.append((first + skipped, length - skipped))
        return spans

    def select_tokens(self, selection: TokenSelection) -> PagedAttention:
        """Return metadata of the selected queries; contexts stay whole."""
        kept = selection.indices
        if kept is None:
            device = torch.device("cpu") if self.varlen is None else self.varlen.pages.device
            kept = tuple(selection.positions(len(self.positions), device).tolist())
        if kept not in self._selections:
            selected = self.select(kept)
            if self.varlen is not None:
                (selected,), _ = with_block_tables([selected], self.varlen.pages)
            self._selections[kept] = selected
        return self._selections[kept]

    def prepare(self, kept: Sequence[int], selected: PagedAttention) -> None:
        """Keep what `select_tokens` will be asked for."""
        self._selections[tuple(kept)] = selected

    def select(self, kept: Sequence[int]) -> PagedAttention:
        """Return the host's part of what `select_tokens` makes."""
        selected: list[SequenceQueries] = []
        row, at = 0, 0
        for sequence in self.sequences:
            end = row + len(sequence.positions)
            first = at
            while at < len(kept) and kept[at] < end:
                at += 1
            if at > first:
                positions = [sequence.positions[index - row] for index in kept[first:at]]
                selected.append(replace(sequence, positions=positions))
            row = end
        assert at == len(kept), "a selection of a flat batch is ascending"
        return PagedAttention(tuple(selected))


def with_block_tables(
    metadata: Sequence[PagedAttention], pages: Pages, others: Sequence[np.ndarray] = ()
) -> tuple[list[PagedAttention], list[torch.Tensor]]:
    """The metadata with block tables on the device, and `others` there too, all in one copy."""
    parts = [one.varlen_arrays(pages) for one in metadata]
    arrays = [array for one, _, _ in parts for array in one]
    tensors = iter(to_device([*others, *arrays], pages.device))
    there = [next(tensors) for _ in others]
    placed = []
    for one, (own, max_q, max_k) in zip(metadata, parts, strict=True):
        cu_seq_q, cu_seq_k, used, *table = [next(tensors) for _ in own]
        arguments = VarlenArguments(cu_seq_q, cu_seq_k, used, table[0] if table else None, max_q, max_k)
        placed.append(replace(one, varlen=VarlenCall(pages, arguments)))
    return placed, there


ALIGNMENT = 8
"""Bytes that each array's start is a multiple of, whatever its type."""
_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, in one copy; on a CPU they are not copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    packed = np.empty(max(starts[-1], ALIGNMENT), dtype=np.uint8)  # an empty tensor has no view of another type
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = torch.from_numpy(packed).to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def index_tensor(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    """Indices on `device`, int64."""
    return to_device([np.array(indices, dtype=np.int64)], device)[0]


def take(x: torch.Tensor, indices: Sequence[int], dim: int = 0) -> torch.Tensor:
    """The entries of `x` at `indices` along `dim`; `x` itself where that is all of them in their order."""
    if len(indices) == x.shape[dim] and all(at == index for at, index in enumerate(indices)):
        return x
    return x.index_select(dim, index_tensor(indices, x.device))
