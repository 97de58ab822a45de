"""Adapters: the tensors in which a student differs from its base model, and the file that describes them.

An adapter is a model directory without the base's weights. `swiftkv_adapter.json` names the base, the digest of each of
its tensors, and which of them are replaced, dropped or cast. This module does not locate the base.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from swiftkv_platform.errors import ModelError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.student_shape import StudentShape

ADAPTER_FILE = "swiftkv_adapter.json"
ADAPTER_WEIGHTS_PREFIX = "adapter"
"""Prefix of an adapter's weight files, numbered from 1."""
_MAX_SHOWN_NAMES = 3
"""Max number of tensor names in a message."""


class BaseTensor(FrozenBaseModel):
    """A tensor of the base model."""

    dtype: str
    """PyTorch's name, such as `bfloat16`."""
    shape: tuple[int, ...]
    sha256: str
    """Hex digest of the tensor's bytes, row by row, little-endian."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> BaseTensor:
        return cls(dtype=get_dtype_name(tensor.dtype), shape=tuple(tensor.shape), sha256=_compute_sha256(tensor))


class BaseModelReference(FrozenBaseModel):
    """The model that an adapter is applied to."""

    name_or_path: str
    """Name in the form of a job's `model.name_or_path`: hub id, directory, `.gguf` file, `s3://` prefix or built-in."""
    revision: str | None = None
    """Hub revision."""
    digest: str
    """SHA-256 of one line `name dtype [2, 3] sha256` for each tensor, sorted by name, each ended by a newline."""
    tensors: dict[str, BaseTensor]
    """Tensors in the base model's weight files, by name."""


