"""Pieces of tensors in the files of a checkpoint, so that a reader fetches only the rows it needs.

A piece is what one worker has saved of one tensor: a torch archive, in which the values follow a head of about a
kilobyte. Files are known by name and read in ranges of bytes, wherever they are stored. Likewise
`RangedTensors` reads the safetensors files of a model.
"""

from __future__ import annotations

import io
import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError  # nosec B403  # the error that torch raises; nothing is unpickled with it
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from swiftkv_platform.distillation.parallel import STUDENT
from swiftkv_platform.errors import ArtifactCorruptError
from swiftkv_platform.model.weights.checkpoint import LazyTensors

INDEX = ".metadata"
"""Name of the file that lists the pieces of each tensor of a checkpoint."""
ReadRange = Callable[[str, int, int], bytes]
"""Reads a file of a checkpoint: (name, start, stop) -> bytes."""
_BATCH_BYTES = 64 << 20
"""Largest total bytes of pieces in memory at a time; a single piece may be larger."""
_PART_BYTES = 16 << 20
"""Most bytes to fetch in one request."""
_CONNECTIONS = 4
_UNREADABLE = (BadZipFile, zlib.error, UnpicklingError, EOFError, ValueError, RuntimeError)
"""Errors that reading a damaged archive raises."""
_Range = tuple[str, int, int]
"""File, start and stop: bytes of a file."""


@dataclass(frozen=True)
class Piece:
    """Location and format of a piece. Rows are counted along the first dimension from the piece's own first row."""

    tensor: str
    file: str
    start: int
    length: int
    """Bytes of the piece, including head and tail."""
    sizes: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, index: Metadata, name: str, number: int) -> Piece:
        """Return piece `number` of the tensor `name`."""
        entry = cast("TensorStorageMetadata", index.state_dict_metadata[name])
        chunk = entry.chunks[number]
        place = index.storage_data[MetadataIndex(name, chunk.offsets)]
        dtype = entry.properties.dtype
        return cls(name, place.relative_path, place.offset, place.length, chunk.sizes, dtype)

    @property
    def _overhead(self) -> int:
        """Bytes of head and tail."""
        return self.length - self.sizes.numel() * self.dtype.itemsize

    def _bytes_of(self, rows: slice) -> tuple[int, int]:
        """Begin and end of `rows` in bytes, relative to the first value."""
        width = self.sizes[1:].numel() * self.dtype.itemsize
        return rows.start * width, rows.stop * width

    def reads_whole(self, rows: slice | None) -> bool:
        """Whether reading `rows` (None: all) takes about as many bytes as the whole piece."""
        if rows is None or self._overhead <= 0:
            return True
        first, last = self._bytes_of(rows)
        return last - first + 3 * self._overhead >= self.length

    def ranges(self, rows: slice | None) -> Iterator[_Range]:
        """Ranges of bytes needed to read `rows`: head, tail, and a window around the rows, since the exact length of
        the head is unknown until it is read."""
        if rows is None or self.reads_whole(rows):
            wanted = [(0, self.length)]
        else:
            first, last = self._bytes_of(rows)
            wanted = [(0, self._overhead), (first, last + self._overhead), (self.length - self._overhead, self.length)]
        return ((self.file, self.start + first, self.start + last) for first, last in wanted)

    def values(self, rows: slice | None, fetched: Fetched) -> Tensor:
        """Return `rows` of the piece. If the piece is read whole, torch's checksum of all values is verified; otherwise
        that of the head, and that dtype and shape are the expected ones.

        Raises `ArtifactCorruptError`.
        """
        view, whole = _View(self, rows, fetched), self.reads_whole(rows)
        try:
            self._verify(view, whole=whole)
            stored: Tensor = torch.load(
                cast("IO[bytes]", view), map_location="cpu" if whole else "meta", weights_only=True
            )
        except _UNREADABLE as error:
            raise self._damaged() from error
        if stored.shape != self.sizes or stored.dtype != self.dtype:
            raise self._damaged()
        if whole or rows is None:
            return stored if rows is None else stored[rows]
        return self._rows(stored, rows, fetched)

    def _verify(self, view: _View, *, whole: bool) -> None:
        """Verify the archive's checksums, which `torch.load` ignores."""
        with ZipFile(view) as archive:
            for entry in archive.infolist():
                if whole or not entry.filename.endswith("/data/0"):
                    with archive.open(entry) as file:
                        while file.read(1 << 20):
                            pass  # raises at the end if the checksum differs
        view.seek(0)

    def _rows(self, layout: Tensor, rows: slice, fetched: Fetched) -> Tensor:
        """Return the values of `rows`. `layout`: a meta tensor that tells where in the piece the values are."""
        begin = layout.untyped_storage()._checkpoint_offset or 0
        if not (layout.is_contiguous() and layout.storage_offset() == 0 and 0 < begin < self._overhead):
            raise self._damaged()
        first, last = (self.start + begin + place for place in self._bytes_of(rows))
        values = bytearray(fetched.at(self.file, first, last))  # copied, so that they are aligned
        return torch.frombuffer(values, dtype=self.dtype).view(-1, *self.sizes[1:])

    def _damaged(self) -> ArtifactCorruptError:
        return ArtifactCorruptError(
            f"{self.file!r} of a checkpoint no longer holds {self.tensor} as it was saved; use another checkpoint of "
            "the job",
            field="file",
            value=self.file,
        )


