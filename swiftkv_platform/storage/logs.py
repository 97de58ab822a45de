"""Logs of attempts as objects: written and read in pieces, the middle of a long one left out. Knows bytes, no job.

`logs.txt` is what is shown. `logs.json` says how it lies in the log as it was printed, for followers who go on in it.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from swiftkv_platform.errors import ObjectNotFoundError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.storage.object_store import ObjectStore

_BLOCK = 1 << 16
_NOTICE_BYTES = 200
"""Room for the line that says what is left out."""


class Layout(FrozenModel):
    """Place of the kept bytes in the log as it was printed; all sizes in bytes."""

    size: int
    """Size of the log as it was printed."""
    head: int
    """Kept from its beginning."""
    left_out: int = 0


def keep(store: ObjectStore, key: str, pieces: Iterable[bytes], *, most: int) -> None:
    """Store a log at `key`, and its layout beside it; of more than `most` bytes the middle is left out.

    Half of `most` is held in memory.
    """
    with tempfile.TemporaryDirectory(prefix="swiftkv-log-") as directory:
        path = Path(directory) / "log"
        with path.open("wb") as file:
            layout = _write(file, pieces, most - _NOTICE_BYTES)
        # The layout first: a log that is there has one.
        store.put_bytes(_layout_key(key), layout.model_dump_json().encode())
        store.upload_file(path, key)


@dataclass(frozen=True)
class SavedLog:
    """A log in the store; nothing of it is held."""

    store: ObjectStore
    key: str
    size: int
    """Bytes kept, with the line that says what is left out."""
    layout: Layout

    def stream(self, start: int = 0) -> Iterator[bytes]:
        """Stream what is kept, from byte `start` on."""
        return self.store.stream(self.key, _BLOCK, start=start)

    def rest(self, sent: int) -> Iterator[bytes]:
        """Stream what is kept of the log after the first `sent` bytes that were printed."""
        tail_at = self.layout.head + self.layout.left_out
        if not self.layout.left_out or sent <= self.layout.head:
            return self.stream(sent)
        if sent < tail_at:
            return self.stream(self.layout.head)
        return self.stream(self.size - (self.layout.size - sent))

    def tail(self, lines: int) -> Iterator[bytes]:
        """The last `lines` lines."""
        start = self.size
        while start > 0:
            begin = max(start - _BLOCK, 0)
            block = self._block(begin, start - begin)
            # The end of the last line ends no earlier one.
            ends = len(block) - 1 if start == self.size else len(block)
            while (ends := block.rfind(b"\n", 0, ends)) != -1:
                lines -= 1
                if lines == 0:
                    return self.stream(begin + ends + 1)
            start = begin
        return self.stream()

    def _block(self, start: int, size: int) -> bytes:
        with closing(self.store.stream(self.key, size, start=start)) as pieces:  # type: ignore[type-var]
            return next(pieces, b"")


def open_log(store: ObjectStore, key: str) -> SavedLog | None:
    """The log at `key`, None if there is none."""
    info = store.head(key)
    if info is None:
        return None
    whole = Layout(size=info.size, head=info.size)
    try:
        layout = Layout.model_validate_json(store.get_bytes(_layout_key(key)))
    except (ObjectNotFoundError, ValidationError):
        layout = whole  # a log that was saved before layouts were
    return SavedLog(store, key, info.size, layout)


def _layout_key(key: str) -> str:
    return f"{key.removesuffix('.txt')}.json"


def _write(file: IO[bytes], pieces: Iterable[bytes], most: int) -> Layout:
    """Head to the file, tail in memory; then, where more came than is kept, what was left out, and the tail."""
    iterator = iter(pieces)
    size, over = 0, b""
    for piece in iterator:
        size += len(piece)
        file.write(piece[: len(piece) - max(size - most // 2, 0)])
        if size > most // 2:
            over = piece[len(piece) - (size - most // 2) :]
            break
    head, tail, room = min(size, most // 2), deque[bytes](), most - most // 2
    held = left_out = 0
    for piece in chain([over], iterator):
        tail.append(piece)
        held += len(piece)
        while tail and held - len(tail[0]) >= room:
            gone = len(tail.popleft())
            held, left_out = held - gone, left_out + gone
    if held > room:
        cut = held - room
        tail[0] = tail[0][cut:]
        held, left_out = room, left_out + cut
    if left_out:
        head, left_out = _cut_at_lines(file, head, tail, left_out)
        file.write(f"[... {left_out} bytes of this log are left out here ...]\n".encode())
    file.writelines(tail)
    return Layout(size=head + left_out + sum(map(len, tail)), head=head, left_out=left_out)


def _cut_at_lines(file: IO[bytes], head: int, tail: deque[bytes], left_out: int) -> tuple[int, int]:
    """Let head and tail end and begin with whole lines, where those are not very long."""
    file.flush()
    with Path(file.name).open("rb") as written:
        written.seek(max(head - _BLOCK, 0))
        end = written.read().rfind(b"\n")
    if end != -1:
        whole = max(head - _BLOCK, 0) + end + 1
        left_out += head - whole
        head = whole
        file.truncate(head)
        file.seek(head)
    begin = tail[0].find(b"\n") + 1
    tail[0] = tail[0][begin:]
    return head, left_out + begin
