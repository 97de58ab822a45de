"""Pack samples into rows of equal length, and choose the rows of each optimizer step.

A row is a run of samples, each with positions from 0, then padding, which continues the last positions: causal
attention of counted tokens never reaches it. Without attention mask and cache, transformers treats every restart of the
positions as a new sequence and separates their attention. Training instead lays samples end to end without padding and
uses their lengths (`PackedRows.make_padding_free_batch`). There, samples may share a prefix: positions 0 1 2 3 4 2 3
are a sample of five tokens, and one of four that begins with the first two of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.int32]

_SAMPLES_PER_FIT = 1 << 20
"""Samples per run of the packing algorithm; more gain nothing."""

_DIGEST_BYTES = 8
MIN_PREFIX_LENGTH = 256
"""Min number of common tokens that samples share. The attention of each sample copies the keys and values of its prefix
and needs a mask, so short prefixes save little; and samples with only a system prompt in common stay independent."""


@dataclass(frozen=True)
class Samples:
    """Token ids of many samples end to end, each at most a row long. The arrays may be memory-mapped files."""

    tokens: TokenArray
    """[num_tokens]"""
    loss_mask: BoolArray
    """[num_tokens]: whether the next token of the same sample is a target of the loss; False on a sample's last
    token."""
    starts: IntArray
    """[num_samples + 1]: where each sample begins; the last entry is `num_tokens`."""
    content_ids: IntArray | None = None
    """[num_samples]: id of the conversation or text that a sample belongs to, equal for equal content; None: every
    sample is a separate text."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.starts)