class AdapterConfig(FrozenBaseModel):
    """Content of `swiftkv_adapter.json`."""

    format_version: Literal[1] = 1
    base: BaseModelReference
    swiftkv: StudentShape
    added: tuple[str, ...]
    """Tensors that are stored whole in the adapter's files, since the base has none of the same name."""
    replaced: tuple[str, ...] = ()
    """Tensors of the adapter's files that replace the base's."""
    dropped: tuple[str, ...] = ()
    """Tensors of the base that the student does not have."""
    cast: dict[str, str] = {}
    """Tensors of the base that the student holds in another dtype, and that dtype."""

    @classmethod
    def parse(cls, data: bytes | str | Mapping[str, Any], source: str) -> AdapterConfig:
        """Read a `swiftkv_adapter.json`. Raises `ModelError`."""
        try:
            document = data if isinstance(data, Mapping) else json.loads(data)
            # Validate in JSON mode, which accepts an array for a tuple.
            return cls.model_validate_json(json.dumps(document))
        except ValueError as error:  # pydantic's is one
            why = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {str(first['input'])[:64]!r}"
            raise ModelError(
                f"{ADAPTER_FILE} of {source!r} cannot be read ({why}); use one that `swiftkv export --adapter` of this "
                "version wrote",
                field=ADAPTER_FILE,
                value=source,
            ) from error

    def check_shape(self, config: Any, source: str) -> None:
        """Raise `ModelError` if `config.json` describes another student than this adapter."""
        found = StudentShape.from_config(config)
        for name, value in self.swiftkv:
            if getattr(found, name) != value:
                raise ModelError(
                    f"{name} is {getattr(found, name)!r} in config.json of the adapter {source!r}, and {value!r} in "
                    f"its {ADAPTER_FILE}; use both files as `swiftkv export --adapter` wrote them",
                    field=name,
                    value=getattr(found, name),
                )

    def check_adapter_tensor_names(self, names: Iterable[str], source: str) -> None:
        """Raise `ModelError` unless `names`, the tensors of the adapter's files, are the added and replaced ones."""
        if difference := _describe_difference({*self.added, *self.replaced}, names):
            advice = "use its files as `swiftkv export --adapter` wrote them"
            raise ModelError(f"the adapter {source!r} {difference}; {advice}", field="adapter", value=source)

    def check_base_tensor_names(self, names: Iterable[str], base_path: str) -> None:
        """Raise `ModelError` unless the base at `base_path` has the tensor `names` of the adapter's base."""
        if difference := _describe_difference(self.base.tensors, names):
            raise self.make_base_error(f"{base_path!r} {difference}", base_path)

    def check_base_header(self, name: str, dtype: str, shape: tuple[int, ...], base_path: str) -> None:
        """Raise `ModelError` if a tensor of the base has another dtype or shape than the adapter's base."""
        expected = self.base.tensors[name]
        for found, wanted in ((list(shape), list(expected.shape)), (dtype, expected.dtype)):
            if found != wanted:
                problem = f"{name} of {base_path!r} is {found}, but the adapter was made for {wanted}"
                raise self.make_base_error(problem, base_path)

    def check_base_tensor(self, name: str, tensor: torch.Tensor, base_path: str) -> None:
        """Raise `ModelError` if a tensor of the base has another dtype, shape or content than the adapter's base."""
        self.check_base_header(name, get_dtype_name(tensor.dtype), tuple(tensor.shape), base_path)
        found, expected = _compute_sha256(tensor), self.base.tensors[name].sha256
        if found != expected:
            raise self.make_base_error(
                f"{name} of {base_path!r} has the SHA-256 {found}, but the adapter was made for {expected}", base_path
            )

    def keeps_base_tensor(self, name: str) -> bool:
        """Whether the student has the base's tensor."""
        return name not in self.replaced and name not in self.dropped

    def cast_base_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the base in the student's dtype."""
        return tensor.to(getattr(torch, self.cast[name])) if name in self.cast else tensor

    def apply_to_base(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, base_prefix: str, source: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the student's tensors from the adapter's and the base's; the base's names begin with `base_prefix`.
        Raises `ModelError` at the first tensor that differs from the adapter's base, or at the end for missing ones."""
        own, base, name_of_base = set(), set(), self.base.name_or_path
        for full_name, tensor in tensors:
            name = full_name.removeprefix(base_prefix)
            if name == full_name:
                own.add(name)
                yield name, tensor
                continue
            base.add(name)
            if name not in self.base.tensors:
                continue  # named below, with all others
            self.check_base_tensor(name, tensor, name_of_base)
            if self.keeps_base_tensor(name):
                yield name, self.cast_base_tensor(name, tensor)
        self.check_adapter_tensor_names(own, source)
        self.check_base_tensor_names(base, name_of_base)

    def make_base_error(self, problem: str, base_path: str) -> ModelError:
        """Return the error for a base that is not the adapter's."""
        revision = "" if self.base.revision is None else f" at revision {self.base.revision!r}"
        return ModelError(
            f"base.name_or_path: {problem}; the adapter only fits {self.base.name_or_path!r}{revision} "
            f"with digest {self.base.digest}",
            field="base.name_or_path",
            value=base_path,
        )


def read_adapter(directory: Path) -> AdapterConfig | None:
    """Read the description of the adapter in `directory`; None if it holds no adapter. Raises `ModelError`."""
    path = directory / ADAPTER_FILE
    return AdapterConfig.parse(path.read_bytes(), str(directory)) if path.is_file() else None


def compute_base_digest(tensors: Mapping[str, BaseTensor]) -> str:
    """Return one hex digest of all of a model's tensors, however they are split into files."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.sha256}\n".encode())
    return digest.hexdigest()


def get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compute_sha256(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # a tensor without dimensions cannot be viewed as bytes
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _describe_difference(expected: Iterable[str], names: Iterable[str]) -> str:
    """Name the missing tensors or, without any, the unexpected tensors; empty if the names are equal."""
    wanted, found = set(expected), set(names)
    if wanted == found:
        return ""
    ordered = sorted(wanted - found or found - wanted)
    problem = "lacks" if wanted - found else "has unexpected"
    count = f"{len(ordered)} tensor{'s' if len(ordered) > 1 else ''}"
    return f"{problem} {count}: {', '.join(ordered[:_MAX_SHOWN_NAMES])}" + (
        ", ..." if len(ordered) > _MAX_SHOWN_NAMES else ""
    )
