"""Passes over a model with one layer in memory at a time: the source of its weights, and the store of all rows'
activations between layers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from swiftkv_platform.errors import InvalidInputError

TokenBatch = torch.Tensor | Mapping[str, torch.Tensor]
"""Token ids [batch, num_tokens] or [num_tokens], or a mapping with `input_ids` and `position_ids` of one shape (packed
rows)."""
MAX_ACTIVATION_BYTES = 4 << 30
"""Default max bytes of activations in a worker's host memory."""


class LayerSource(Protocol):
    """A student, and functions that load and free its weights module by module."""

    model: Any

    def load_parameters(self, module: nn.Module, *, with_added: bool = True) -> None:
        """Load the parameters of `module`; without `with_added`, only those that the teacher has too."""

    def free_parameters(self, module: nn.Module) -> None:
        """Free the parameters of `module`."""


@contextmanager
def load_module(source: LayerSource, module: nn.Module, *, with_added: bool = True) -> Iterator[None]:
    source.load_parameters(module, with_added=with_added)
    yield
    source.free_parameters(module)


def make_decoder_inputs(batch: TokenBatch, decoder: Any, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the decoder's arguments for a batch. Raises `InvalidInputError`: it does not hold ids of this model."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, vocab_size = given.get("input_ids"), decoder.config.vocab_size
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype not in (torch.int64, torch.int32):
        shown = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidInputError(
            f"calibration has a batch of {shown}; expected int64 or int32 token ids, "
            "[batch, num_tokens] or [num_tokens]",
            field="calibration",
            value=shown,
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        invalid = next(i for i in ids.flatten().tolist() if not 0 <= i < vocab_size)
        raise InvalidInputError(
            f"calibration has the token id {invalid}; this model's vocabulary accepts 0..{vocab_size - 1}",
            field="calibration",
            value=invalid,
        )
    named = {name: given[name] for name in ("input_ids", "position_ids") if name in given}
    return {name: (t[None] if t.ndim == 1 else t).to(device) for name, t in named.items()}


class StoredActivation:
    """A tensor in an `ActivationStore`. Deleting this object frees its memory or file."""

    def __init__(self, store: ActivationStore, tensor: torch.Tensor | None, path: Path | None) -> None:
        self._store, self._tensor, self._path = store, tensor, path

    def load(self, device: torch.device | str) -> torch.Tensor:
        if self._tensor is not None:
            return self._tensor.to(device)
        assert self._path is not None, "a stored activation has a tensor or a file"
        return load_file(self._path)["x"].to(device)

    def __del__(self) -> None:
        if self._tensor is not None:
            self._store.num_bytes -= self._tensor.nbytes
        elif self._path is not None:
            self._path.unlink(missing_ok=True)


class ActivationStore:
    """Stores tensors, up to `max_bytes` in host memory and the rest in files.

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

    def save(self, tensor: torch.Tensor) -> StoredActivation:
        if self.num_bytes + tensor.nbytes <= self._max_bytes:
            self.num_bytes += tensor.nbytes
            return StoredActivation(self, tensor.cpu(), None)
        self._num_files += 1
        path = self._directory / f"{self._num_files:08d}.safetensors"
        save_file({"x": tensor.detach().cpu().contiguous()}, path)
        return StoredActivation(self, None, path)
