"""An object store in a directory of this machine (or of a file system that all machines mount). Knows no network."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swiftkv_platform.errors import ConflictError, InvalidInputError, ObjectNotFoundError, StorageError
from swiftkv_platform.sources.names import TEMPORARY_PREFIX
from swiftkv_platform.storage.object_store import (
    CHUNK_SIZE,
    PROBE_KEY,
    ObjectInfo,
    temporary_beside,
    validate_key,
    validate_prefix,
)


class LocalObjectStore:
    """Store with one file per object, written under a temporary name and then moved into place atomically.

    Files whose names start with `TEMPORARY_PREFIX` are objects being written and are not listed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path = self._path(key)
        with _storage_errors("write", key), temporary_beside(path) as temporary:
            temporary.write_bytes(data)
            _flush(temporary)
            if not if_absent:
                temporary.replace(path)
                return
            try:
                path.hardlink_to(temporary)
            except FileExistsError as error:
                raise ConflictError(f"object {key!r} already exists in {self.uri}", field="key", value=key) from error

    def get_bytes(self, key: str) -> bytes:
        with _storage_errors("read", key):
            return self._path(key).read_bytes()

    def head(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        with _storage_errors("inspect", key):
            return ObjectInfo(key, path.stat().st_size) if path.is_file() else None

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        trimmed = validate_prefix(prefix)
        with _storage_errors("list", prefix):
            yield from self._walk(f"{trimmed}/" if trimmed else "", start_after)

    def list_directories(self, prefix: str) -> builtins.list[str]:
        trimmed = validate_prefix(prefix)
        directory = f"{trimmed}/" if trimmed else ""
        with _storage_errors("list", prefix):
            names = [name.removesuffix("/") for name in self._entries(directory) if name.endswith("/")]
            return sorted(name for name in names if any(self._walk(f"{directory}{name}/", None)))

    def upload_file(self, path: Path, key: str) -> None:
        target = self._path(key)
        with _storage_errors("upload", key), temporary_beside(target) as temporary:
            shutil.copyfile(path, temporary)
            _flush(temporary)
            temporary.replace(target)

    def upload_pieces(self, pieces: Iterator[bytes], key: str, size: int) -> None:  # noqa: ARG002 (it grows as needed)
        target = self._path(key)
        with _storage_errors("write", key), temporary_beside(target) as temporary:
            with temporary.open("wb") as file:
                file.writelines(pieces)
            _flush(temporary)
            temporary.replace(target)

    def free_bytes(self) -> int | None:
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def download_file(self, key: str, path: Path) -> None:
        with _storage_errors("download", key), temporary_beside(path) as temporary:
            shutil.copyfile(self._path(key), temporary)
            temporary.replace(path)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        with _storage_errors("read", key), self._path(key).open("rb") as file:
            position = file.seek(start)
            while chunk := file.read(chunk_size if stop is None else min(chunk_size, max(stop - position, 0))):
                position += len(chunk)
                yield chunk

    def delete(self, key: str) -> None:
        with _storage_errors("delete", key):
            self._path(key).unlink(missing_ok=True)

    def delete_many(self, keys: builtins.list[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_prefix(self, prefix: str) -> None:
        trimmed = validate_prefix(prefix)
        if not trimmed:
            raise InvalidInputError("delete_prefix needs a prefix that is not empty", field="prefix", value=prefix)
        with _storage_errors("delete", prefix):
            if (self._root / trimmed).is_dir():
                shutil.rmtree(self._root / trimmed)

    def presigned_url(self, key: str, expires_s: int) -> str | None:  # noqa: ARG002 (a directory serves no URLs)
        validate_key(key)
        return None

    def ping(self) -> None:
        try:
            self.put_bytes(PROBE_KEY, b"ok")
            self.get_bytes(PROBE_KEY)
            self.delete(PROBE_KEY)
        except StorageError as error:
            raise StorageError(
                f"object store directory {self.uri} cannot be used: {error.message}",
                field="storage_uri",
                value=self.uri,
            ) from error

    def _path(self, key: str) -> Path:
        return self._root / validate_key(key)

    def _walk(self, directory: str, start_after: str | None) -> Iterator[ObjectInfo]:
        """Yield objects below `directory` (empty, or with a trailing slash) in key order, those after `start_after`."""
        for name in self._entries(directory, start_after):
            key = directory + name
            if name.endswith("/"):
                yield from self._walk(key, start_after)
            else:
                with suppress(FileNotFoundError):  # deleted since the scan saw it
                    yield ObjectInfo(key, (self._root / key).stat().st_size)

    def _entries(self, directory: str, start_after: str | None = None) -> builtins.list[str]:
        """Return sorted names in `directory` that may lead to keys after `start_after`, without opening files. A
        trailing slash marks a directory, and gives S3's order."""
        names: builtins.list[str] = []
        try:
            with os.scandir(self._root / directory) as scan:
                for entry in scan:
                    name = f"{entry.name}/" if entry.is_dir() else entry.name
                    key = directory + name
                    is_later = start_after is None or key > start_after
                    if is_later or (name.endswith("/") and start_after is not None and start_after.startswith(key)):
                        names.append(name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX) or name.endswith("/"))


def _flush(path: Path) -> None:
    """Force the content to disk, so that after a power loss a renamed file is never without it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _storage_errors(action: str, key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        if action in {"read", "download"}:
            raise ObjectNotFoundError(f"there is no object {key!r}", field="key", value=key) from error
        raise StorageError(f"cannot {action} {key!r}: {error}", field="key", value=key) from error
    except OSError as error:
        raise StorageError(f"cannot {action} {key!r}: {error}", field="key", value=key) from error