@dataclass(frozen=True)
class PackedRows:
    """Rows of `max_length` tokens over stored samples; a sample may be in several rows, or in none.

    Rows are assembled on access, so padding and repeated samples cost no memory.
    """

    samples: Samples
    members: IntArray
    """[num_placed]: indices of samples, row after row."""
    row_starts: IntArray
    """[num_rows + 1]: where each row begins in `members`."""
    max_length: int
    pad_token_id: int
    prefix_lengths: IntArray | None = None
    """[num_placed]: number of tokens that a sample shares with the sample before it in the row, which has them once. No
    loss counts them. None: all 0."""

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @cached_property
    def placed_lengths(self) -> IntArray:
        """[num_placed]: number of tokens of each sample without its shared prefix."""
        lengths = self.samples.lengths[self.members]
        return lengths if self.prefix_lengths is None else lengths - self.prefix_lengths

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding. Shared prefixes count once."""
        return int(self.placed_lengths.sum())

    @cached_property
    def num_counted_tokens(self) -> int:
        """Number of loss targets of all rows."""
        if not len(self.members):
            return 0
        counted = np.add.reduceat(self.samples.loss_mask, self.samples.starts[:-1], dtype=np.int32)
        return int(counted[self.members].sum(dtype=np.int64))

    def count_deep_tokens(self, deep_tail: int) -> int:
        """Return the number of loss targets of all rows, and of the `deep_tail` - 1 tokens before each answer in its
        sample."""
        if deep_tail == 1 or not len(self.members):
            return self.num_counted_tokens
        mask, starts = np.asarray(self.samples.loss_mask), self.samples.starts
        is_first = mask.copy()
        is_first[1:] &= ~mask[:-1]
        is_first[starts[:-1]] = mask[starts[:-1]]
        first = np.flatnonzero(is_first)
        owner = np.searchsorted(starts, first, side="right") - 1
        tails = np.bincount(owner, np.minimum(first - starts[owner], deep_tail - 1), len(starts) - 1)
        return self.num_counted_tokens + int(tails[self.members].sum())

    @property
    def packing_efficiency(self) -> float:
        """Share of all positions that is not padding; 0.0 without rows."""
        return self.num_tokens / (len(self) * self.max_length) if len(self) else 0.0

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Return one row: `input_ids` and `position_ids` int64, `loss_mask` bool, each [max_length]."""
        return {name: array[0] for name, array in self.make_padded_batch([index]).items()}

    def make_padded_batch(self, indices: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """Return rows stacked: `input_ids` and `position_ids` int64, `loss_mask` bool, each [B, max_length]. Without
        samples that share a prefix, see `get_unshared_samples`."""
        batch = self._allocate_arrays(len(indices), self.max_length)
        for row, index in enumerate(indices):
            end = 0
            for member in self.get_unshared_samples(index):
                end = self._write_sample(batch, row, end, member)
            begin = int(batch["position_ids"][row, end - 1]) + 1 if end else 0
            batch["position_ids"][row, end:] = np.arange(begin, begin + self.max_length - end)
        return batch

    def make_padding_free_batch(
        self, indices: Sequence[int], *, multiple: int = 1, num_counted: int | None = None
    ) -> tuple[dict[str, npt.NDArray[Any]], tuple[int, ...] | None]:
        """Return the samples of rows end to end, without padding between them: arrays as of `make_padded_batch`, each
        [1, num_tokens], and the lengths of the samples. These are None if samples share prefixes, which only
        `position_ids` describe: there, positions restart at the length of the prefix.

        Args:
            multiple: pad after the last sample to a multiple of this number of tokens.
            num_counted: only the first `num_counted` rows keep their `loss_mask`; None: all.
        """
        rows = [self._get_placed(index) for index in indices]
        lengths = tuple(chain.from_iterable(self.placed_lengths[row].tolist() for row in rows))
        batch = self._allocate_arrays(1, -(-sum(lengths) // multiple) * multiple)
        end, has_prefixes = 0, False
        for number, row in enumerate(rows):
            begin = end
            prefix_lengths = (
                np.zeros_like(self.members[row]) if self.prefix_lengths is None else self.prefix_lengths[row]
            )
            for member, prefix_length in zip(self.members[row], prefix_lengths, strict=True):
                end = self._write_sample(batch, 0, end, member, prefix_length)
            has_prefixes |= bool(prefix_lengths.any())
            if num_counted is not None and number >= num_counted:
                batch["loss_mask"][0, begin:end] = False
        batch["position_ids"][0, end:] = np.arange(batch["position_ids"].shape[1] - end)
        return batch, None if has_prefixes else lengths

    def get_content_ids(self, index: int) -> IntArray:
        members = self.get_sample_indices(index)
        return members if self.samples.content_ids is None else self.samples.content_ids[members]

    def get_sample_lengths(self, index: int) -> IntArray:
        return self.samples.lengths[self.get_sample_indices(index)]

    @cached_property
    def sample_length_histogram(self) -> tuple[tuple[int, int], ...]:
        """Histogram of the lengths of placed samples: (length, number of samples). Samples that share a prefix count as
        one, as long as all their tokens, as if each of them attended to the others; so its attention is an upper
        bound."""
        lengths = self.placed_lengths
        if self.prefix_lengths is not None:
            lengths = np.add.reduceat(lengths, np.flatnonzero(self.prefix_lengths == 0))
        lengths, numbers = np.unique(lengths, return_counts=True)
        return tuple(zip(lengths.tolist(), numbers.tolist(), strict=True))

    def get_sample_indices(self, index: int) -> IntArray:
        return self.members[self._get_placed(index)]

    def get_unshared_samples(self, index: int) -> IntArray:
        """Return the samples of a row that do not begin with a shared prefix. Other attention than packed attention
        separates all samples."""
        row = self._get_placed(index)
        members = self.members[row]
        return members if self.prefix_lengths is None else members[self.prefix_lengths[row] == 0]

    def _get_placed(self, index: int) -> slice:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return slice(self.row_starts[index], self.row_starts[index + 1])

    def _allocate_arrays(self, *shape: int) -> dict[str, npt.NDArray[Any]]:
        return {
            "input_ids": np.full(shape, self.pad_token_id, dtype=np.int64),
            "position_ids": np.zeros(shape, dtype=np.int64),
            "loss_mask": np.zeros(shape, dtype=np.bool_),
        }

    def _write_sample(
        self, batch: dict[str, npt.NDArray[Any]], row: int, begin: int, member: int, prefix_length: int = 0
    ) -> int:
        source = slice(self.samples.starts[member] + prefix_length, self.samples.starts[member + 1])
        end = begin + int(source.stop - source.start)
        batch["input_ids"][row, begin:end] = self.samples.tokens[source]
        batch["position_ids"][row, begin:end] = np.arange(prefix_length, prefix_length + end - begin)
        batch["loss_mask"][row, begin:end] = self.samples.loss_mask[source]
        return end


def pack(
    samples: Samples,
    chosen: IntArray,
    *,
    max_length: int,
    pad_token_id: int,
    packing: bool = True,
    share_prefixes: bool = False,
) -> PackedRows:
    """Pack the samples `chosen` (indices, repeats allowed) into rows.

    Uses best-fit decreasing: samples are placed longest first, each in the row with the fewest free tokens that fits.
    Every `_SAMPLES_PER_FIT` samples are packed separately, which bounds memory. Without `packing`, one sample per row.
    With `share_prefixes`, samples with a common prompt are packed like one sample, see `PackedRows.prefix_lengths`.
    Deterministic.
    """
    lengths = samples.lengths[chosen]
    if len(lengths) and lengths.max() > max_length:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit a row of {max_length}")
    # 1. put samples with a common prompt next to each other: each such group is packed as a whole
    prefix_lengths = np.zeros_like(chosen)
    if packing and share_prefixes:
        order, prefix_lengths = _share_prefixes(samples, chosen, max_length)
        chosen, lengths = chosen[order], lengths[order]
    firsts = np.flatnonzero(prefix_lengths == 0)
    group_sizes = np.diff(firsts, append=len(chosen))
    group_lengths = np.add.reduceat(lengths - prefix_lengths, firsts) if len(firsts) else lengths
    # 2. order the groups by row
    if packing:
        fits = [
            (begin, _pack_best_fit(group_lengths[begin : begin + _SAMPLES_PER_FIT], max_length))
            for begin in range(0, len(firsts), _SAMPLES_PER_FIT)
        ]
        order = np.concatenate([np.empty(0, dtype=np.int64), *(begin + groups for begin, (groups, _) in fits)])
        sizes = np.concatenate([np.empty(0, dtype=np.int64), *(sizes for _, (_, sizes) in fits)])
    else:
        order, sizes = np.arange(len(chosen)), np.ones(len(chosen), dtype=np.int64)
    # 3. store each row as a range of members
    ends = np.cumsum(group_sizes[order])
    members = np.repeat(firsts[order] - (ends - group_sizes[order]), group_sizes[order]) + np.arange(len(chosen))
    return PackedRows(
        samples=samples,
        members=chosen[members],
        row_starts=np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(sizes)])],
        max_length=max_length,
        pad_token_id=pad_token_id,
        prefix_lengths=prefix_lengths[members] if prefix_lengths.any() else None,
    )


