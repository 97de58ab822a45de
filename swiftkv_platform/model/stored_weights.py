"""A model's weights by the names and shapes that they have in memory, read tensor by tensor or in parts.

Families that fuse experts in memory store them one by one, and quantised checkpoints store numbers with scales. Both
are converted here, following transformers' table of conversions, and only the needed parts of the files are read.
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
"""Other name under which a tied tensor may be stored."""
_ROWS = 1024
"""Number of rows of head and embedding that are compared at a time."""


def settle_head(config: Any, checkpoint: Checkpoint) -> None:
    """Set `config.tie_word_embeddings` to whether the files really tie the head, as transformers does.

    A stored head that differs from the stored embedding is used even if the configuration ties them. If none is stored,
    the configuration decides: the head is tied, or a tensor is missing.
    """
    if getattr(config, "tie_word_embeddings", False) and not {_HEAD, _EMBEDDING} - checkpoint.shards.keys():
        config.tie_word_embeddings = _are_equal(checkpoint, _HEAD, _EMBEDDING)


def check_finite(name: str, tensor: torch.Tensor, source: str | Path) -> None:
    """Raise `ModelError` for a weight with a NaN or an infinity, which would spoil every answer of the model."""
    # The extremes are NaN if any element is, and computing them needs no memory per element.
    if tensor.numel() and not tensor.is_meta and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise ModelError.of(
            "model.name_or_path",
            str(source),
            f": its {name} has values that are not finite; save the model again, or use an earlier checkpoint",
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
    """The tensors of the checkpoint from which one tensor in memory is made."""

    converter: WeightConverter | None = None
    """Converter of transformers; None for a tensor that is stored unchanged."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the checkpoint, by the pattern of the converter that matches them."""

    def add(self, pattern: str | None, name: str) -> None:
        self.sources.setdefault(pattern or "", []).append(name)

    @property
    def blocks(self) -> list[list[str]] | None:
        """Names by block of experts to stack, with the rows of a block (gates) above those of the next; None: not made
        by stacking."""
        if self.converter is None:
            return None
        merge, *concatenate = self.converter.operations
        stacked = isinstance(merge, MergeModulelist) and merge.dim == 0
        if not stacked or not all(isinstance(each, Concatenate) and each.dim == 1 for each in concatenate):
            return None
        return [self.sources[pattern] for pattern in self.converter.source_patterns]


class StoredWeights:
    """Reader of the tensors of a teacher or of a student, which has its teacher's conversions.

    Args:
        config: the model's configuration.
        dtype: dtype to read in; None keeps the stored one.
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
        """Open the weights of the teacher at `path`. Raises `ModelError`."""
        return cls(Checkpoint.open(path, revision=revision), config, dtype)

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint stores a tensor under this name, not only as tied to another."""
        return name in self._stored

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a tensor by its name in memory. `part`: read only this part; if the tensor can only be converted whole,
        the rest is read and dropped. Raises `ModelError`: it holds numbers that are not finite."""
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
        """Read stacked experts [num_experts, rows, columns], with the rows of all blocks one above the other."""
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


def _natural(name: str) -> list[tuple[int, str]]:
    # By the number of its digits, since `int` refuses thousands of them.
    return [(len(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
