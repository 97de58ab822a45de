"""A step's schedule as the tensors the model takes: all sequences' tokens laid end to end. Knows no weights."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swiftkv_platform.engine.attention_metadata import PagedAttention, SequenceQueries, with_block_tables
from swiftkv_platform.engine.block_manager import BlockTable
from swiftkv_platform.engine.kv_cache import KVCache, Run
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.transfers import index_tensor, to_device
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
        rotation=decoder.rotary_emb(hidden, position_ids=layout.position_ids),
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
    return Batch(layout, next_token_rows, prompt_rows, tuple(first_rows), recomputed_rows)


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
