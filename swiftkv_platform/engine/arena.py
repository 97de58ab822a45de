"""Memory for weights in huge pages: a decode step reads them all once, and with small pages waits for page tables too.

Linux gives huge pages to memory that asks for them (`madvise`), if they are not switched off; elsewhere weights stay
where PyTorch puts them.
"""

from __future__ import annotations

import mmap

import torch

PAGE = 2 << 20
"""Bytes of a huge page."""
ALIGNMENT = 64
"""Bytes to a multiple of which tensors are put."""


class Arena:
    """One piece of memory that tensors are moved into; it is given back when the last of them is gone.

    Args:
        num_bytes: most that may be moved into it. It takes memory as it is filled.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = _huge_pages(num_bytes + PAGE)
        self._next = 0
        if self._buffer is not None:
            self._buffer = self._buffer[-self._buffer.data_ptr() % PAGE :]

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in the arena; `tensor` itself where there is none, or no more room."""
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
    except OSError:  # a kernel without them, or one that promises no memory for whole and packed weights together
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)
