"""Safetensors checkpoints in a directory or on the hub: names, shapes and dtypes from index and headers, and single
tensors on demand.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file

from swiftkv_platform.errors import ModelError
from swiftkv_platform.sources.loader_rules import is_plain_file_name

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_GIT_LFS_PREFIX = b"version https://git-lfs"

Part = slice | tuple[slice, ...]
"""Part of a tensor: a range of rows, or a range of each of its first dimensions."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """Data type; None if this project does not support it."""
    num_bytes: int


class LazyTensors(Mapping[str, torch.Tensor], ABC):
    """Mapping of tensors that are read on access."""

    @property
    @abstractmethod
    def locations(self) -> Mapping[str, Any]:
        """Location of each tensor by its name."""

    @abstractmethod
    def read(self, name: str, rows: slice | None = None, /) -> torch.Tensor:
        """Read a tensor, or only `rows` of its first dimension."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.locations  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def __len__(self) -> int:
        return len(self.locations)

    def select(self, names: Iterable[str]) -> LazyTensors:
        """Return the tensors with these names; names without a tensor are left out."""
        return _SelectedTensors(self, {name: self.locations[name] for name in names if name in self})


class _SelectedTensors(LazyTensors):
    def __init__(self, tensors: LazyTensors, locations: Mapping[str, Any]) -> None:
        self._tensors, self._locations = tensors, locations

    @property
    def locations(self) -> Mapping[str, Any]:
        return self._locations

    def read(self, name: str, rows: slice | None = None, /) -> torch.Tensor:
        return self._tensors.read(name, rows)


