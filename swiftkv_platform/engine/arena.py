"""Memory for weights in huge pages: a decode step reads all weights once, and with small pages also page tables.

Linux backs memory with huge pages on request (`madvise`), unless they are switched off; elsewhere weights stay where
PyTorch puts them.
"""

from __future__ import annotations

import mmap

import torch

PAGE = 2 << 20
"""Bytes of a huge page."""
ALIGNMENT = 64
"""Alignment of tensors in bytes."""


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