class Fetched:
    """Downloaded ranges of files. Each byte is fetched once, and adjacent ranges together."""

    def __init__(self, ranges: Iterable[_Range], read_range: ReadRange) -> None:
        self._ranges = _joined(ranges)
        self._data = [bytearray(stop - start) for _, start, stop in self._ranges]

        def fetch(number: int, begin: int) -> None:
            file, start, stop = self._ranges[number]
            end = min(begin + _PART_BYTES, stop)
            self._data[number][begin - start : end - start] = read_range(file, begin, end)

        parts = [(n, at) for n, (_, start, stop) in enumerate(self._ranges) for at in range(start, stop, _PART_BYTES)]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(fetch, *zip(*parts, strict=True)))  # raises a failed fetch's error

    def at(self, file: str, start: int, stop: int) -> memoryview:
        number = bisect_right(self._ranges, (file, start), key=lambda each: each[:2]) - 1
        begin = self._ranges[number][1]
        return memoryview(self._data[number])[start - begin : stop - begin]


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    """Sort ranges and merge those that touch or overlap."""
    joined: list[_Range] = []
    for file, start, stop in sorted(ranges):
        if joined and joined[-1][0] == file and start <= joined[-1][2]:
            joined[-1] = file, joined[-1][1], max(stop, joined[-1][2])
        else:
            joined.append((file, start, stop))
    return joined


class _View(io.RawIOBase):
    """File object over a piece; bytes that were not fetched read as zeros."""

    def __init__(self, piece: Piece, rows: slice | None, fetched: Fetched) -> None:
        super().__init__()
        self._length, self._position = piece.length, 0
        self._ranges = [
            (start - piece.start, fetched.at(file, start, stop)) for file, start, stop in piece.ranges(rows)
        ]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        begin, end = self._position, max(min(self._position + len(target), self._length), self._position)
        if len(self._ranges) > 1:
            target[: end - begin] = bytes(end - begin)
        for start, data in self._ranges:
            first, last = max(start, begin), min(start + len(data), end)
            if first < last:
                target[first - begin : last - begin] = data[first - start : last - start]
        self._position = end
        return end - begin