def _share_prefixes(samples: Samples, chosen: IntArray, max_length: int) -> tuple[IntArray, IntArray]:
    """Group samples of `chosen` with a common prompt, each group at most `max_length` tokens long. Repeats of a sample
    stay apart.

    Returns:
        (order, prefix_lengths), each [len(chosen)]: indices into `chosen`, group by group, and the number of tokens
        that each of these shares with the one before it; 0 begins a group.
    """
    # 1. sort the samples by prompt. Digests of its blocks are enough: the prefixes are compared below
    keys, repeats = dict[int, bytes](), Counter[int]()
    for index, member in enumerate(chosen.tolist()):
        prompt = _get_prompt(samples, member)
        if len(prompt) >= MIN_PREFIX_LENGTH:
            keys[index] = repeats[member].to_bytes(_DIGEST_BYTES) + _digest_blocks(prompt)
            repeats[member] += 1
    # 2. add each sample to the group of the one before it, if they have a long prefix in common and there is room
    groups, ranks = np.arange(len(chosen)), np.zeros_like(chosen)
    prefix_lengths, num_tokens = np.zeros_like(chosen), 0
    for rank, (previous, index) in enumerate(pairwise(sorted(keys, key=keys.__getitem__)), start=1):
        if groups[previous] == previous:
            num_tokens = int(samples.lengths[chosen[previous]])
        if keys[previous][: 2 * _DIGEST_BYTES] == keys[index][: 2 * _DIGEST_BYTES]:
            common = _count_common_tokens(*(_get_prompt(samples, chosen[i]) for i in (previous, index)))
            num_own = int(samples.lengths[chosen[index]]) - common
            if common >= MIN_PREFIX_LENGTH and num_tokens + num_own <= max_length:
                groups[index], ranks[index], prefix_lengths[index] = groups[previous], rank, common
                num_tokens += num_own
    order = np.lexsort((ranks, groups))
    return order, prefix_lengths[order]


