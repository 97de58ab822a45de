"""A step's schedule as the model's input tensors on its device: all sequences' tokens in one row, and metadata on what
each of them attends to; and how the step's rows leave K and V in layers >= l, or bypass layers below l.

A blocking copy to a GPU waits until the GPU has finished all queued work. Copies of `to_device` do not: CUDA stages
small copies from pageable memory before the call returns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from swiftkv_platform.engine.block_manager import BlockTable
from swiftkv_platform.engine.kv_cache import KVCache, Run, StepCache
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.varlen import Pages, VarlenArguments, consecutive_runs
from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.context import DecoderContext, Masks, TokenSelection


@dataclass(frozen=True)
class Span:
    """Tokens of a sequence with their positions."""

    positions: Sequence[int]
    block_table: BlockTable
    token_ids: Sequence[int] = ()
    """Token ids; empty if the tokens' hidden states are known."""


@dataclass(frozen=True)
class Layout:
    """Spans of several sequences, concatenated in one row."""

    input_ids: torch.Tensor
    """Token ids [1, num_tokens]; empty if the spans have none."""
    position_ids: torch.Tensor
    """Positions [1, num_tokens]."""
    slot_mapping: torch.Tensor
    """Slot of each token's KV, [num_tokens]."""
    attention: PagedAttention
    contexts: Sequence[Run] | torch.Tensor
    """All sequences' contexts (runs of slots, or blocks), for a cache whose contents the model expands."""
    selection: TokenSelection | None = None
    """Selection of rows for layers >= l that was prepared on the device; None: all rows, or none was prepared."""

    def select(self, rows: Sequence[int]) -> TokenSelection | None:
        """Return the selection of `rows`, which are ascending; None if they are all rows."""
        if len(rows) == self.position_ids.shape[1]:
            return None
        if self.selection is not None and self.selection.indices == tuple(rows):
            return self.selection
        return TokenSelection(index_tensor(rows, self.position_ids.device), indices=tuple(rows))


@dataclass(frozen=True)
class Batch:
    """The tokens of a step."""

    layout: Layout
    next_token_rows: dict[int, range]
    """Rows, by index into the schedule, whose logits choose the sequence's next token and verify drafts found in the
    text."""
    prompt_rows: dict[int, range]
    """Rows, by index into the schedule, whose logits are needed for prompt log-probabilities."""
    first_rows: tuple[int, ...]
    """First row of each sequence, and the number of all rows."""
    written_rows: tuple[int, ...]
    """Rows of tokens from a prompt's last one on, which run through every layer below l."""
    recomputed_rows: dict[int, list[int]]
    """Rows, by index into the schedule, of tokens that run through layers >= l again to recompute their own K and V
    there; without those of `next_token_rows`."""

    def upper_rows(self, exits: Container[int]) -> list[int]:
        """Return the rows that run through layers >= l, ascending. `exits`: sequences that already have their token."""
        rows = _rows(self.next_token_rows, exits) | _rows(self.recomputed_rows)
        return sorted(rows.union(*self.prompt_rows.values()))

    def deep_rows(self, exits: Container[int]) -> set[int]:
        """Return those of the upper rows that keep their own K and V, for a student whose deep tokens do."""
        return _rows(self.next_token_rows, exits) | _rows(self.recomputed_rows)


def _rows(by_index: Mapping[int, Iterable[int]], exits: Container[int] = ()) -> set[int]:
    return {row for index, some in by_index.items() if index not in exits for row in some}


def begin_pass(decoder: Any, layout: Layout, cache: KVCache, hidden: torch.Tensor) -> DecoderContext:
    """Make the context of a pass of `decoder` over the layout's tokens. `hidden`: their embeddings or hidden states."""
    return DecoderContext(
        hidden=hidden,
        position_ids=layout.position_ids,
        rotation=decoder.make_rotations(hidden, layout.position_ids),
        masks=Masks((None,) * decoder.layer_map.num_hidden_layers),
        past_key_values=StepCache(cache, layout.slot_mapping, layout.contexts),  # type: ignore[arg-type]
        layer_arguments={"paged": layout.attention},
    )


def make_batch(scheduled: Sequence[ScheduledSequence], cache: KVCache, *, keeps_own: bool = False) -> Batch:
    """Make the batch of the scheduled tokens and the drafts that are already known. `keeps_own`: deep tokens keep their
    own K and V, which have to be recomputed after a preemption."""
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
            known = len(sequence.prompt_logprobs)  # position of the token whose log-probability comes next
            begin, stop = max(known - 1, first), min(end, sequence.num_prompt_tokens - 1)
            prompt_rows[index] = range(row + begin - first, row + stop - first)
    rows = _rows(next_token_rows) | _rows(recomputed_rows)
    layout = lay_out(spans, cache, sorted(rows.union(*prompt_rows.values())))
    return Batch(layout, next_token_rows, prompt_rows, tuple(first_rows), tuple(written_rows), recomputed_rows)


