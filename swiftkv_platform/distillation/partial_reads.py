"""Partial reads of tensors in checkpoints and safetensors files: a reader downloads only the rows it needs.

Each worker has saved a chunk of every tensor as a torch archive, in which the values follow a header of about a
kilobyte. Files are read in byte ranges, wherever they are stored.
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

from swiftkv_platform.distillation.strategy import STUDENT_PREFIX
from swiftkv_platform.errors import ArtifactCorruptError
from swiftkv_platform.model.weights.checkpoint import LazyTensors

INDEX_FILE = ".metadata"
"""Name of the file that lists the chunks of each tensor of a checkpoint."""
ReadRange = Callable[[str, int, int], bytes]
"""Reads a file of a checkpoint: (name, start, stop) -> bytes."""
_MAX_BATCH_BYTES = 64 << 20
"""Maximum total bytes of chunks in memory at a time; a single chunk may be larger."""
_MAX_REQUEST_BYTES = 16 << 20
_NUM_CONNECTIONS = 4
_ARCHIVE_ERRORS = (BadZipFile, zlib.error, UnpicklingError, EOFError, ValueError, RuntimeError)
"""Errors from reading a damaged archive."""
_Range = tuple[str, int, int]
"""Byte range: file, start and stop."""


@dataclass(frozen=True)
class StoredChunk:
    """Location and format of a chunk. Row 0 is the first row of the chunk itself."""

    tensor: str
    file: str
    start: int
    length: int
    """Bytes of the chunk's torch archive, including its header and trailer."""
    sizes: torch.Size
    dtype: torch.dtype

    @classmethod
    def from_index(cls, index: Metadata, name: str, number: int) -> StoredChunk:
        """Return chunk `number` of the tensor `name`."""
        entry = cast("TensorStorageMetadata", index.state_dict_metadata[name])
        chunk = entry.chunks[number]
        location = index.storage_data[MetadataIndex(name, chunk.offsets)]
        dtype = entry.properties.dtype
        return cls(name, location.relative_path, location.offset, location.length, chunk.sizes, dtype)

    @property
    def _overhead(self) -> int:
        """Bytes of the archive's header and trailer."""
        return self.length - self.sizes.numel() * self.dtype.itemsize

    def _get_byte_range(self, rows: slice) -> tuple[int, int]:
        """Return the byte range of `rows`, relative to the first value."""
        width = self.sizes[1:].numel() * self.dtype.itemsize
        return rows.start * width, rows.stop * width

    def is_read_whole(self, rows: slice | None) -> bool:
        """Whether to read the whole chunk, because `rows` (None: all) take about as many bytes."""
        if rows is None or self._overhead <= 0:
            return True
        first, last = self._get_byte_range(rows)
        return last - first + 3 * self._overhead >= self.length

    def get_byte_ranges(self, rows: slice | None) -> Iterator[_Range]:
        """Return the byte ranges to download for `rows`: header, trailer, and a window around the rows, since the exact
        length of the header is unknown before it is read."""
        if rows is None or self.is_read_whole(rows):
            wanted = [(0, self.length)]
        else:
            first, last = self._get_byte_range(rows)
            wanted = [(0, self._overhead), (first, last + self._overhead), (self.length - self._overhead, self.length)]
        return ((self.file, self.start + first, self.start + last) for first, last in wanted)

    def read_values(self, rows: slice | None, fetched: FetchedRanges) -> Tensor:
        """Return `rows` of the chunk. Verifies dtype and shape, and torch's checksums: all of them for a whole chunk,
        otherwise those of the header. Raises `ArtifactCorruptError`."""
        view, whole = _ChunkFile(self, rows, fetched), self.is_read_whole(rows)
        try:
            self._verify_checksums(view, whole=whole)
            stored: Tensor = torch.load(
                cast("IO[bytes]", view), map_location="cpu" if whole else "meta", weights_only=True
            )
        except _ARCHIVE_ERRORS as error:
            raise self._make_corrupt_error() from error
        if stored.shape != self.sizes or stored.dtype != self.dtype:
            raise self._make_corrupt_error()
        if whole or rows is None:
            return stored if rows is None else stored[rows]
        return self._read_rows(stored, rows, fetched)

    def _verify_checksums(self, view: _ChunkFile, *, whole: bool) -> None:
        """Verify the archive's checksums, which `torch.load` does not."""
        with ZipFile(view) as archive:
            for entry in archive.infolist():
                if whole or not entry.filename.endswith("/data/0"):
                    with archive.open(entry) as file:
                        while file.read(1 << 20):
                            pass  # raises at the end if the checksum differs
        view.seek(0)

    def _read_rows(self, layout: Tensor, rows: slice, fetched: FetchedRanges) -> Tensor:
        """Return the values of `rows`. `layout`: meta tensor with the offset of the values in the archive."""
        begin = layout.untyped_storage()._checkpoint_offset or 0
        if not (layout.is_contiguous() and layout.storage_offset() == 0 and 0 < begin < self._overhead):
            raise self._make_corrupt_error()
        first, last = (self.start + begin + offset for offset in self._get_byte_range(rows))
        values = bytearray(fetched.get_bytes(self.file, first, last))  # copied, so that they are aligned
        return torch.frombuffer(values, dtype=self.dtype).view(-1, *self.sizes[1:])

    def _make_corrupt_error(self) -> ArtifactCorruptError:
        return ArtifactCorruptError(
            f"{self.file!r} of a checkpoint is damaged: {self.tensor} differs from what was saved; use another "
            "checkpoint of the job",
            field="file",
            value=self.file,
        )


