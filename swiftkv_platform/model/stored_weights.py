"""A model's weights under the names and in the shapes that they have in memory, tensor by tensor or a part of one.

Families that fuse experts in memory store them one by one, and quantised checkpoints store numbers with scales: either
is put together here from no more of the files than what is asked for. It knows transformers' table of conversions, no
student.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.checkpoint import Checkpoint, Part, ranges
from swiftkv_platform.model.stored_quantization import as_floats, is_quantized

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ALIAS = {_HEAD: _EMBEDDING, _EMBEDDING: _HEAD}
"""Name under which a tied tensor may be stored instead."""
_ROWS = 1024
"""Rows of head and embedding that are compared at a time."""


def settle_head(config: Any, checkpoint: Checkpoint) -> None:
    """Let `config.tie_word_embeddings` say which tensor is the head, as transformers finds it in the files.

    A head that is stored beside the embedding and differs from it is the head, whatever a configuration says. Without
    one, the configuration decides: tied, or a tensor that is missing.
    """
    if getattr(config, "tie_word_embeddings", False) and not {_HEAD, _EMBEDDING} - checkpoint.shards.keys():
        config.tie_word_embeddings = _are_equal(checkpoint, _HEAD, _EMBEDDING)


def check_finite(name: str, tensor: torch.Tensor, source: str | Path) -> None:
    """Raises `ModelError` for a weight with NaN or infinity in it, which every answer of its model would be."""
    # The extremes are NaN where any number is, and need no memory for each number.
    if tensor.numel() and not tensor.is_meta and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise ModelError.of(
            "model.name_or_path",
            str(source),
            f": its {name} holds numbers that are not finite; save the model again, or use an earlier checkpoint",
        )


def _are_equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    checkpoint = as_floats(checkpoint)
    shape = checkpoint.headers[name].shape
    if shape != checkpoint.headers[other].shape:
        return False
    for start in range(0, shape[0], _ROWS):
        a, b = checkpoint.tensors([name, other], slice(start, start + _ROWS)).values()
        if not torch.equal(a, b.to(a.dtype)):
            return False
    return True


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
    def blocks(self) -> list[list[str]] | None:
        """Experts that are stacked, rows of one block (gates) above those of the next; None: made otherwise."""
        if self.converter is None:
            return None
        merge, *concatenate = self.converter.operations
        stacked = isinstance(merge, MergeModulelist) and merge.dim == 0
        if not stacked or not all(isinstance(each, Concatenate) and each.dim == 1 for each in concatenate):
            return None
        return [self.sources[pattern] for pattern in self.converter.source_patterns]


class StoredWeights:
    """Reader of the tensors of a teacher, or of a student, whose conversions are its teacher's.

    Args:
        config: the model's configuration.
        dtype: dtype to read in; None keeps what is stored.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype | None = None) -> None:
        self.checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._stored: dict[str, _Stored] = {}
        self._weights = as_floats(checkpoint) if is_quantized(config) else checkpoint
        transforms = get_checkpoint_conversion_mapping(config.model_type) or []
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        for name in sorted(self._weights.shards, key=_natural):  # experts in their order
            target, pattern = rename_source_key(name, renamings, converters)
            stored = self._stored.setdefault(target, _Stored(by_pattern.get(pattern or "")))
            stored.add(pattern, name)

    @classmethod
    def open(
        cls, path: str | Path, config: Any, *, dtype: torch.dtype | None = None, revision: str | None = None
    ) -> StoredWeights:
        """The weights of the teacher at `path`. Raises `ModelError`."""
        return cls(Checkpoint.open(path, revision=revision), config, dtype)

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint stores a tensor under a name of its own."""
        return name in self._stored

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A tensor by its name in memory. `part`: reads no more than this. Of what has to be converted as a whole, the
        rest is read and let go of. Raises `ModelError`: it holds numbers that are not finite."""
        tensor = self._read(name, part)
        check_finite(name, tensor, self.checkpoint.source)
        return tensor

    def _read(self, name: str, part: Part | None) -> torch.Tensor:
        # A tied head is stored once, under either name.
        stored = self._stored[name if name in self._stored else _ALIAS.get(name, name)]
        if stored.converter is None:
            (source,) = stored.sources[""]
            return self._tensors([source], part)[0]
        if (blocks := stored.blocks) is not None:
            return self._stack(blocks, part)
        made = self._convert(name, stored, stored.converter)
        return made if part is None else made[part].clone()

    def _stack(self, blocks: list[list[str]], part: Part | None) -> torch.Tensor:
        """Experts [num_experts, rows, columns], the rows of all blocks one above the other."""
        experts, rows, columns = ranges(part, 3)
        heights = [self._weights.headers[block[0]].shape[0] for block in blocks]
        first, last, _ = rows.indices(sum(heights))
        read, start = [], 0
        for block, height in zip(blocks, heights, strict=True):
            own = slice(max(first - start, 0), min(last - start, height))
            if own.start < own.stop:
                read.append(torch.stack(self._tensors(block[experts], (own, columns))))
            start += height
        return read[0] if len(read) == 1 else torch.cat(read, dim=1)

    def _convert(self, name: str, stored: _Stored, converter: WeightConverter) -> torch.Tensor:
        for pattern, sources in stored.sources.items():
            for tensor in self._tensors(sources):
                converter.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type]  # a tensor does as well
        made: torch.Tensor = converter.convert(name, config=self._config)[name]
        return made

    def _tensors(self, names: Sequence[str], part: Part | None = None) -> list[torch.Tensor]:
        read = []
        for name in names:
            tensor = self._weights.tensors([name], part)[name]
            read.append(tensor if self._dtype is None else tensor.to(self._dtype))
        return read


def _natural(name: str) -> list[tuple[bool, str | int]]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]
