"""Numbers on their way from the host to the model's device. Knows no model and no schedule.

A blocking copy to a GPU waits until the GPU has done all that was asked of it so far. These do not: CUDA takes small
copies from pageable memory over before the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 8
"""Bytes that each array's start is a multiple of, whatever its type."""


_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, in one copy; on a CPU they are not copied."""
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
    """Indices on `device`, int64."""
    return to_device([np.array(indices, dtype=np.int64)], device)[0]


def take(x: torch.Tensor, indices: Sequence[int], dim: int = 0) -> torch.Tensor:
    """The entries of `x` at `indices` along `dim`; `x` itself where that is all of them in their order."""
    if len(indices) == x.shape[dim] and all(at == index for at, index in enumerate(indices)):
        return x
    return x.index_select(dim, index_tensor(indices, x.device))
