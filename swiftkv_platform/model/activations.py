"""Storage for activations that wait for their next layer: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MAX_ACTIVATION_BYTES = 4 << 30
"""Bytes of activations that a worker keeps in host memory by default."""


class KeptTensor:
    """A tensor in an `ActivationStore`; deleting this object frees its memory or file."""

    def __init__(self, store: ActivationStore, tensor: torch.Tensor | None, path: Path | None) -> None:
        self._store, self._tensor, self._path = store, tensor, path

    def load(self, device: torch.device | str) -> torch.Tensor:
        if self._tensor is not None:
            return self._tensor.to(device)
        assert self._path is not None, "what is not in memory is in a file"
        return load_file(self._path)["x"].to(device)

    def __del__(self) -> None:
        if self._tensor is not None:
            self._store.num_bytes -= self._tensor.nbytes
        elif self._path is not None:
            self._path.unlink(missing_ok=True)


class ActivationStore:
    """Store of tensors, up to `max_bytes` in host memory and the rest in files.

    Args:
        max_bytes: maximum bytes in memory.
        directory: directory of the files.
    """

    def __init__(self, max_bytes: int, directory: Path) -> None:
        self.num_bytes = 0
        """Bytes in memory."""
        self._max_bytes = max_bytes
        self._directory = directory
        self._num_files = 0

    @classmethod
    @contextmanager
    def open(cls, max_bytes: int) -> Iterator[ActivationStore]:
        """Open a store whose files are deleted when the block ends."""
        with tempfile.TemporaryDirectory(prefix="activations-") as directory:
            yield cls(max_bytes, Path(directory))

    def keep(self, tensor: torch.Tensor) -> KeptTensor:
        if self.num_bytes + tensor.nbytes <= self._max_bytes:
            self.num_bytes += tensor.nbytes
            return KeptTensor(self, tensor.cpu(), None)
        self._num_files += 1
        path = self._directory / f"{self._num_files:08d}.safetensors"
        save_file({"x": tensor.detach().cpu().contiguous()}, path)
        return KeptTensor(self, None, path)
