"""Read files of untrusted directories: small ones within bounds, and only those below allowed directories once links
are resolved. Interprets no file, knows no tenant and no spec.

A file may be sparse and of any length, a pipe, or deeply nested JSON; reading it takes no more memory than its bound,
and never blocks.
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
"""Most bytes of a `config.json` or other JSON of a model or data set; the longest of real models have about 100 KB. As
objects, a text of brackets takes twenty times its length."""
TOKENIZER_BYTES = limits.TOKENIZER_BYTES.default
"""Most bytes of a `tokenizer_config.json`; Gemma 3's has 1.2 MB."""
INDEX_BYTES = 32 << 20
"""Most bytes of an index of shards; one for 200,000 tensors has 20 MB."""
CARD_BYTES = 1 << 20
"""Bytes of a card that are read at most; its metadata are at the beginning."""
METADATA_BYTES = 256 << 10
"""Most bytes of a card's metadata; PyYAML takes seconds for that much."""


class UnusableFileError(ValueError):
    """Refusal of a file; the message continues "the file ...", such as "is longer than 10 bytes"."""


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises `OSError`, and `UnusableFileError` if it is
    longer or not a regular file."""
    return checked_length(read_head(path, most + 1), most)


def checked_length(data: bytes, most: int) -> bytes:
    """Return `data`. Raises `UnusableFileError` if it has more than `most` bytes."""
    if len(data) > most:
        raise UnusableFileError(f"is longer than {most} bytes")
    return data


def read_head(path: Path, most: int) -> bytes:
    """Return at most the first `most` bytes of a regular file. Raises `OSError`, and `UnusableFileError` if it is not
    one."""
    with open(path, "rb", opener=open_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise UnusableFileError("is not a regular file")
        return stream.read(most)


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe without waiting for the pipe's other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `UnusableFileError` if it is not one."""
    try:
        document = json.loads(data.decode())  # in other encodings transformers reads none
    except RecursionError as error:
        raise UnusableFileError("is nested too deeply") from error
    except ValueError as error:  # includes UnicodeDecodeError
        raise UnusableFileError(f"is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise UnusableFileError("is not a JSON object")
    return document


def read_object(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a small file. Raises as `read_small` and `parse_object`."""
    return parse_object(read_small(path, most))


@dataclass(frozen=True)
class Boundary:
    """Directories within which files may lie. Check every file before opening it, and open the path that `check`
    returns."""

    directories: tuple[str, ...] | None
    """Real paths of the directories; None allows every path."""

    @classmethod
    def of(cls, *directories: str | Path) -> Boundary:
        """Return the boundary of everything below these directories, which may be links."""
        return cls(tuple(os.path.realpath(directory) for directory in directories))

    def contains(self, path: str | Path) -> bool:
        """Whether `path`, with links resolved, lies within."""
        if self.directories is None:
            return True
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(directory) for directory in self.directories)

    def check(self, path: Path, field: str, *, error: type[InvalidInputError] = DataError) -> Path:
        """Return the path to open instead of `path`, with links resolved if there is a bound. Raises `error` if it lies
        outside, or is neither file nor directory (a pipe would block its reader forever)."""
        if self.directories is None:
            return path
        if not self.contains(path):
            raise error(
                f"{field}: {path.name!r} leads to a place that the job may not read; use a file of the source itself",
                field=field,
                value=path.name,
            )
        real = Path(os.path.realpath(path))
        if real.exists() and not (real.is_file() or real.is_dir()):
            raise error(f"{field}: {path.name!r} is not a regular file", field=field, value=path.name)
        return real

    @contextmanager
    def open(self, path: Path, field: str, *, error: type[InvalidInputError] = DataError) -> Iterator[BufferedReader]:
        """Open a file, and check the opened file itself: `path` may have become a link meanwhile. Raises as `check`."""
        with open(self.check(path, field, error=error), "rb", opener=open_without_waiting) as stream:
            opened = Path(f"/proc/self/fd/{stream.fileno()}")
            if opened.exists():  # on Linux
                self.check(opened, field, error=error)
            yield stream

    def check_tree(self, directory: Path, field: str, *, error: type[InvalidInputError] = DataError) -> None:
        """Check everything below `directory`, following links to directories. Raises as `check`."""
        if self.directories is not None:
            self.check(directory, field, error=error)
            for path in _entries(directory):
                self.check(path, field, error=error)


UNBOUNDED = Boundary(None)


def _entries(directory: Path) -> Iterator[Path]:
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