class FetchedRanges:
    """Downloaded byte ranges. Each byte is downloaded once; adjacent ranges share requests."""

    def __init__(self, ranges: Iterable[_Range], read_range: ReadRange) -> None:
        self._ranges = _merge_ranges(ranges)
        self._data = [bytearray(stop - start) for _, start, stop in self._ranges]

        def fetch(number: int, begin: int) -> None:
            file, start, stop = self._ranges[number]
            end = min(begin + _MAX_REQUEST_BYTES, stop)
            self._data[number][begin - start : end - start] = read_range(file, begin, end)

        parts = [
            (n, at) for n, (_, start, stop) in enumerate(self._ranges) for at in range(start, stop, _MAX_REQUEST_BYTES)
        ]
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            list(pool.map(fetch, *zip(*parts, strict=True)))  # raises a failed fetch's error

    def get_bytes(self, file: str, start: int, stop: int) -> memoryview:
        number = bisect_right(self._ranges, (file, start), key=lambda each: each[:2]) - 1
        begin = self._ranges[number][1]
        return memoryview(self._data[number])[start - begin : stop - begin]


def _merge_ranges(ranges: Iterable[_Range]) -> list[_Range]:
    """Sort ranges and merge adjacent and overlapping ones."""
    joined: list[_Range] = []
    for file, start, stop in sorted(ranges):
        if joined and joined[-1][0] == file and start <= joined[-1][2]:
            joined[-1] = file, joined[-1][1], max(stop, joined[-1][2])
        else:
            joined.append((file, start, stop))
    return joined


