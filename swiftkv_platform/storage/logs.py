"""Logs of attempts as objects, written and read in pieces, the middle of a long one left out. Knows bytes, no job.

`logs.txt` is the saved log. `logs.json` is its `LogLayout`, by which followers continue from their place in the
original."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from swiftkv_platform.errors import ObjectNotFoundError, StorageError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.storage.object_store import ObjectStore

_BLOCK_BYTES = 1 << 16
_NOTICE_BYTES = 200
"""Bytes reserved for the line that reports the bytes left out."""


class LogLayout(FrozenModel):
    """Which bytes of the original log are saved. All sizes in bytes."""

    size: int
    """Size of the original log."""
    head: int
    """Size of the saved head."""
    left_out: int = 0


def save_log(store: ObjectStore, key: str, pieces: Iterable[bytes], *, max_bytes: int) -> None:
    """Store a log at `key` and its layout next to it, leaving out the middle beyond `max_bytes`.

    Temporary files take up to 1.5 times `max_bytes`. Raises `StorageError`, also if the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="swiftkv-log-") as directory:
            path, capacity = Path(directory) / "log", max_bytes - _NOTICE_BYTES
            with path.open("wb") as file, (Path(directory) / "tail").open("w+b") as tail:
                layout = _write_log(file, pieces, capacity // 2, _RingBufferFile(tail, capacity - capacity // 2))
            # layout first, so that every stored log has one
            store.put_bytes(_get_layout_key(key), layout.model_dump_json().encode())
            store.upload_file(path, key)
    except OSError as error:
        raise StorageError(f"cannot save the log {key}: {error}", field="key", value=key) from error


@dataclass(frozen=True)
class SavedLog:
    """A log in the store, streamed on demand."""

    store: ObjectStore
    key: str
    size: int
    """Number of stored bytes, including the line that reports how many were left out."""
    layout: LogLayout

    def stream(self, start: int = 0) -> Iterator[bytes]:
        """Stream the saved log from byte `start` on."""
        return self.store.stream(self.key, _BLOCK_BYTES, start=start)

    def stream_after(self, sent: int) -> Iterator[bytes]:
        """Stream the saved part of the original log after its first `sent` bytes."""
        tail_start = self.layout.head + self.layout.left_out
        if not self.layout.left_out or sent <= self.layout.head:
            return self.stream(sent)
        if sent < tail_start:
            return self.stream(self.layout.head)
        return self.stream(self.size - (self.layout.size - sent))

    def stream_tail(self, lines: int) -> Iterator[bytes]:
        """Stream the last `lines` lines."""
        start = self.size
        while start > 0:
            begin = max(start - _BLOCK_BYTES, 0)
            block = self._read_block(begin, start - begin)
            # skip the newline of the last line
            ends = len(block) - 1 if start == self.size else len(block)
            while (ends := block.rfind(b"\n", 0, ends)) != -1:
                lines -= 1
                if lines == 0:
                    return self.stream(begin + ends + 1)
            start = begin
        return self.stream()

    def _read_block(self, start: int, size: int) -> bytes:
        with closing(self.store.stream(self.key, size, start=start)) as pieces:  # type: ignore[type-var]
            return next(pieces, b"")


def open_log(store: ObjectStore, key: str) -> SavedLog | None:
    """Return the log at `key`; None if there is none."""
    info = store.head(key)
    if info is None:
        return None
    whole = LogLayout(size=info.size, head=info.size)
    try:
        layout = LogLayout.model_validate_json(store.get_bytes(_get_layout_key(key)))
    except (ObjectNotFoundError, ValidationError):
        layout = whole  # saved by a version without layouts
    return SavedLog(store, key, info.size, layout)


def _get_layout_key(key: str) -> str:
    return f"{key.removesuffix('.txt')}.json"


class _RingBufferFile:
    """Keeps the last `capacity` bytes added, in a file that is used as a ring buffer."""

    def __init__(self, file: IO[bytes], capacity: int) -> None:
        self._file = file
        self.capacity = capacity
        self.num_added = 0

    def add(self, piece: bytes) -> None:
        while piece:
            at = self.num_added % self.capacity
            part = piece[: self.capacity - at]
            self._file.seek(at)
            self._file.write(part)
            self.num_added += len(part)
            piece = piece[len(part) :]

    def iterate_blocks(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of at most `_BLOCK_BYTES`."""
        begin, end = max(self.num_added - self.capacity, 0), self.num_added
        while begin < end:
            at = begin % self.capacity
            self._file.seek(at)
            block = self._file.read(min(_BLOCK_BYTES, end - begin, self.capacity - at))
            begin += len(block)
            yield block


def _write_log(file: IO[bytes], pieces: Iterable[bytes], max_head: int, tail: _RingBufferFile) -> LogLayout:
    """Write the head, then a line on the bytes left out, if any, then the tail, which `tail` buffers meanwhile."""
    head = 0
    for piece in pieces:
        to_head = piece[: max_head - head]
        file.write(to_head)
        head += len(to_head)
        tail.add(piece[len(to_head) :])
    iterate_blocks = tail.iterate_blocks()
    first = next(iterate_blocks, b"")
    left_out = max(tail.num_added - tail.capacity, 0)
    kept = tail.num_added - left_out
    if left_out:
        head, cut = _trim_to_lines(file, head, first)
        first, kept = first[cut:], kept - cut
        left_out = tail.num_added - kept + (max_head - head)
        file.write(f"[... {left_out} bytes of this log are left out here ...]\n".encode())
    file.writelines(chain([first], iterate_blocks))
    return LogLayout(size=head + left_out + kept, head=head, left_out=left_out)


def _trim_to_lines(file: IO[bytes], head: int, tail: bytes) -> tuple[int, int]:
    """Cut the head after its last whole line, unless that is longer than `_BLOCK_BYTES`. Returns (size of the
    head, bytes to drop from the beginning of `tail` so that `tail` begins with a whole line)."""
    file.flush()
    with Path(file.name).open("rb") as written:
        written.seek(max(head - _BLOCK_BYTES, 0))
        end = written.read().rfind(b"\n")
    if end != -1:
        head = max(head - _BLOCK_BYTES, 0) + end + 1
        file.truncate(head)
        file.seek(head)
    return head, tail.find(b"\n") + 1
