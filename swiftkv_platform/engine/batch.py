"""Converts a step's schedule to the model's input tensors: all sequences' tokens in one row, and attention metadata.
Also writes K and V of layers >= l, and lets rows bypass layers < l.

A blocking copy to a GPU waits for all queued work of the GPU. `copy_to_device` does not block: CUDA stages small copies
from pageable memory before the call returns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from swiftkv_platform.engine.kv_cache import BlockTable, KVCache, SlotRun, StepCache
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.varlen import VarlenArguments, VarlenSettings, split_consecutive_runs
from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.context import DecoderContext, Masks, TokenSelection


@dataclass(frozen=True)
class SequenceSpan:
    """Tokens of a sequence with their positions."""

    positions: Sequence[int]
    block_table: BlockTable
    token_ids: Sequence[int] = ()
    """Token ids; empty if the tokens' hidden states are known."""


@dataclass(frozen=True)
class ModelInputs:
    """Input tensors of a pass: the spans of several sequences, concatenated in one row."""

    input_ids: torch.Tensor
    """Token ids [1, num_tokens]; empty if the spans have none."""
    position_ids: torch.Tensor
    """Positions [1, num_tokens]."""
    slot_mapping: torch.Tensor
    """KV-cache slot of each token, [num_tokens]."""
    attention: PagedAttentionMetadata
    contexts: Sequence[SlotRun] | torch.Tensor
    """All sequences' contexts as runs of slots or as blocks; used if the model expands cached latents (MLA)."""
    selection: TokenSelection | None = None
    """Selection of rows for layers >= l, prepared on the device; None: all rows, or not prepared."""

    def select_rows(self, rows: Sequence[int]) -> TokenSelection | None:
        """Return the selection of ascending `rows`; None if they are all rows."""
        if len(rows) == self.position_ids.shape[1]:
            return None
        if self.selection is not None and self.selection.indices == tuple(rows):
            return self.selection
        return TokenSelection(make_index_tensor(rows, self.position_ids.device), indices=tuple(rows))


@dataclass(frozen=True)
class Batch:
    """The tokens of a step."""

    inputs: ModelInputs
    next_token_rows: dict[int, range]
    """By index into the schedule: rows whose logits choose the next token and verify drafts found in the text."""
    prompt_rows: dict[int, range]
    """By index into the schedule: rows whose logits give prompt log-probabilities."""
    first_rows: tuple[int, ...]
    """First row of each sequence, and the number of all rows."""
    deep_rows: tuple[int, ...]
    """Rows of tokens with their own K and V in layers >= l, which run through all layers < l."""
    kv_only_rows: dict[int, list[int]]
    """By index into the schedule: deep rows that run through layers >= l only for their own K and V. These are a
    prompt's deep tail, and generated tokens after a preemption; `next_token_rows` is not included."""

    def find_upper_rows(self, exits: Container[int]) -> list[int]:
        """Return the ascending rows that run through layers >= l. `exits`: sequences whose token the exit head
        chose."""
        return sorted(self.find_logits_rows(exits) | _collect_rows(self.kv_only_rows))

    def find_deep_rows(self, exits: Container[int]) -> set[int]:
        """Return the upper rows with their own K and V, for a student whose deep tokens have their own."""
        return _collect_rows(self.next_token_rows, exits) | _collect_rows(self.kv_only_rows)

    def find_logits_rows(self, exits: Container[int]) -> set[int]:
        """Return the upper rows whose logits are needed."""
        return _collect_rows(self.next_token_rows, exits) | _collect_rows(self.prompt_rows)


def _collect_rows(by_index: Mapping[int, Iterable[int]], exits: Container[int] = ()) -> set[int]:
    return {row for index, some in by_index.items() if index not in exits for row in some}


def make_pass_context(decoder: Any, inputs: ModelInputs, cache: KVCache, hidden: torch.Tensor) -> DecoderContext:
    """Make the decoder's context of a pass over `inputs`. `hidden`: embeddings or hidden states of its tokens."""
    return DecoderContext(
        hidden=hidden,
        position_ids=inputs.position_ids,
        rotation=decoder.make_rotations(hidden, inputs.position_ids),
        masks=Masks((None,) * decoder.layer_map.num_hidden_layers),
        past_key_values=StepCache(cache, inputs.slot_mapping, inputs.contexts),  # type: ignore[arg-type]
        layer_arguments={"paged": inputs.attention},
    )