@dataclass(frozen=True, eq=False)
class Checkpoint(LazyTensors):
    """The tensors of a checkpoint and the files that hold them."""

    source: str
    """Directory or hub id, as the caller named it."""
    shards: dict[str, str]
    """File name by tensor."""
    hub_arguments: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, source: str | Path, **arguments: Any) -> Checkpoint:
        """Find the tensors of `source` as transformers does; for a sharded checkpoint only the index is read.
        `arguments`: the hub arguments of `from_pretrained`; others are ignored. Raises `ModelError`: there are no
        weights, only pickles, or a file is unreadable."""
        hub = select_hub_arguments(arguments)
        if weights := _find_file(source, SAFE_WEIGHTS_NAME, hub):
            with _open_shard(weights, source) as file:
                return cls(str(source), dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME), hub)
        if index := _find_file(source, SAFE_WEIGHTS_INDEX_NAME, hub):
            shards = _read_weight_map(Path(index))
            if shards is None:
                raise _make_weights_error(source, f"{SAFE_WEIGHTS_INDEX_NAME} has no weight_map that can be read")
            if elsewhere := next((shard for shard in shards.values() if not is_plain_file_name(shard)), None):
                raise _make_weights_error(
                    source, f"{SAFE_WEIGHTS_INDEX_NAME} names {elsewhere[:200]!r}; use a file in the same directory"
                )
            return cls(str(source), shards, hub)
        if any(_find_file(source, name, hub) for name in (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)):
            raise _make_weights_error(
                source, "its weights are pickles (.bin), which may run code when read; save the model as safetensors"
            )
        raise _make_weights_error(source, f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")

    @classmethod
    def from_directory(cls, directory: Path) -> Checkpoint:
        """Find the tensors of all safetensors files in a directory, whatever the files' names. Raises `ModelError`."""
        shards: dict[str, str] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with _open_shard(path, directory) as file:
                shards |= dict.fromkeys(file.keys(), path.name)
        return cls(str(directory), shards)

    @property
    def locations(self) -> dict[str, str]:
        return self.shards

    def read(self, name: str, part: Part | None = None, /) -> torch.Tensor:
        return self.read_tensors([name], part)[name]

    def get_path(self, shard: str) -> Path:
        """Return the path of a file; one on the hub is downloaded."""
        path = self.find_file(shard)
        if path is None:
            raise _make_weights_error(self.source, f"its index names {shard}, which does not exist")
        return path

    @cached_property
    def names_by_shard(self) -> dict[str, list[str]]:
        """Names of tensors by file."""
        by_shard: dict[str, list[str]] = {}
        for name, shard in self.shards.items():
            by_shard.setdefault(shard, []).append(name)
        return by_shard

    def find_file(self, filename: str) -> Path | None:
        """Return the path of a file of any kind, or None."""
        path = _find_file(self.source, filename, self.hub_arguments)
        return None if path is None else Path(path)

    @cached_property
    def headers(self) -> dict[str, TensorInfo]:
        """Shapes and dtypes of all tensors. Raises `ModelError`: a tensor in the index is not in its file."""
        found: dict[str, tuple[str, TensorInfo]] = {}
        for shard in sorted(set(self.shards.values())):
            with _open_shard(self.get_path(shard), self.source) as file:
                for name in file.keys():  # noqa: SIM118  # the file is not a mapping
                    found[name] = shard, _read_info(file.get_slice(name))
        for name, shard in self.shards.items():
            if name not in found or found[name][0] != shard:
                raise _make_weights_error(self.source, f"its index lists {name} in {shard}, which does not contain it")
        return {name: found[name][1] for name in self.shards}

    def read_tensors(self, names: Iterable[str], part: Part | None = None) -> dict[str, torch.Tensor]:
        """Read tensors into new memory, so that no file stays mapped. `part`: read only this part of each."""
        by_shard: dict[str, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.shards[name], []).append(name)
        read: dict[str, torch.Tensor] = {}
        for shard, wanted in by_shard.items():
            with _open_shard(self.get_path(shard), self.source) as file:
                read |= {name: _read_tensor(file, name, part) for name in wanted}
        return read


def read_rows(tensors: Mapping[str, torch.Tensor], name: str, rows: slice | None) -> torch.Tensor:
    """Return rows of one of `tensors`, or all of it if `rows` is None; lazy tensors read only these rows."""
    if isinstance(tensors, LazyTensors):
        return tensors.read(name, rows)
    return tensors[name] if rows is None else tensors[name][rows]


def expand_ranges(part: Part | None, num_dims: int) -> tuple[slice, ...]:
    """Return `part` as one range per dimension of a tensor; None selects the whole tensor."""
    given = part if isinstance(part, tuple) else (slice(None) if part is None else part,)
    return (*given, *[slice(None)] * (num_dims - len(given)))


def select_hub_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a `from_pretrained` call that locate a model on the hub."""
    return {key: arguments[key] for key in _HUB_ARGUMENTS if arguments.get(key) is not None}


def _find_file(source: str | Path, filename: str, hub: dict[str, Any]) -> str | None:
    directory = Path(source)
    if directory.is_dir():
        path = directory / hub.get("subfolder", "") / filename
        return str(path) if path.is_file() else None
    try:
        found: str | None = cached_file(str(source), filename, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        raise _make_weights_error(source, str(error).splitlines()[0]) from error
    return found


def _read_weight_map(index: Path) -> dict[str, str] | None:
    """Return the file name of each tensor in an index; None if the index is not an object of strings."""
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    names = isinstance(shards, dict) and all(isinstance(shard, str) for shard in shards.values())
    return shards if names else None


@contextmanager
def _open_shard(path: str | Path, source: str | Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        why = f"is not a complete safetensors file ({error})"
        if _is_git_lfs_pointer(Path(path)):
            why = "is a Git LFS pointer without the weights; fetch them with `git lfs pull`"
        raise _make_weights_error(source, f"{Path(path).name} {why}") from error
    with file as opened:
        yield opened


def _is_git_lfs_pointer(path: Path) -> bool:
    """Whether a repository was cloned without the files that Git LFS keeps."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GIT_LFS_PREFIX)) == _GIT_LFS_PREFIX
    except OSError:
        return False


def _read_tensor(file: Any, name: str, part: Part | None) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
    return tensor.clone()


def _read_info(tensor: Any) -> TensorInfo:
    shape, dtype = tuple(tensor.get_shape()), _SAFETENSORS_DTYPES.get(tensor.get_dtype())
    count = torch.Size(shape).numel()
    return TensorInfo(shape, dtype, count * (1 if dtype is None else dtype.itemsize))


def _make_weights_error(source: str | Path, why: str) -> ModelError:
    return ModelError(
        f"cannot read the weights of {str(source)!r}: {why}", field="model.name_or_path", value=str(source)
    )
