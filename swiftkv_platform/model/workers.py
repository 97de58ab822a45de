"""Collectives of the worker processes: torch's default process group, or one process alone."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Workers:
    """The workers of a job. All methods except `get_share` are collective; properties are not.

    Args:
        in_step: whether forward passes are collective, so that all workers must run the same number.
        alone: this process is the only worker.
    """

    def __init__(self, *, in_step: bool = False, alone: bool = False) -> None:
        self._alone = alone
        self.in_step = in_step and self.size > 1

    @property
    def rank(self) -> int:
        return dist.get_rank() if self._is_distributed else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if self._is_distributed else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def _is_distributed(self) -> bool:
        return not self._alone and dist.is_available() and dist.is_initialized()

    def get_share(self, indices: Sequence[int]) -> list[int]:
        """Return every `size`-th of the `indices`, starting at this worker's rank."""
        return list(indices[self.rank :: self.size])

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return the values of all workers by rank, on every worker."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def count_local(self) -> int:
        """Return the number of workers on this machine."""
        return self.gather(socket.gethostname()).count(socket.gethostname())

    def broadcast_from_first(self, value: T) -> T:
        """Return the first worker's `value`, on every worker."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this worker's item of the first worker's `values`, one per worker. The others pass None."""
        if self.size == 1:
            assert values is not None, "the first worker must pass the values"
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if values is None else list(values))
        received: T = mine[0]
        return received
