"""Weights in the order that the kernels' products read them in, and memory for them in huge pages.

A decode step reads all weights once, and with small pages also page tables. Linux backs memory with huge pages on
request (`madvise`), unless they are switched off; elsewhere weights stay where PyTorch puts them.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from swiftkv_platform.model.weights.quantization import IntegerWeight

PAGE = 2 << 20
ALIGNMENT = 64


class Arena:
    """A memory area that tensors are moved into; it is freed with the last of them.

    Args:
        num_bytes: capacity in bytes. Memory is taken as the area is filled.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = _huge_pages(num_bytes + PAGE)
        self._next = 0
        if self._buffer is not None:
            self._buffer = self._buffer[-self._buffer.data_ptr() % PAGE :]

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into the arena and return the copy, or `tensor` itself without huge pages or room."""
        end = self._next + tensor.nbytes
        if self._buffer is None or end > len(self._buffer) or not tensor.numel():
            return tensor
        moved = self._buffer[self._next : end].view(tensor.dtype).view(tensor.shape)
        self._next = end + -end % ALIGNMENT
        return moved.copy_(tensor)


def _huge_pages(num_bytes: int) -> torch.Tensor | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no huge pages, or no overcommit for whole and packed weights together
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)


COLUMNS = 32
"""Outputs of a block of packed weights."""
MOST_INPUTS = 1 << 16
"""Inputs whose products, of 8 bits each, fit into int32 together."""
GROUP = 32
"""Number that groups of inputs in int4 are a multiple of."""


def padded(vector: torch.Tensor) -> torch.Tensor:
    """A norm's weight or a bias [size] as the kernels read it: in float32, up to a whole block."""
    return F.pad(vector.detach().float(), (0, -vector.numel() % COLUMNS))


class Packed(NamedTuple):
    """A weight as the products read it; all but the numbers are for integers."""

    numbers: torch.Tensor
    """[num_blocks, size_in / n, COLUMNS, n] in bfloat16 (n = 2) or int8 (4); in int4 uint8 [num_blocks, size_in / 8,
    COLUMNS, 4], 8 added, the first four of eight inputs in the low bits."""
    scales: torch.Tensor | None = None
    """Scales of the outputs, float32 [num_blocks, COLUMNS]."""
    offsets: torch.Tensor | None = None
    """128 times the sum of an output's integers, int32 [num_blocks, COLUMNS]."""
    multipliers: torch.Tensor | None = None
    """Multipliers of the groups of an output's inputs in int4, uint8 [num_blocks, size_in / group, COLUMNS]."""

    def moved_into(self, arena: Arena) -> Packed:
        """The same in an arena."""
        return Packed(arena.move(self.numbers), *(part if part is None else arena.move(part) for part in self[1:]))


def packs(weight: IntegerWeight) -> bool:
    """Whether the products can take a weight: as many inputs as they multiply together, sums that int32 holds, and
    multipliers for int4."""
    if weight.integers.shape[1] > MOST_INPUTS:
        return False
    if weight.form == "int8":
        return weight.integers.shape[1] % 4 == 0
    return weight.group_size % GROUP == 0 and weight.multipliers() is not None


def pack(weight: torch.Tensor | IntegerWeight) -> Packed:
    """A weight [size_out, size_in] that `packs` as `linear` reads it."""
    if isinstance(weight, torch.Tensor):
        return Packed(_in_blocks(weight.detach(), 2))
    integers = weight.integers
    if weight.form == "int8":
        scales = weight.scale.float()
        return Packed(_in_blocks(integers, 4), _blocks(scales).squeeze(-1), _offsets(integers))
    multipliers = weight.multipliers()
    assert multipliers is not None, "scales of int4 that are no multiples of one"
    scales = weight.scale[:, :1].float() / multipliers[:, :1]
    first, second = (integers + 8).view(torch.uint8).unflatten(1, (-1, 2, 4)).unbind(2)
    wide = integers.unflatten(1, (-1, weight.group_size)) * multipliers.to(torch.int8).unsqueeze(-1)
    return Packed(
        _in_blocks((first | second << 4).flatten(1), 4),
        _blocks(scales).squeeze(-1),
        _offsets(wide.flatten(1)),
        _blocks(multipliers).transpose(1, 2).contiguous(),
    )


def _offsets(integers: torch.Tensor) -> torch.Tensor:
    return 128 * _blocks(integers).sum(-1, dtype=torch.int32)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[size_out, size_in] -> [num_blocks, COLUMNS, size_in], with rows of zeros."""
    return torch.unflatten(F.pad(weight, (0, 0, 0, -weight.shape[0] % COLUMNS)), 0, (-1, COLUMNS))


def _in_blocks(weight: torch.Tensor, together: int) -> torch.Tensor:
    """[size_out, size_in] -> [num_blocks, size_in / together, COLUMNS, together]."""
    return torch.unflatten(_blocks(weight), 2, (-1, together)).transpose(1, 2).contiguous()


def pack_gated(gate: torch.Tensor | IntegerWeight, up: torch.Tensor | IntegerWeight) -> Packed:
    """Two weights [size_out, size_in] of one type as `gated_linear` reads them: their blocks in turn."""

    def in_turn(one: Any, other: Any) -> Any:
        return None if one is None else torch.stack([one, other], dim=1).flatten(0, 1)

    return Packed(*map(in_turn, pack(gate), pack(up)))