def make_batch(scheduled: Sequence[ScheduledSequence], cache: KVCache) -> Batch:
    """Make the batch of the scheduled tokens and the drafts found in the text."""
    spans: list[SequenceSpan] = []
    next_token_rows: dict[int, range] = {}
    prompt_rows: dict[int, range] = {}
    kv_only_rows: dict[int, list[int]] = {}
    deep_rows: list[int] = []
    first_rows = [0]
    for index, item in enumerate(scheduled):
        # 1. append the sequence's tokens to the flat batch
        sequence, row = item.sequence, first_rows[-1]
        first = sequence.num_computed_tokens
        end = first + item.num_scheduled_tokens
        token_ids = [*sequence.token_ids[first:end], *item.draft.token_ids]
        spans.append(SequenceSpan(range(first, first + len(token_ids)), sequence.block_table, token_ids))
        first_rows.append(row + len(token_ids))
        # 2. find its rows for the next token, for the cache alone, and for prompt log-probabilities
        own_next: Sequence[int] = ()
        if item.reaches_last_token:
            own_next = next_token_rows[index] = range(row + item.num_scheduled_tokens - 1, first_rows[-1])
        deep = sequence.find_deep_positions(first, first + len(token_ids))
        deep_rows += [row + at - first for at in deep]
        only_cached = [row + at - first for at in deep if at not in sequence.exited_positions]
        only_cached = [each for each in only_cached if each not in own_next]
        kv_only_rows |= {index: only_cached} if only_cached else {}
        if sequence.is_missing_prompt_logprobs:
            known = len(sequence.prompt_logprobs)  # position of the next token without a log-probability
            begin, stop = max(known - 1, first), min(end, sequence.num_prompt_tokens - 1)
            prompt_rows[index] = range(row + begin - first, row + stop - first)
    rows = _collect_rows(next_token_rows) | _collect_rows(kv_only_rows) | _collect_rows(prompt_rows)
    inputs = make_inputs(spans, cache, sorted(rows))
    return Batch(inputs, next_token_rows, prompt_rows, tuple(first_rows), tuple(deep_rows), kv_only_rows)