def read_pieces(wanted: Sequence[tuple[Piece, slice | None]], read_range: ReadRange) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of pieces in the order of their bytes, each with its index in `wanted`; at most one batch is in
    memory.

    Raises `ArtifactCorruptError` if a piece is damaged, see `Piece.values`.
    """
    order = sorted(range(len(wanted)), key=lambda number: (wanted[number][0].file, wanted[number][0].start))
    for batch in _batches(order, wanted):
        ranges = (each for number in batch for each in wanted[number][0].ranges(wanted[number][1]))
        fetched = Fetched(ranges, read_range)
        for number in batch:
            piece, rows = wanted[number]
            yield number, piece.values(rows, fetched)


def _batches(order: Iterable[int], wanted: Sequence[tuple[Piece, slice | None]]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for number in order:
        piece, rows = wanted[number]
        added = sum(stop - start for _, start, stop in piece.ranges(rows))
        if batch and size + added > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += added
    if batch:
        yield batch


class RangeReader(FileSystemReader):
    """Torch's checkpoint reader for a directory that holds only the index. It fetches what a worker loads in ranges,
    and not the pieces of other workers. Loads tensors only, of which a checkpoint consists.

    Args:
        directory: has the checkpoint's index.
        read_range: reads the other files.
    """

    def __init__(self, directory: Path, read_range: ReadRange) -> None:
        super().__init__(directory)
        self._read_range = read_range
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index, which is parsed only once."""
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        index = self.read_metadata()
        wanted: list[tuple[Piece, slice | None]] = []
        for item in plan.items:
            name, number = item.storage_index.fqn, item.storage_index.index
            assert number is not None, "torch's planner says which chunk"
            rows = None
            if item.lengths:
                rows = slice(item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0])
            wanted.append((Piece.of(index, name, number), rows))
        for number, values in read_pieces(wanted, self._read_range):
            item = plan.items[number]
            target = planner.resolve_tensor(item).detach()
            columns = (slice(None), *map(_columns, item.storage_offsets[1:], item.lengths[1:]))
            target.copy_(values[columns] if item.lengths else values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _columns(first: int, length: int) -> slice:
    return slice(first, first + length)


class TrainedTensors(LazyTensors):
    """The trained tensors of a checkpoint by the student's names, each read on access from the pieces that workers
    saved. Needs no process group.

    Args:
        directory: has the checkpoint's index, `INDEX`.
        read_range: reads the other files; None: they are in `directory` as well.
    """

    def __init__(self, directory: Path, read_range: ReadRange | None = None) -> None:
        self._read_range = read_range or partial(_read_file, directory)
        self._index = FileSystemReader(directory).read_metadata()
        prefix = f"model.{STUDENT}"
        self._places = {
            name.removeprefix(prefix): (name, entry)
            for name, entry in self._index.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    @property
    def places(self) -> Mapping[str, Any]:
        return self._places

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored, entry = self._places[name]
        first, last, _ = (slice(None) if rows is None else rows).indices(entry.size[0])
        tensor = torch.empty((last - first, *entry.size[1:]), dtype=entry.properties.dtype)
        places, wanted = [], []
        for number, chunk in enumerate(entry.chunks):
            begin, *columns = (
                slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            low, high = max(begin.start, first), min(begin.stop, last)
            if low < high:
                places.append((slice(low - first, high - first), *columns))
                own = slice(low - begin.start, high - begin.start)
                wanted.append((Piece.of(self._index, stored, number), own))
        for number, values in read_pieces(wanted, self._read_range):
            tensor[places[number]] = values
        return tensor


def _read_file(directory: Path, name: str, start: int, stop: int) -> bytes:
    with (directory / name).open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


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
        self._places: dict[str, tuple[str, int, dict[str, Any]]] = {}
        for file in sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name):
            begin, header = self._header(file, sizes[file])
            self._places |= {name: (file, begin, entry) for name, entry in header.items() if name != "__metadata__"}

    @property
    def places(self) -> Mapping[str, Any]:
        return self._places

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
        file, begin, entry = self._places[name]
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
