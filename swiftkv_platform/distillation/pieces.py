"""Pieces of tensors in the files of a checkpoint, of which a reader fetches no more than the rows it needs.

A piece is what one worker has saved of one tensor: an archive of torch's, in which the values follow a head of about a
kilobyte. Knows files by name and ranges of bytes, no place.
"""

from __future__ import annotations

import io
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError  # nosec B403  # the error that torch raises; nothing is unpickled with it
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from swiftkv_platform.distillation.parallel import STUDENT
from swiftkv_platform.errors import ArtifactCorruptError
from swiftkv_platform.model.checkpoint import LazyTensors

INDEX = ".metadata"
"""File that says where each tensor of a checkpoint is, in which pieces."""
ReadRange = Callable[[str, int, int], bytes]
"""Bytes of a checkpoint's file, by its name, from the first number up to the second."""
_BATCH_BYTES = 64 << 20
"""Bytes of pieces that are in memory at a time, or one piece."""
_PART_BYTES = 16 << 20
"""Bytes that come over one connection."""
_CONNECTIONS = 4
_UNREADABLE = (BadZipFile, zlib.error, UnpicklingError, EOFError, ValueError, RuntimeError)
"""Errors of an archive that is damaged."""
_Range = tuple[str, int, int]
"""File, and bytes of it from the first number up to the second."""


@dataclass(frozen=True)
class Piece:
    """Place and form of a piece. Rows are counted from its own first one, along the first dimension."""

    tensor: str
    file: str
    start: int
    length: int
    """Bytes, with head and tail."""
    sizes: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, index: Metadata, name: str, number: int) -> Piece:
        """A piece of the tensor `name`, by its number among them."""
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
        """Where some rows begin and end among the values."""
        width = self.sizes[1:].numel() * self.dtype.itemsize
        return rows.start * width, rows.stop * width

    def reads_whole(self, rows: slice | None) -> bool:
        """Whether these rows, None for all, take about as many bytes as the piece has."""
        if rows is None or self._overhead <= 0:
            return True
        first, last = self._bytes_of(rows)
        return last - first + 3 * self._overhead >= self.length

    def ranges(self, rows: slice | None) -> Iterator[_Range]:
        """Bytes that hold these rows: head, tail, and, as the head is no longer than both, where the rows must be."""
        if rows is None or self.reads_whole(rows):
            wanted = [(0, self.length)]
        else:
            first, last = self._bytes_of(rows)
            wanted = [(0, self._overhead), (first, last + self._overhead), (self.length - self._overhead, self.length)]
        return ((self.file, self.start + first, self.start + last) for first, last in wanted)

    def values(self, rows: slice | None, fetched: Fetched) -> Tensor:
        """These rows. Of a piece that is read whole, torch's checksum of all its values is verified; of any other, that
        of its head, and that it tells of values of this form.

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
        """Compare checksums, which torch leaves unread."""
        with ZipFile(view) as archive:
            for entry in archive.infolist():
                if whole or not entry.filename.endswith("/data/0"):
                    with archive.open(entry) as file:
                        while file.read(1 << 20):
                            pass  # the end raises if the checksum is another
        view.seek(0)

    def _rows(self, layout: Tensor, rows: slice, fetched: Fetched) -> Tensor:
        """Rows of values that `layout`, which has none, says the place of."""
        begin = layout.untyped_storage()._checkpoint_offset or 0
        if not (layout.is_contiguous() and layout.storage_offset() == 0 and 0 < begin < self._overhead):
            raise self._damaged()
        first, last = (self.start + begin + place for place in self._bytes_of(rows))
        values = bytearray(fetched.at(self.file, first, last))  # aligned, as they need not be among other bytes
        return torch.frombuffer(values, dtype=self.dtype).view(-1, *self.sizes[1:])

    def _damaged(self) -> ArtifactCorruptError:
        return ArtifactCorruptError(
            f"{self.file!r} of a checkpoint does not hold {self.tensor} as it was saved; use another checkpoint of the "
            "job",
            field="file",
            value=self.file,
        )


class Fetched:
    """Ranges of files, each byte fetched once; those that follow each other come together."""

    def __init__(self, ranges: Iterable[_Range], read_range: ReadRange) -> None:
        self._ranges = _joined(ranges)
        self._data = [bytearray(stop - start) for _, start, stop in self._ranges]

        def fetch(number: int, begin: int) -> None:
            file, start, stop = self._ranges[number]
            end = min(begin + _PART_BYTES, stop)
            self._data[number][begin - start : end - start] = read_range(file, begin, end)

        parts = [(n, at) for n, (_, start, stop) in enumerate(self._ranges) for at in range(start, stop, _PART_BYTES)]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(fetch, *zip(*parts, strict=True)))  # raises what failed

    def at(self, file: str, start: int, stop: int) -> memoryview:
        number = bisect_right(self._ranges, (file, start), key=lambda each: each[:2]) - 1
        begin = self._ranges[number][1]
        return memoryview(self._data[number])[start - begin : stop - begin]


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    """Ranges in order, those that touch or overlap as one."""
    joined: list[_Range] = []
    for file, start, stop in sorted(ranges):
        if joined and joined[-1][0] == file and start <= joined[-1][2]:
            joined[-1] = file, joined[-1][1], max(stop, joined[-1][2])
        else:
            joined.append((file, start, stop))
    return joined


class _View(io.RawIOBase):
    """A piece as a file; what has not been fetched of it is zeros."""

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
    """Rows of pieces, in the order of their bytes, each with its number in `wanted`; no more than a batch of them is in
    memory.

    Raises `ArtifactCorruptError` for a piece that is not as it was saved, see `Piece.values`.
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
    """torch's reader of a checkpoint's directory that has the index alone: what a worker loads comes in ranges, and the
    pieces of other workers do not. It loads tensors, of which a checkpoint consists.

    Args:
        directory: has the checkpoint's index.
        read_range: reads the other files.
    """

    def __init__(self, directory: Path, read_range: ReadRange) -> None:
        super().__init__(directory)
        self._read_range = read_range
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, parsed once for however many loads."""
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
    """The trained tensors of a checkpoint by the student's own names, each read when it is asked for, in the pieces
    that workers have saved it in; needs no process group.

    Args:
        directory: has the checkpoint's index, `INDEX`.
        read_range: reads the other files; None: they are in `directory` as well.
    """

    def __init__(self, directory: Path, read_range: ReadRange | None = None) -> None:
        self._read_range = read_range or partial(_read_file, directory)
        self._index = FileSystemReader(directory).read_metadata()
        prefix = f"model.{STUDENT}"
        self.places = {
            name.removeprefix(prefix): (name, entry)
            for name, entry in self._index.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored, entry = self.places[name]
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