def make_inputs(spans: Sequence[SequenceSpan], cache: KVCache, selected: Sequence[int] = ()) -> ModelInputs:
    """Make the inputs of spans. Each span attends to its context up to its last token. `selected`: rows that will
    probably run through layers >= l; their metadata is copied to the device together with the rest."""
    slots: list[int] = []
    queries: list[SequenceQueries] = []
    block_size, context_start = cache.block_size, 0
    for span in spans:
        first, end = span.positions[0], span.positions[-1] + 1
        blocks = () if cache.varlen_settings is None else span.block_table.blocks[: -(-end // block_size)]
        query = SequenceQueries(
            span.positions, _convert_to_slot_runs(span.block_table.runs, block_size, end), context_start, tuple(blocks)
        )
        at = [slot for start, stop in query.find_slot_runs(first, end) for slot in range(start, stop)]
        slots += at if query.is_consecutive else [at[position - first] for position in span.positions]
        queries.append(query)
        context_start += end if cache.varlen_settings is None else len(blocks) * block_size
    attention = PagedAttentionMetadata(tuple(queries), tuple(slots))
    return move_inputs_to_device(attention, [token for span in spans for token in span.token_ids], cache, selected)


def move_inputs_to_device(
    attention: PagedAttentionMetadata, token_ids: Sequence[int], cache: KVCache, selected: Sequence[int] = ()
) -> ModelInputs:
    """Make the inputs on the cache's device, with one copy."""
    if len(selected) == len(attention.slots):
        selected = ()
    own = [np.array(numbers, dtype=np.int64) for numbers in (token_ids, attention.positions, attention.slots, selected)]
    contexts: Sequence[SlotRun] | torch.Tensor = attention.contexts if cache.expands_contexts else ()
    if cache.varlen_settings is None:
        tensors = copy_to_device(own, cache.device)
    else:
        if cache.expands_contexts:
            own.append(np.array([block for one in attention.sequences for block in one.blocks], dtype=np.int64))
        metadata = [attention, attention.select_rows(selected)] if selected else [attention]
        (attention, *prepared), tensors = add_block_tables(metadata, cache.varlen_settings, own)
        for one in prepared:
            attention.cache_selection(selected, one)
        contexts = tensors[4] if cache.expands_contexts else ()
    return ModelInputs(
        input_ids=tensors[0][None],
        position_ids=tensors[1][None],
        slot_mapping=tensors[2],
        attention=attention,
        contexts=contexts,
        selection=TokenSelection(tensors[3], indices=tuple(selected)) if selected else None,
    )


def _convert_to_slot_runs(blocks: Sequence[tuple[int, int]], block_size: int, num_tokens: int) -> tuple[SlotRun, ...]:
    """Convert runs of adjacent blocks to runs of adjacent slots, for the first `num_tokens` tokens."""
    runs: list[SlotRun] = []
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
    """Attention metadata of one sequence in a flat batch: the positions of the step's tokens (queries) in the sequence,
    and the KV-cache slots of all its tokens (context)."""

    positions: Sequence[int]
    """Positions of the queries in the sequence, ascending. The queries' rows in the batch are consecutive."""
    runs: tuple[SlotRun, ...]
    """KV-cache slots of the context in token order, including the queries' slots."""
    context_start: int
    """Offset of the sequence's context in the concatenation of all contexts."""
    blocks: Sequence[int] = ()
    """KV-cache blocks of the context, if attention reads block tables."""

    @property
    def is_consecutive(self) -> bool:
        return self.positions[-1] - self.positions[0] == len(self.positions) - 1

    def find_slot_runs(self, first: int, end: int) -> list[SlotRun]:
        """Return the runs of slots of the tokens at positions `first` to `end` - 1."""
        found: list[SlotRun] = []
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

    settings: VarlenSettings
    arguments: VarlenArguments


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """Metadata for attention of a flat batch to its paged contexts. Implements `TokenSelectable`."""

    sequences: tuple[SequenceQueries, ...]
    slots: tuple[int, ...] = ()
    """Slot of each query's token."""
    varlen: VarlenCall | None = None
    """Call with block tables; None if contexts are read as runs of slots."""
    _selections: dict[tuple[int, ...], PagedAttentionMetadata] = field(default_factory=dict, compare=False)
    _decode_spans: dict[int | None, list[SlotRun] | None] = field(default_factory=dict, compare=False)
    """Cache of `get_decode_spans`, by window."""

    @property
    def positions(self) -> list[int]:
        return [position for sequence in self.sequences for position in sequence.positions]

    def copy_without_device_tensors(self) -> PagedAttentionMetadata:
        """Return the same metadata without tensors on a device."""
        return replace(self, varlen=None, _selections={}, _decode_spans={})

    @cached_property
    def kernel_tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequences, positions and runs, as arguments of `kernels.attend`."""
        sequences: list[tuple[int, int, int, int]] = []
        positions: list[int] = []
        runs: list[SlotRun] = []
        for sequence in self.sequences:
            sequences.append((len(positions), len(sequence.positions), len(runs), len(sequence.runs)))
            positions += sequence.positions
            runs += sequence.runs
        return torch.tensor(sequences), torch.tensor(positions), torch.tensor(runs)

    def make_varlen_arrays(self, settings: VarlenSettings) -> tuple[list[np.ndarray], int, int]:
        """Return the tensors of `VarlenArguments` as host arrays in its order, and `max_q` and `max_k`."""
        runs = [(sequence, *run) for sequence in self.sequences for run in split_consecutive_runs(sequence.positions)]
        used = np.array([end for _, _, end in runs], dtype=np.int32)
        lengths = [length for _, length, _ in runs]
        cu_seq_q = np.zeros(len(runs) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seq_q[1:])
        ends = [sequence.context_start + len(sequence.blocks) * settings.block_size for sequence in self.sequences]
        starts = [sequence.context_start for sequence, _, _ in runs]
        arrays = [cu_seq_q, np.array([*starts, max(ends)], dtype=np.int32), used]
        if not settings.expands_contexts:
            table = np.zeros((len(runs), max(len(sequence.blocks) for sequence in self.sequences)), dtype=np.int32)
            for row, (sequence, _, _) in zip(table, runs, strict=True):
                row[: len(sequence.blocks)] = sequence.blocks
            arrays.append(table)
        return arrays, max(lengths), int(used.max())

    @property
    def contexts(self) -> list[SlotRun]:
        """Concatenated contexts of all sequences."""
        return [run for sequence in self.sequences for run in sequence.runs]

    def get_decode_spans(self, window: int | None) -> list[SlotRun] | None:
        """Return the first slot and the number of slots that each query attends to; None unless all sequences decode
        and have one run."""
        if window not in self._decode_spans:
            self._decode_spans[window] = self._find_decode_spans(window)
        return self._decode_spans[window]

    def _find_decode_spans(self, window: int | None) -> list[SlotRun] | None:
        spans: list[SlotRun] = []
        for sequence in self.sequences:
            if len(sequence.positions) != 1 or len(sequence.runs) != 1:
                return None
            first, length = sequence.runs[0][0], sequence.positions[0] + 1
            skipped = 0 if window is None else max(length - window, 0)
            spans.append((first + skipped, length - skipped))
        return spans

    def select_tokens(self, selection: TokenSelection) -> PagedAttentionMetadata:
        """Return metadata for the selected queries. They still attend to whole contexts."""
        selected_rows = selection.indices
        if selected_rows is None:
            device = torch.device("cpu") if self.varlen is None else self.varlen.settings.device
            selected_rows = tuple(selection.get_positions(len(self.positions), device).tolist())
        if selected_rows not in self._selections:
            selected = self.select_rows(selected_rows)
            if self.varlen is not None:
                (selected,), _ = add_block_tables([selected], self.varlen.settings)
            self._selections[selected_rows] = selected
        return self._selections[selected_rows]

    def cache_selection(self, selected_rows: Sequence[int], selected: PagedAttentionMetadata) -> None:
        """Cache the result of `select_tokens` for the tokens `selected_rows`."""
        self._selections[tuple(selected_rows)] = selected

    def select_rows(self, selected_rows: Sequence[int]) -> PagedAttentionMetadata:
        """Return metadata for the ascending queries `selected_rows`, without tensors on a device."""
        selected: list[SequenceQueries] = []
        row, at = 0, 0
        for sequence in self.sequences:
            end = row + len(sequence.positions)
            first = at
            while at < len(selected_rows) and selected_rows[at] < end:
                at += 1
            if at > first:
                positions = [sequence.positions[index - row] for index in selected_rows[first:at]]
                selected.append(replace(sequence, positions=positions))
            row = end
        assert at == len(selected_rows), "a selection of a flat batch is ascending"
        return PagedAttentionMetadata(tuple(selected))


def add_block_tables(
    metadata: Sequence[PagedAttentionMetadata], settings: VarlenSettings, others: Sequence[np.ndarray] = ()
) -> tuple[list[PagedAttentionMetadata], list[torch.Tensor]]:
    """Return the metadata with block tables on the device, and the arrays `others` as tensors on the device. All are
    copied at once."""
    parts = [one.make_varlen_arrays(settings) for one in metadata]
    arrays = [array for one, _, _ in parts for array in one]
    tensors = iter(copy_to_device([*others, *arrays], settings.device))
    copied = [next(tensors) for _ in others]
    placed = []
    for one, (own, max_q, max_k) in zip(metadata, parts, strict=True):
        cu_seq_q, cu_seq_k, used, *table = [next(tensors) for _ in own]
        arguments = VarlenArguments(cu_seq_q, cu_seq_k, used, table[0] if table else None, max_q, max_k)
        placed.append(replace(one, varlen=VarlenCall(settings, arguments)))
    return placed, copied


ARRAY_ALIGNMENT = 8
"""Alignment of each array's start in bytes, sufficient for all types."""
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def copy_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`, with one copy. On a CPU nothing is copied."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT)
    packed = np.empty(max(starts[-1], ARRAY_ALIGNMENT), dtype=np.uint8)  # an empty tensor has no view of another type
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    copied = torch.from_numpy(packed).to(device, non_blocking=True)
    return [
        copied[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def make_index_tensor(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    return copy_to_device([np.array(indices, dtype=np.int64)], device)[0]


def select_along_dim(x: torch.Tensor, indices: Sequence[int], dim: int = 0) -> torch.Tensor:
    """Return the entries of `x` at `indices` along `dim`, or `x` itself if these are all entries in order."""
    if len(indices) == x.shape[dim] and all(at == index for at, index in enumerate(indices)):
        return x
    return x.index_select(dim, make_index_tensor(indices, x.device))


def write_shared_key_values(decoder: Any, x: torch.Tensor, context: DecoderContext, rows: Sequence[int]) -> None:
    """Compute K and V of all layers >= l from x of some ascending rows, and write them to the cache."""
    cache: Any = context.past_key_values
    rotation, first = context.rotation, decoder.layer_map.num_key_value_layers
    if len(rows) < x.shape[1]:
        selected_rows = TokenSelection(make_index_tensor(rows, x.device))
        x, cache = selected_rows.select(x), replace(cache, slots=select_along_dim(cache.slots, rows))
        rotation = (
            tuple(map(selected_rows.select, rotation))
            if isinstance(rotation, tuple)
            else selected_rows.select(rotation)
        )
    writer = getattr(decoder, "shared_writer", None)  # only with native kernels
    if writer is not None and writer.try_write(x, rotation, cache):
        return
    for group, key_value in enumerate(decoder.project_key_values(x, rotation)):
        cache.write(*key_value, first + group)


def write_and_read_shared_key_values(decoder: Any, x: torch.Tensor, context: DecoderContext) -> list[Any]:
    """Compute K and V of all layers >= l from x of all rows, write them to the cache, and return each group's cache
    contents, as the model's `compute_shared_key_values` returns them."""
    write_shared_key_values(decoder, x, context, range(x.shape[1]))
    return read_shared_key_values(decoder, context)


def read_shared_key_values(decoder: Any, context: DecoderContext) -> list[Any]:
    """Return the cache contents (keys and values) of each group of layers >= l."""
    cache: Any = context.past_key_values
    layer_map = decoder.layer_map
    return [cache.read(layer_map.num_key_value_layers + group) for group in range(len(layer_map.leaders))]


class BypassRows:
    """Implements `Bypass` for a step: rows that are not deep bypass a layer, which only writes their K and V."""

    def __init__(self, deep_rows: Sequence[int]) -> None:
        self.deep_rows = tuple(deep_rows)
        """Ascending rows that run through every layer."""
        self._parts: tuple[_RowSubset | None, _RowSubset | None] | None = None

    @classmethod
    def make_for_rows(cls, decoder: Any, deep_rows: Sequence[int], num_rows: int) -> BypassRows | None:
        """Return the bypass of a step; None if no row bypasses a layer."""
        return cls(deep_rows) if decoder.layer_map.bypassed_layers and len(deep_rows) < num_rows else None

    def __call__(self, decoder: Any, i: int, hidden: torch.Tensor, context: DecoderContext) -> torch.Tensor:
        if self._parts is None:
            rest = sorted(set(range(hidden.shape[1])).difference(self.deep_rows))
            nothing_attends = replace(context, layer_arguments={"paged": None})
            self._parts = _RowSubset.select(nothing_attends, rest), _RowSubset.select(context, self.deep_rows)
        others, deep = self._parts
        assert others is not None, "some rows are not deep"
        decoder.write_key_values(i, others.selection.select(hidden), others.context)  # deep rows attend to them
        if deep is None:
            return hidden
        assert isinstance(deep.selection.tokens, torch.Tensor), "rows are selected one by one"
        return hidden.index_copy(
            1, deep.selection.tokens, decoder.run_layer(i, deep.selection.select(hidden), deep.context)
        )


@dataclass(frozen=True)
class _RowSubset:
    """Some rows of a step, and the decoder context for these rows alone."""

    selection: TokenSelection
    context: DecoderContext

    @classmethod
    def select(cls, context: DecoderContext, rows: Sequence[int]) -> _RowSubset | None:
        """Return a subset with these rows, and a decoder context for them alone; None if `rows` is empty."""
        if not rows:
            return None
        cache: Any = context.past_key_values
        selection = TokenSelection(make_index_tensor(rows, context.hidden.device), indices=tuple(rows))
        own_cache = replace(cache, slots=select_along_dim(cache.slots, rows))
        return cls(selection, replace(context.select(selection), past_key_values=own_cache))


@dataclass(frozen=True)
class DeepRowsWriter:
    """Implements `DeepWriter` for the rows that run through layers >= l: deep rows write before any row attends."""

    cache: StepCache
    """Cache with the slots of the deep rows."""
    first_cache_layer: int
    deep_indices: Sequence[int] | None
    """Indices of the deep rows among the rows of the pass; None: all rows are deep."""
    rows: tuple[int, ...]

    @classmethod
    def make_for_pass(
        cls, decoder: Any, context: DecoderContext, rows: Sequence[int], deep: AbstractSet[int]
    ) -> DeepRowsWriter:
        """Make the writer of a pass that runs `rows`. Rows that are also in `deep` write K and V."""
        cache: Any = context.past_key_values
        writing = [row for row in rows if row in deep]
        indices = None if len(writing) == len(rows) else [index for index, row in enumerate(rows) if row in deep]
        if len(writing) < len(cache.slots):
            cache = replace(cache, slots=select_along_dim(cache.slots, writing))
        return cls(cache, decoder.layer_map.num_key_value_layers, indices, tuple(writing))

    def get_write_target(self, group: int) -> tuple[Any, torch.Tensor]:
        """Return the keys and values that the cache holds for a group, and the slots that deep rows write to."""
        return self.cache.read(self.first_cache_layer + group), self.cache.slots

    def write(self, group: int, key_value: KeyValue) -> Any:
        layer = self.first_cache_layer + group
        if self.deep_indices is None:
            return self.cache.update(*key_value, layer)
        if self.deep_indices:
            keys, values = (select_along_dim(part, self.deep_indices, dim=2) for part in key_value)
            self.cache.write(keys, values, layer)
        return self.cache.read(layer)

    def write_shared(self, group: int) -> None:
        """Do nothing: the function `write_shared_key_values` writes K and V from x."""
