"""Samples packed into rows of equal length, and which rows an optimizer step takes. Knows token ids, no text.

A row is a run of samples, each with positions from 0, then padding. Nothing marks the borders but the positions:
without attention mask and cache, transformers reads every restart as another sequence and keeps attention apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swiftkv_platform.errors import InvalidInputError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]


@dataclass(frozen=True)
class Samples:
    """Token ids of many samples end to end, each at most a row long."""

    tokens: TokenArray
    """[num_tokens]"""
    counts: BoolArray
    """[num_tokens]: whether the loss counts the position: the next token of the same sample is a target. False on the
    last token of every sample."""
    starts: IntArray
    """[num_samples + 1]: where each sample begins; the last entry is `num_tokens`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.starts)


@dataclass(frozen=True)
class PackedRows:
    """Rows of `max_length` tokens over a store of samples; a sample may stand in several rows, or in none.

    Rows are assembled when they are asked for, so padding and repeated samples cost no memory.
    """

    samples: Samples
    members: IntArray
    """[num_placed]: indices of samples, row after row."""
    row_starts: IntArray
    """[num_rows + 1]: where each row begins in `members`."""
    max_length: int
    pad_token_id: int

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.samples.lengths[self.members].sum())

    @cached_property
    def num_counted_tokens(self) -> int:
        """Positions of all rows that the loss counts."""
        counted_before = np.concatenate([[0], np.cumsum(self.samples.counts)])[self.samples.starts]
        return int(np.diff(counted_before)[self.members].sum())

    @property
    def packing_efficiency(self) -> float:
        """Share of the rows that is not padding; 0.0 without rows."""
        return self.num_tokens / (len(self) * self.max_length) if len(self) else 0.0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One row: `input_ids` and `position_ids` int64, `loss_mask` bool, each [max_length].

        Padding is a segment of its own: positions from 0, no loss.
        """
        return {name: tensor[0] for name, tensor in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The rows `indices`, stacked: `input_ids` and `position_ids` int64, `loss_mask` bool, each [B, max_length]."""
        shape = (len(indices), self.max_length)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        loss_mask = np.zeros(shape, dtype=np.bool_)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} of {len(self)}")
            end = 0
            for member in self.members[self.row_starts[index] : self.row_starts[index + 1]]:
                source = slice(self.samples.starts[member], self.samples.starts[member + 1])
                begin, end = end, end + source.stop - source.start
                input_ids[row, begin:end] = self.samples.tokens[source]
                position_ids[row, begin:end] = np.arange(end - begin)
                loss_mask[row, begin:end] = self.samples.counts[source]
            position_ids[row, end:] = np.arange(self.max_length - end)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "position_ids": torch.from_numpy(position_ids),
            "loss_mask": torch.from_numpy(loss_mask),
        }

    def update_digest(self, digest: Any) -> None:
        """Feed what the rows hold (tokens, positions that count, borders) to a `hashlib` object."""
        for member in self.members:
            span = slice(self.samples.starts[member], self.samples.starts[member + 1])
            digest.update(np.ascontiguousarray(self.samples.tokens[span], dtype="<i4").tobytes())
            digest.update(self.samples.counts[span].tobytes())
        digest.update(self.samples.lengths[self.members].astype("<i8").tobytes())
        digest.update(self.row_starts.astype("<i8").tobytes())


def pack(samples: Samples, chosen: IntArray, *, max_length: int, pad_token_id: int, packing: bool = True) -> PackedRows:
    """Lay the samples `chosen` (indices, repeats allowed) into rows.

    Best fit, longest sample first: each goes where it leaves the least room. Without `packing` every sample has a row
    of its own. The same input gives the same rows.
    """
    lengths = samples.lengths[chosen]
    if len(lengths) and lengths.max() > max_length:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit a row of {max_length}")
    rows = _best_fit(lengths, max_length) if packing else [[i] for i in range(len(chosen))]
    members = [i for row in rows for i in row]
    return PackedRows(
        samples=samples,
        members=chosen[np.array(members, dtype=np.int64)],
        row_starts=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        max_length=max_length,
        pad_token_id=pad_token_id,
    )


def _best_fit(lengths: IntArray, capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths`, by best-fit decreasing, in about constant time a sample."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by_room[r]: rows with room for r more tokens
    open_rooms = 0  # bit r is set where by_room[r] is not empty
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the tightest row that fits
            row = by_room[room].pop()
            if not by_room[room]:
                open_rooms &= ~(1 << room)
            rows[row].append(index)
        else:
            room, row = capacity, len(rows)
            rows.append([index])
        if room > length:
            by_room[room - length].append(row)
            open_rooms |= 1 << (room - length)
    return rows


def batch_rows(num_rows: int, *, batch_size: int, seed: int, step: int) -> list[int]:
    """Rows of optimizer step `step` (from 0), over all workers.

    Every epoch is a fresh permutation by (seed, epoch), and epochs follow one another without a gap, so a batch may
    cross from one into the next. The step alone is the position in the data: resuming needs no other state, and any
    number of workers sees the same batches.
    """
    batch = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(place, num_rows)
        batch.append(int(_epoch_order(num_rows, seed, epoch)[offset]))
    return batch


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> IntArray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)


def rank_rows(rows: Sequence[int], rank: int, world_size: int) -> list[int]:
    """This worker's share of a batch; all shares are equally long.

    Raises:
        InvalidInputError: the batch does not divide by `world_size`.
    """
    if len(rows) % world_size:
        raise InvalidInputError(
            f"training.batch_size is {len(rows)}, which {world_size} workers cannot share equally; "
            f"a multiple of {world_size} would do",
            field="training.batch_size",
            value=len(rows),
        )
    return list(rows[rank::world_size])


def total_steps(num_rows: int, *, batch_size: int, num_epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of a run: `max_steps` where it is given, else as many as `num_epochs` need, the last one filled
    up from the epoch after.
    """
    if max_steps is not None:
        return max_steps
    return -(-num_rows * num_epochs // batch_size)