def lay_out(spans: Sequence[Span], cache: KVCache, selected: Sequence[int] = ()) -> Layout:
    """Lay out spans, each of which reads its context up to its own last token. `selected`: rows that will probably go
    on to layers >= l, whose metadata is prepared in the same copy."""
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
    """Put the layout on the cache's device; everything goes to a GPU in one copy."""
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
    """Convert runs of blocks to the runs of slots that hold the first `num_tokens` tokens."""
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
    """A sequence's part of a flat batch: the positions of its queries, and the slots of its context."""

    positions: Sequence[int]
    """Positions of its queries, ascending; their rows are consecutive in the batch."""
    runs: tuple[Run, ...]
    """Slots of its context in the order of its tokens, including those of the queries."""
    context_start: int
    """Start of its context among the concatenated contexts of the batch."""
    blocks: Sequence[int] = ()
    """Blocks of its context, if attention reads block tables."""

    @property
    def consecutive(self) -> bool:
        return self.positions[-1] - self.positions[0] == len(self.positions) - 1

    def slots(self, first: int, end: int) -> list[Run]:
        """Return the runs of slots of the tokens at positions `first` to `end` - 1."""
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
    """Metadata on the tokens that the queries of a flat batch read. A `SelectsTokens`."""

    sequences: tuple[SequenceQueries, ...]
    slots: tuple[int, ...] = ()
    """Slot of each query's own token."""
    varlen: VarlenCall | None = None
    """Call over block tables; None if contexts are read in runs."""
    _selections: dict[tuple[int, ...], PagedAttention] = field(default_factory=dict, compare=False)
    _decode_spans: dict[int | None, list[Run] | None] = field(default_factory=dict, compare=False)
    """Cache of spans by window, shared by all layers."""

    @property
    def positions(self) -> list[int]:
        """Positions of all queries in their sequences."""
        return [position for sequence in self.sequences for position in sequence.positions]

    def on_host(self) -> PagedAttention:
        """Return the same metadata without tensors on a device."""
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
        """Return the tensors of `VarlenArguments`, as host arrays in its order, and its `max_q` and `max_k`."""
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
        """Return the first slot and the length that each query sees; None unless all are decodes with one run each."""
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
        """Return metadata for the selected queries, which still read whole contexts."""
        kept = selection.indices
        if kept is None:
            device = torch.device("cpu") if self.varlen is None else self.varlen.pages.device
            kept = tuple(selection.get_positions(len(self.positions), device).tolist())
        if kept not in self._selections:
            selected = self.select(kept)
            if self.varlen is not None:
                (selected,), _ = with_block_tables([selected], self.varlen.pages)
            self._selections[kept] = selected
        return self._selections[kept]

    def prepare(self, kept: Sequence[int], selected: PagedAttention) -> None:
        """Cache the result of `select_tokens` for the tokens `kept`."""
        self._selections[tuple(kept)] = selected

    def select(self, kept: Sequence[int]) -> PagedAttention:
        """Return metadata for the queries `kept`, ascending, without tensors on a device."""
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
    """Return the metadata with block tables on the device, and `others` on the device too, all in one copy."""
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
"""Alignment of each array's start in bytes, which fits all types."""
_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`, with one copy; on a CPU without a copy."""
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
    """Return the indices as an int64 tensor on `device`."""
    return to_device([np.array(indices, dtype=np.int64)], device)[0]


def take(x: torch.Tensor, indices: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Return the entries of `x` at `indices` along `dim`; `x` itself if they are all entries in order."""
    if len(indices) == x.shape[dim] and all(at == index for at, index in enumerate(indices)):
        return x
    return x.index_select(dim, index_tensor(indices, x.device))


def write_shared(decoder: Any, x: torch.Tensor, context: DecoderContext, rows: Sequence[int]) -> None:
    """Write K and V from x of some rows, ascending, to the cache layers of all groups."""
    cache: Any = context.past_key_values
    rotation, first = context.rotation, decoder.layer_map.num_key_value_layers
    if len(rows) < x.shape[1]:
        kept = TokenSelection(index_tensor(rows, x.device))
        x, cache = kept.select(x), replace(cache, slots=take(cache.slots, rows))
        rotation = tuple(map(kept.select, rotation)) if isinstance(rotation, tuple) else kept.select(rotation)
    writer = getattr(decoder, "shared_writer", None)  # on the engine's kernels alone
    if writer is not None and writer.write(x, rotation, cache):
        return
    for group, key_value in enumerate(decoder.project_key_values(x, rotation)):
        cache.write(*key_value, first + group)


def share(decoder: Any, x: torch.Tensor, context: DecoderContext) -> list[Any]:
    """`compute_shared_key_values` of a step: write K and V from x of all rows, and return what the cache holds by
    group."""
    write_shared(decoder, x, context, range(x.shape[1]))
    return read_shared(decoder, context)


def read_shared(decoder: Any, context: DecoderContext) -> list[Any]:
    """Return what the cache holds of each group of layers >= l."""
    cache: Any = context.past_key_values
    layer_map = decoder.layer_map
    return [cache.read(layer_map.num_key_value_layers + group) for group in range(len(layer_map.leaders))]


class BypassRows:
    """The `Bypass` of a step: rows that are not deep leave K and V alone in a layer."""

    def __init__(self, deep: Sequence[int]) -> None:
        self.deep = tuple(deep)
        """Rows, ascending, that run through every layer."""
        self._parts: tuple[_Rows | None, _Rows | None] | None = None

    @classmethod
    def of(cls, decoder: Any, deep: Sequence[int], num_rows: int) -> BypassRows | None:
        """None: no row of the step bypasses a layer."""
        return cls(deep) if decoder.layer_map.bypassed_layers and len(deep) < num_rows else None

    def __call__(self, decoder: Any, i: int, hidden: torch.Tensor, context: DecoderContext) -> torch.Tensor:
        if self._parts is None:
            rest = sorted(set(range(hidden.shape[1])).difference(self.deep))
            nothing_attends = replace(context, layer_arguments={"paged": None})
            self._parts = _Rows.of(nothing_attends, rest), _Rows.of(context, self.deep)
        others, deep = self._parts
        assert others is not None, "some rows are not deep"
        decoder.write_key_values(i, others.kept.select(hidden), others.context)  # which deep rows read
        if deep is None:
            return hidden
        assert isinstance(deep.kept.tokens, torch.Tensor), "rows are selected one by one"
        return hidden.index_copy(1, deep.kept.tokens, decoder.run_layer(i, deep.kept.select(hidden), deep.context))


@dataclass(frozen=True)
class _Rows:
    """Some rows of a step, and the context that they are computed in by themselves."""

    kept: TokenSelection
    context: DecoderContext

    @classmethod
    def of(cls, context: DecoderContext, rows: Sequence[int]) -> _Rows | None:
        """None without rows."""
        if not rows:
            return None
        cache: Any = context.past_key_values
        kept = TokenSelection(index_tensor(rows, context.hidden.device), indices=tuple(rows))
        return cls(kept, replace(context.select(kept), past_key_values=replace(cache, slots=take(cache.slots, rows))))


@dataclass(frozen=True)
class DeepRows:
    """Rows of a step that run through layers >= l. A `DeepWriter`: the deep ones write before any of them attends."""

    cache: StepCache
    """The cache at the slots of the deep rows."""
    first_cache_layer: int
    deep: Sequence[int] | None
    """Places of the deep rows among those that run; None: all."""
    rows: tuple[int, ...]

    @classmethod
    def of(cls, decoder: Any, context: DecoderContext, rows: Sequence[int], deep: AbstractSet[int]) -> DeepRows:
        """`rows` of the pass run, and those among them that are `deep` write."""
        cache: Any = context.past_key_values
        writing = [row for row in rows if row in deep]
        places = None if len(writing) == len(rows) else [at for at, row in enumerate(rows) if row in deep]
        if len(writing) < len(cache.slots):
            cache = replace(cache, slots=take(cache.slots, writing))
        return cls(cache, decoder.layer_map.num_key_value_layers, places, tuple(writing))

    def place(self, group: int) -> tuple[Any, torch.Tensor]:
        """Return what the cache holds of a group, and the slots that its deep rows write to."""
        return self.cache.read(self.first_cache_layer + group), self.cache.slots

    def write(self, group: int, own: KeyValue) -> Any:
        layer = self.first_cache_layer + group
        if self.deep is None:
            return self.cache.update(*own, layer)
        if self.deep:
            keys, values = (take(part, self.deep, dim=2) for part in own)
            self.cache.write(keys, values, layer)
        return self.cache.read(layer)

    def write_shared(self, group: int) -> None:
        """Nothing: what comes from x is written by `write_shared`."""
