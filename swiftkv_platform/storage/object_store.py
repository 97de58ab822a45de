"""Interface of object stores, and rules for their keys. Knows keys and bytes, nothing about jobs or models."""

from __future__ import annotations

import builtins
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources.names import TEMPORARY_PREFIX, key_fault
from swiftkv_platform.sources.small_files import checked_length

CHUNK_SIZE = 1 << 20
"""Bytes per read of a streamed object."""

PROBE_KEY = ".swiftkv-probe"
"""Object that `ping` writes and deletes."""


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object."""

    key: str
    size: int
    """Bytes."""


class ObjectStore(Protocol):
    """Whole objects under `/`-separated keys; a reader sees an object completely or not at all.

    A `prefix` is a directory: `a/b` covers `a/b/c` and not `a/bc`; `""` is everything.
    A key is never also the prefix of other keys. Every method raises `StorageError`
    when the store fails, and `InvalidInputError` for a key that `validate_key` refuses.
    """

    @property
    def uri(self) -> str:
        """The address without credentials; `open_store(uri)` opens the same store."""

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write an object. With `if_absent`, raise `ConflictError` when the key exists."""

    def get_bytes(self, key: str) -> bytes:
        """Return the object's content. Raises `ObjectNotFoundError`."""

    def head(self, key: str) -> ObjectInfo | None:
        """Return key and size of the object; None if it does not exist."""

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield objects below `prefix` in ascending order of their keys, only those after the key `start_after`."""

    def list_directories(self, prefix: str) -> builtins.list[str]:
        """Return the sorted names of the immediate subdirectories that hold an object somewhere below."""

    def upload_file(self, path: Path, key: str) -> None:
        """Write the file's content as an object."""

    def upload_pieces(self, pieces: Iterator[bytes], key: str, size: int) -> None:
        """Write the joined pieces, of about `size` bytes together, as an object; nothing is written if the iterator
        raises, and its error is passed on."""

    def free_bytes(self) -> int | None:
        """Return the bytes that still fit into the store; None if there is no such limit."""

    def download_file(self, key: str, path: Path) -> None:
        """Write the object to `path`, replacing it atomically. Raises `ObjectNotFoundError`."""

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """Yield bytes [start, stop) of the content (to its end if `stop` is None or beyond it) in pieces of at most
        `chunk_size` bytes.

        Raises `ObjectNotFoundError`.
        """

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""

    def delete_many(self, keys: builtins.list[str]) -> None:
        """Remove these objects; missing ones are no error."""

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below `prefix`, which must not be empty."""

    def presigned_url(self, key: str, expires_s: int) -> str | None:
        """Return a URL that reads the object without credentials for `expires_s` seconds; None if there are no such."""

    def ping(self) -> None:
        """Write, read and delete one small object, without retrying if the store is down. Raises `StorageError`."""


def validate_key(key: str) -> str:
    """Return `key` if it is a relative path of ordinary segments. Raises `InvalidInputError`."""
    reason = key_fault(key)
    if reason is not None:
        raise InvalidInputError(
            f"object key {key!r} {reason}; keys are relative paths such as 'jobs/1/a.json'", field="key", value=key
        )
    return key


def validate_prefix(prefix: str) -> str:
    """Return `prefix` without a trailing slash, if it is empty or a valid key. Raises `InvalidInputError`."""
    trimmed = prefix.removesuffix("/")
    return validate_key(trimmed) if trimmed else ""


def join_key(prefix: str, name: str) -> str:
    """Return the key of `name` below `prefix`, which may be empty."""
    return f"{prefix.removesuffix('/')}/{name}" if prefix else name


def read_small(store: ObjectStore, key: str, most: int) -> bytes:
    """Return the content of an object of at most `most` bytes; no more are read. Raises `ObjectNotFoundError`, and
    `UnusableFileError` if it is longer."""
    data = bytearray()
    for piece in store.stream(key):
        data += piece
        if len(data) > most:
            break
    return checked_length(bytes(data), most)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a new file in the directory of `path`, deleted at the end unless it was moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        temporary.chmod(0o644)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
