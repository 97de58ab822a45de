"""Metadata of a step's attention: the tokens that each query of a flat batch reads, as runs of slots or block tables.

Made once a step on the host; `with_block_tables` puts on the device what an operator there reads. Knows no tensor of a
model, no scheduler and no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from swiftkv_platform.engine.kv_cache import Run
from swiftkv_platform.engine.transfers import to_device
from swiftkv_platform.engine.varlen import Pages, VarlenArguments, consecutive_runs
from swiftkv_platform.model.selection import TokenSelection


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