def _get_prompt(samples: Samples, member: int) -> TokenArray:
    """Return the tokens of a sample before the first that is counted."""
    begin, end = samples.starts[member], samples.starts[member + 1]
    return samples.tokens[begin : begin + int(np.argmax(samples.loss_mask[begin:end]))]


def _digest_blocks(tokens: TokenArray) -> bytes:
    """Return a key that sorts token sequences by their common prefixes: a digest per block of `MIN_PREFIX_LENGTH`."""
    blocks = (tokens[begin : begin + MIN_PREFIX_LENGTH] for begin in range(0, len(tokens), MIN_PREFIX_LENGTH))
    return b"".join(blake2b(block.tobytes(), digest_size=_DIGEST_BYTES).digest() for block in blocks)


def _count_common_tokens(first: TokenArray, second: TokenArray) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    length = min(len(first), len(second))
    is_different = first[:length] != second[:length]
    return int(np.argmax(is_different)) if is_different.any() else length


def _pack_best_fit(lengths: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Return (indices into `lengths`, row by row; number of samples per row). Best-fit decreasing, in about
    constant time per sample.
    """
    rows: list[list[int]] = []
    rows_by_free_tokens: list[list[int]] = [[] for _ in range(capacity + 1)]
    free_mask = 0  # bit n is set if rows_by_free_tokens[n] is not empty
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        fitting = free_mask >> length  # rows with at least `length` free tokens
        if fitting:
            free_tokens = length + (fitting & -fitting).bit_length() - 1  # lowest set bit: the tightest row
            row = rows_by_free_tokens[free_tokens].pop()
            if not rows_by_free_tokens[free_tokens]:
                free_mask &= ~(1 << free_tokens)
            rows[row].append(index)
        else:
            free_tokens, row = capacity, len(rows)
            rows.append([index])
        if free_tokens > length:
            rows_by_free_tokens[free_tokens - length].append(row)
            free_mask |= 1 << (free_tokens - length)
    members = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=len(lengths))
    return members, np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def select_batch_rows(num_rows: int, *, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the rows of optimizer step `step` (from 0), over all workers.

    Every epoch is a new permutation seeded by (seed, epoch), and epochs follow one another without a gap, so a batch
    may span two epochs. The step alone determines the position in the data: resuming needs no other state, and any
    number of workers sees the same batches.
    """
    batch = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, num_rows)
        batch.append(int(_shuffle_rows(num_rows, seed, epoch)[offset]))
    return batch


@lru_cache(maxsize=4)
def _shuffle_rows(num_rows: int, seed: int, epoch: int) -> IntArray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)


def select_rank_rows(rows: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return a worker's share of a batch; in an uneven one, the last workers have one row less."""
    return list(rows[rank::world_size])


def count_steps(num_rows: int, *, batch_size: int, num_epochs: int, max_steps: int | None) -> int:
    """Return the number of optimizer steps of a run: `max_steps` if given, else enough for `num_epochs`; the last step
    is filled up from the next epoch.
    """
    if max_steps is not None:
        return max_steps
    return -(-num_rows * num_epochs // batch_size)
