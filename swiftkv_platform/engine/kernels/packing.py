"""Packs weights in the order in which the kernels' products read them, into memory with huge pages.

A decode step reads all weights once. With small pages it also reads many page table entries. Linux provides huge pages
on request (`madvise`) unless they are disabled. Elsewhere, weights stay in PyTorch's memory."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from swiftkv_platform.model.weights.quantization import IntegerWeight, WeightFormat

HUGE_PAGE_BYTES = 2 << 20
TENSOR_ALIGNMENT = 64
"""Alignment in bytes of tensors that PyTorch allocates on a CPU."""


class Arena:
    """A memory area with huge pages, to which tensors are moved. It is freed with the last tensor.

    Args:
        num_bytes: capacity in bytes. Memory is used only as far as the area is filled.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = _allocate_huge_pages(num_bytes + HUGE_PAGE_BYTES)
        self._next = 0
        if self._buffer is not None:
            self._buffer = self._buffer[-self._buffer.data_ptr() % HUGE_PAGE_BYTES :]

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the arena and return the copy, or `tensor` itself if the arena is full or has no huge
        pages."""
        end = self._next + tensor.nbytes
        if self._buffer is None or end > len(self._buffer) or not tensor.numel():
            return tensor
        moved = self._buffer[self._next : end].view(tensor.dtype).view(tensor.shape)
        self._next = end + -end % TENSOR_ALIGNMENT
        return moved.copy_(tensor)


class SeparateArenas(Arena):
    """An arena for each large tensor, which is freed with the tensor."""

    def __init__(self) -> None:
        super().__init__(0)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to an arena of its own and return the copy, or `tensor` itself if it fills no huge page."""
        return tensor if tensor.nbytes < HUGE_PAGE_BYTES else Arena(tensor.nbytes).move(tensor)


def _allocate_huge_pages(num_bytes: int) -> torch.Tensor | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # huge pages are disabled, or memory cannot be overcommitted
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)


BLOCK_COLUMNS = 32
"""Number of outputs in a block of packed weights."""
MAX_INPUTS = 1 << 16
"""Max number of inputs whose sum of 8-bit products fits into int32."""
INT4_GROUP_SIZE = 32
"""The size of int4 groups of inputs is a multiple of this."""


def pad_to_block(vector: torch.Tensor) -> torch.Tensor:
    """Convert a norm's weight or a bias [size] for the kernels: float32, padded with zeros to a whole block."""
    return F.pad(vector.detach().float(), (0, -vector.numel() % BLOCK_COLUMNS))


class PackedWeight(NamedTuple):
    """A weight in the order in which the products read it. Only integers have scales, offsets and multipliers."""

    values: torch.Tensor
    """[num_blocks, size_in / n, COLUMNS, n] in bfloat16 (n = 2) or int8 (4); in int4 uint8 [num_blocks, size_in / 8,
    COLUMNS, 4], 8 added, the first four of eight inputs in the low bits."""
    scales: torch.Tensor | None = None
    """Scales of the outputs, float32 [num_blocks, COLUMNS]."""
    offsets: torch.Tensor | None = None
    """128 times the sum of an output's integers, int32 [num_blocks, COLUMNS]."""
    multipliers: torch.Tensor | None = None
    """Of int4, the factor by which each group of inputs multiplies its output's scale, uint8
    [num_blocks, size_in / group, COLUMNS]."""

    @property
    def integer_form(self) -> WeightFormat | None:
        """None: bfloat16."""
        if self.scales is None:
            return None
        return "int8" if self.multipliers is None else "int4"

    def move_into(self, arena: Arena) -> PackedWeight:
        return PackedWeight(arena.move(self.values), *(part if part is None else arena.move(part) for part in self[1:]))


def can_pack(weight: IntegerWeight) -> bool:
    """Whether the kernels support a weight: a multiple of the inputs per instruction, at most `MAX_INPUTS`, and for
    int4 multipliers."""
    if weight.integers.shape[1] > MAX_INPUTS:
        return False
    if weight.form == "int8":
        return weight.integers.shape[1] % 4 == 0
    return weight.group_size % INT4_GROUP_SIZE == 0 and weight.find_multipliers() is not None


def pack_weight(weight: torch.Tensor | IntegerWeight) -> PackedWeight:
    """Pack a weight [size_out, size_in] for `linear`. Integers must pass `can_pack`."""
    if isinstance(weight, torch.Tensor):
        return PackedWeight(_interleave_blocks(weight.detach(), 2))
    integers = weight.integers
    if weight.form == "int8":
        scales = weight.scale.float()
        return PackedWeight(
            _interleave_blocks(integers, 4), _split_blocks(scales).squeeze(-1), _compute_offsets(integers)
        )
    multipliers = weight.find_multipliers()
    assert multipliers is not None, "the int4 scales of an output are not multiples of one number"
    scales = weight.scale[:, :1].float() / multipliers[:, :1]
    first, second = (integers + 8).view(torch.uint8).unflatten(1, (-1, 2, 4)).unbind(2)
    wide = integers.unflatten(1, (-1, weight.group_size)) * multipliers.to(torch.int8).unsqueeze(-1)
    return PackedWeight(
        _interleave_blocks((first | second << 4).flatten(1), 4),
        _split_blocks(scales).squeeze(-1),
        _compute_offsets(wide.flatten(1)),
        _split_blocks(multipliers).transpose(1, 2).contiguous(),
    )


def _compute_offsets(integers: torch.Tensor) -> torch.Tensor:
    return 128 * _split_blocks(integers).sum(-1, dtype=torch.int32)


def _split_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[size_out, size_in] -> [num_blocks, COLUMNS, size_in], with rows of zeros."""
    return torch.unflatten(F.pad(weight, (0, 0, 0, -weight.shape[0] % BLOCK_COLUMNS)), 0, (-1, BLOCK_COLUMNS))


def _interleave_blocks(weight: torch.Tensor, num_adjacent: int) -> torch.Tensor:
    """[size_out, size_in] -> [num_blocks, size_in / together, COLUMNS, together]."""
    return torch.unflatten(_split_blocks(weight), 2, (-1, num_adjacent)).transpose(1, 2).contiguous()


def pack_gated(gate: torch.Tensor | IntegerWeight, up: torch.Tensor | IntegerWeight) -> PackedWeight:
    """Pack two weights [size_out, size_in] of the same type for `gated_linear`: blocks of gate and up alternate."""

    def interleave(one: Any, other: Any) -> Any:
        return None if one is None else torch.stack([one, other], dim=1).flatten(0, 1)

    return PackedWeight(*map(interleave, pack_weight(gate), pack_weight(up)))
