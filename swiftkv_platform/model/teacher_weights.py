"""A teacher's weights under the names and in the shapes that they have in memory, tensor by tensor or some rows of one.

Families that fuse experts in memory store them one by one, and FP8 checkpoints store numbers with scales: either is put
together here from no more of the files than what is asked for. It knows transformers' table of conversions, no student.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming, rename_source_key

from swiftkv_platform.model.checkpoint import Checkpoint
from swiftkv_platform.model.fp8 import is_fp8, is_scale, read_tensors

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass
class _Stored:
    """Tensors of the checkpoint that one tensor in memory is made from."""

    converter: WeightConverter | None = None
    """None for a tensor that is stored as it is."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the checkpoint, by the pattern of the converter that fits them."""

    def add(self, pattern: str | None, name: str) -> None:
        self.sources.setdefault(pattern or "", []).append(name)

    @property
    def stacks(self) -> bool:
        """Whether rows are whole tensors of the checkpoint: experts."""
        first = None if self.converter is None else self.converter.operations[0]
        return isinstance(first, MergeModulelist) and first.dim == 0


class TeacherWeights:
    """Reads the tensors of a teacher.

    Args:
        config: the teacher's configuration.
        dtype: dtype to read in; None keeps what is stored.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype | None = None) -> None:
        self.checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._stored: dict[str, _Stored] = {}
        fp8 = is_fp8(config)
        transforms = get_checkpoint_conversion_mapping(config.model_type) or []
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        for name in sorted(checkpoint.shards, key=_natural):  # experts in their order
            if fp8 and is_scale(name, checkpoint):
                continue
            target, pattern = rename_source_key(name, renamings, converters)
            stored = self._stored.setdefault(target, _Stored(by_pattern.get(pattern or "")))
            stored.add(pattern, name)

    @classmethod
    def open(
        cls, path: str | Path, config: Any, *, dtype: torch.dtype | None = None, revision: str | None = None
    ) -> TeacherWeights:
        """The weights of the teacher at `path`. Raises `ModelError`."""
        return cls(Checkpoint.open(path, revision=revision), config, dtype)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor by its name in memory.

        Args:
            rows: reads no more than these, along the first dimension.
        """
        if name == _HEAD and name not in self._stored:
            name = _EMBEDDING  # a tied head is stored once
        stored = self._stored[name]
        if stored.converter is None:
            (source,) = stored.sources[""]
            return self._tensors([source], rows)[0]
        return self._convert(name, stored, stored.converter, rows)

    def _convert(self, name: str, stored: _Stored, converter: WeightConverter, rows: slice | None) -> torch.Tensor:
        for pattern, sources in stored.sources.items():
            for tensor in self._tensors(sources[rows] if rows and stored.stacks else sources):
                converter.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type]  # a tensor does as well
        made: torch.Tensor = converter.convert(name, config=self._config)[name]
        return made if rows is None or stored.stacks else made[rows].clone()

    def _tensors(self, names: Sequence[str], rows: slice | None = None) -> list[torch.Tensor]:
        read = []
        for name in names:
            tensor = read_tensors(self.checkpoint, [name], rows)[name]
            read.append(tensor if self._dtype is None else tensor.to(self._dtype))
        return read


def _natural(name: str) -> list[tuple[bool, str | int]]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]