class _ChunkFile(io.RawIOBase):
    """File object over a chunk; bytes that were not downloaded read as zeros."""

    def __init__(self, chunk: StoredChunk, rows: slice | None, fetched: FetchedRanges) -> None:
        super().__init__()
        self._length, self._position = chunk.length, 0
        self._ranges = [
            (start - chunk.start, fetched.get_bytes(file, start, stop))
            for file, start, stop in chunk.get_byte_ranges(rows)
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


def read_chunks(
    selections: Sequence[tuple[StoredChunk, slice | None]], read_range: ReadRange
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index in `selections`, values) for each selection of a chunk's rows (None: all), in storage order. Holds
    at most one batch in memory. Raises `ArtifactCorruptError` for a damaged chunk."""
    order = sorted(range(len(selections)), key=lambda number: (selections[number][0].file, selections[number][0].start))
    for batch in _split_into_batches(order, selections):
        ranges = (each for number in batch for each in selections[number][0].get_byte_ranges(selections[number][1]))
        fetched = FetchedRanges(ranges, read_range)
        for number in batch:
            chunk, rows = selections[number]
            yield number, chunk.read_values(rows, fetched)


def _split_into_batches(
    order: Iterable[int], selections: Sequence[tuple[StoredChunk, slice | None]]
) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for number in order:
        chunk, rows = selections[number]
        added = sum(stop - start for _, start, stop in chunk.get_byte_ranges(rows))
        if batch and size + added > _MAX_BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += added
    if batch:
        yield batch


class RangeReader(FileSystemReader):
    """Torch's checkpoint reader for a directory with only the index. It downloads the byte ranges that this worker
    loads. Loads tensors only.
    """

    def __init__(self, directory: Path, read_range: ReadRange) -> None:
        super().__init__(directory)
        self._read_range = read_range
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's index. Overrides torch's method, to parse the file only once."""
        if self._index is None:
            self._index = super().read_metadata(*args, **kwargs)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        index = self.read_metadata()
        wanted: list[tuple[StoredChunk, slice | None]] = []
        for item in plan.items:
            name, number = item.storage_index.fqn, item.storage_index.index
            assert number is not None, "torch's planner sets the chunk"
            rows = None
            if item.lengths:
                rows = slice(item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0])
            wanted.append((StoredChunk.from_index(index, name, number), rows))
        for number, values in read_chunks(wanted, self._read_range):
            item = plan.items[number]
            target = planner.resolve_tensor(item).detach()
            bounds = zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
            columns = (slice(None), *(slice(first, first + length) for first, length in bounds))
            target.copy_(values[columns] if item.lengths else values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class CheckpointTensors(LazyTensors):
    """The trained tensors of a checkpoint by the student's names, read on access. Needs no process group.

    Args:
        directory: directory of the checkpoint's `INDEX_FILE`.
        read_range: reads the other files; None: they are in `directory` too.
    """

    def __init__(self, directory: Path, read_range: ReadRange | None = None) -> None:
        self._read_range = read_range or partial(_read_file_range, directory)
        self._index = FileSystemReader(directory).read_metadata()
        prefix = f"model.{STUDENT_PREFIX}"
        self._locations = {
            name.removeprefix(prefix): (name, entry)
            for name, entry in self._index.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    @property
    def locations(self) -> Mapping[str, Any]:
        return self._locations

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored, entry = self._locations[name]
        first, last, _ = (slice(None) if rows is None else rows).indices(entry.size[0])
        tensor = torch.empty((last - first, *entry.size[1:]), dtype=entry.properties.dtype)
        targets, wanted = [], []
        for number, chunk in enumerate(entry.chunks):
            begin, *columns = (
                slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            low, high = max(begin.start, first), min(begin.stop, last)
            if low < high:
                targets.append((slice(low - first, high - first), *columns))
                own = slice(low - begin.start, high - begin.start)
                wanted.append((StoredChunk.from_index(self._index, stored, number), own))
        for number, values in read_chunks(wanted, self._read_range):
            tensor[targets[number]] = values
        return tensor


def _read_file_range(directory: Path, name: str, start: int, stop: int) -> bytes:
    with (directory / name).open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


_FIRST_READ_BYTES = 1 << 16
"""Bytes of the first request; most headers fit."""


class RangedSafetensors(LazyTensors):
    """Tensors of the safetensors files among `sizes`, read on access. The format has no checksums, so only headers and
    ranges are checked, against the sizes.

    Args:
        sizes: bytes of every file, by its name.

    Raises `ArtifactCorruptError` if a file is not a safetensors file.
    """

    def __init__(self, sizes: Mapping[str, int], read_range: ReadRange) -> None:
        self._read_range = read_range
        self._locations: dict[str, tuple[str, int, dict[str, Any]]] = {}
        for file in sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name):
            begin, header = self._read_header(file, sizes[file])
            self._locations |= {name: (file, begin, entry) for name, entry in header.items() if name != "__metadata__"}

    @property
    def locations(self) -> Mapping[str, Any]:
        return self._locations

    def _read_header(self, file: str, size: int) -> tuple[int, dict[str, Any]]:
        """Return the offset of the values in a file, and its header, whose offsets are relative to the values."""
        data = self._read_range(file, 0, min(size, _FIRST_READ_BYTES))
        begin = 8 + int.from_bytes(data[:8], "little")
        if not 8 < begin <= size:
            raise _make_corrupt_error(file)
        if begin > len(data):
            data += self._read_range(file, len(data), begin)
        try:
            header: dict[str, Any] = json.loads(data[8:begin])
        except ValueError as error:
            raise _make_corrupt_error(file) from error
        return begin, header

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        file, begin, entry = self._locations[name]
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            width = (stop - start) // max(shape[0], 1)
            shape, start, stop = [last - first, *shape[1:]], start + first * width, start + last * width
        byte_range = file, begin + start, begin + stop
        values = FetchedRanges([byte_range], self._read_range).get_bytes(*byte_range)
        header = {name: {"dtype": entry["dtype"], "shape": shape, "data_offsets": [0, len(values)]}}
        written = json.dumps(header).encode()
        try:
            return load(len(written).to_bytes(8, "little") + written + values)[name]
        except SafetensorError as error:
            raise _make_corrupt_error(file) from error


def _make_corrupt_error(file: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"{file!r} of a model is not a complete safetensors file; publish the model again",
        field="file",
        value=file,
    )
