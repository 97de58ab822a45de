"""Batches of packed rows as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_tensors(batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """Return the arrays of `PackedRows.batch` as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}
