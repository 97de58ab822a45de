"""Read files of untrusted directories: with a max size, and only below allowed directories after resolving links.

A file may be sparse and of any length, a pipe, or deeply nested JSON. Reading it never blocks, and never takes more
memory than its limit.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from swiftkv_platform import limits
from swiftkv_platform.errors import DataError, InvalidInputError

CONFIG_BYTES = 1 << 20
"""Max bytes of a `config.json` or other JSON of a model or data set; the longest of real models have about 100 KB. As
objects, a text of brackets takes twenty times its length."""
TOKENIZER_BYTES = limits.TOKENIZER_BYTES.default
"""Max bytes of a `tokenizer_config.json`; Gemma 3's has 1.2 MB."""
INDEX_BYTES = 32 << 20
"""Max bytes of an index of shards; one for 200,000 tensors has 20 MB."""
CARD_BYTES = 1 << 20
"""Max bytes read from a card; its metadata are at the beginning."""
METADATA_BYTES = 256 << 10
"""Max bytes of a card's metadata; PyYAML takes seconds for these."""


class UnusableFileError(ValueError):
    """A refused file; the message is the predicate of a sentence, such as "is longer than 10 bytes"."""


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes` bytes. Raises `OSError`, and `UnusableFileError` if
    it is longer or not a regular file."""
    return check_length(read_head(path, max_bytes + 1), max_bytes)


def check_length(data: bytes, max_bytes: int) -> bytes:
    """Return `data`. Raises `UnusableFileError` if it has more than `max_bytes` bytes."""
    if len(data) > max_bytes:
        raise UnusableFileError(f"is longer than {max_bytes} bytes")
    return data


def read_head(path: Path, max_bytes: int) -> bytes:
    """Return at most the first `max_bytes` bytes of a regular file. Raises `OSError`, and `UnusableFileError` if it is
    not one."""
    with open(path, "rb", opener=open_nonblocking) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise UnusableFileError("is not a regular file")
        return stream.read(max_bytes)


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file that may be a pipe without waiting for the pipe's other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `UnusableFileError` if it is not one."""
    try:
        document = json.loads(data.decode())  # transformers reads UTF-8 only
    except RecursionError as error:
        raise UnusableFileError("is nested too deeply") from error
    except ValueError as error:  # includes UnicodeDecodeError
        raise UnusableFileError(f"is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise UnusableFileError("is not a JSON object")
    return document


def read_object(path: Path, max_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a small file. Raises as `read_small_file` and `parse_object`."""
    return parse_object(read_small_file(path, max_bytes))


@dataclass(frozen=True)
class Boundary:
    """Allowed directories of files. Check every file before opening it, and open the path that `check_path` returns."""

    directories: tuple[str, ...] | None
    """Real paths of the directories; None allows every path."""

    @classmethod
    def from_directories(cls, *directories: str | Path) -> Boundary:
        """Return the boundary of everything below these directories, which may be links."""
        return cls(tuple(os.path.realpath(directory) for directory in directories))

    def contains(self, path: str | Path) -> bool:
        if self.directories is None:
            return True
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(directory) for directory in self.directories)

    def check_path(self, path: Path, field: str, *, error: type[InvalidInputError] = DataError) -> Path:
        """Return the path to open, with links resolved if paths are restricted. Raises `error` if it is outside, or
        neither file nor directory (a pipe would block its reader forever)."""
        if self.directories is None:
            return path
        if not self.contains(path):
            raise error(
                f"{field}: {path.name!r} links to a path that the job may not read; use a file inside the source",
                field=field,
                value=path.name,
            )
        real = Path(os.path.realpath(path))
        if real.exists() and not (real.is_file() or real.is_dir()):
            raise error(f"{field}: {path.name!r} is not a regular file", field=field, value=path.name)
        return real

    @contextmanager
    def open_file(
        self, path: Path, field: str, *, error: type[InvalidInputError] = DataError
    ) -> Iterator[BufferedReader]:
        """Open a file, and check the opened file again: `path` may have become a link meanwhile. Raises as
        `check_path`."""
        with open(self.check_path(path, field, error=error), "rb", opener=open_nonblocking) as stream:
            opened = Path(f"/proc/self/fd/{stream.fileno()}")
            if opened.exists():  # on Linux
                self.check_path(opened, field, error=error)
            yield stream

    def check_tree(self, directory: Path, field: str, *, error: type[InvalidInputError] = DataError) -> None:
        """Check everything below `directory`, following links to directories. Raises as `check_path`."""
        if self.directories is not None:
            self.check_path(directory, field, error=error)
            for path in _walk_entries(directory):
                self.check_path(path, field, error=error)


UNBOUNDED = Boundary(None)


def _walk_entries(directory: Path) -> Iterator[Path]:
    """Yield all files and directories below; a directory comes before its entries."""
    pending, seen = [directory], set[tuple[int, int]]()
    while pending:
        for entry in os.scandir(pending.pop()):
            yield Path(entry.path)
            try:
                status = entry.stat()
            except OSError:  # a broken link
                continue
            identity = status.st_dev, status.st_ino
            if stat.S_ISDIR(status.st_mode) and identity not in seen:
                seen.add(identity)
                pending.append(Path(entry.path))
