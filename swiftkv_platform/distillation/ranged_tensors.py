"""Remote safetensors files, of which only the ranges of the wanted tensors or rows are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from swiftkv_platform.distillation.pieces import Fetched, ReadRange
from swiftkv_platform.errors import ArtifactCorruptError
from swiftkv_platform.model.checkpoint import LazyTensors

_HEADER_BYTES = 1 << 16
"""Bytes to read first; most headers fit."""


class RangedTensors(LazyTensors):
    """Tensors of the safetensors files among `sizes`, each read on access.

    The format has no checksums: only headers and ranges are checked against the files' sizes.

    Args:
        sizes: bytes of every file, by its name.

    Raises `ArtifactCorruptError` if a file is not a safetensors file.
    """

    def __init__(self, sizes: Mapping[str, int], read_range: ReadRange) -> None:
        self._read_range = read_range
        self.places: dict[str, tuple[str, int, dict[str, Any]]] = {}
        for file in sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name):
            begin, header = self._header(file, sizes[file])
            self.places |= {name: (file, begin, entry) for name, entry in header.items() if name != "__metadata__"}

    def _header(self, file: str, size: int) -> tuple[int, dict[str, Any]]:
        """Return the offset of the values in a file, and its header, whose offsets count from there."""
        data = self._read_range(file, 0, min(size, _HEADER_BYTES))
        begin = 8 + int.from_bytes(data[:8], "little")
        if not 8 < begin <= size:
            raise _damaged(file)
        if begin > len(data):
            data += self._read_range(file, len(data), begin)
        try:
            header: dict[str, Any] = json.loads(data[8:begin])
        except ValueError as error:
            raise _damaged(file) from error
        return begin, header

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        file, begin, entry = self.places[name]
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            width = (stop - start) // max(shape[0], 1)
            shape, start, stop = [last - first, *shape[1:]], start + first * width, start + last * width
        place = file, begin + start, begin + stop
        values = Fetched([place], self._read_range).at(*place)
        header = {name: {"dtype": entry["dtype"], "shape": shape, "data_offsets": [0, len(values)]}}
        written = json.dumps(header).encode()
        try:
            return load(len(written).to_bytes(8, "little") + written + values)[name]
        except SafetensorError as error:
            raise _damaged(file) from error


def _damaged(file: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"{file!r} of a model is not a complete safetensors file; publish the model again",
        field="file",
        value=file,
    )
