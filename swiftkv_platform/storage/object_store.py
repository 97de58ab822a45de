"""Object stores: interface, rules for keys, and a store in a directory (local, or of a file system that all machines
mount). `open_store` opens a store by its URI. Independent of jobs and models.
"""

from __future__ import annotations

import builtins
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from swiftkv_platform.errors import ConflictError, InvalidInputError, ObjectNotFoundError, StorageError
from swiftkv_platform.sources.names import BUCKET_NAME, BUCKET_NAME_RULE, TEMPORARY_PREFIX, find_key_fault
from swiftkv_platform.sources.untrusted_files import check_length

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
    """Objects with `/`-separated keys, written atomically.

    A `prefix` is a directory: `a/b` covers `a/b/c` but not `a/bc`; `""` covers all. A key is never the prefix of other
    keys. Every method raises `StorageError` if the store fails, and `InvalidInputError` for an invalid key.
    """

    @property
    def uri(self) -> str:
        """URI without credentials; `open_store(uri)` opens the same store."""

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

    def upload_chunks(self, pieces: Iterator[bytes], key: str, size: int) -> None:
        """Write the joined pieces, of about `size` bytes in total, as an object. If the iterator raises, nothing is
        written and its error is raised."""

    def free_bytes(self) -> int | None:
        """Return the free bytes of the store; None: unlimited."""

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
        """Remove the object; a missing object is ignored."""

    def delete_many(self, keys: builtins.list[str]) -> None:
        """Remove these objects; missing objects are ignored."""

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below `prefix`, which must not be empty."""

    def create_presigned_url(self, key: str, expires_s: int) -> str | None:
        """Return a signed URL of the object, valid for `expires_s` seconds; None if the store has no signed URLs."""

    def ping(self) -> None:
        """Write, read and delete a small object, without retries. Raises `StorageError`."""


def validate_object_key(key: str) -> str:
    """Return `key` if it is a relative path without `.` and `..`. Raises `InvalidInputError`."""
    reason = find_key_fault(key)
    if reason is not None:
        raise InvalidInputError(
            f"object key {key!r} {reason}; keys are relative paths such as 'jobs/1/a.json'", field="key", value=key
        )
    return key


def validate_prefix(prefix: str) -> str:
    """Return `prefix` without a trailing slash, if it is empty or a valid key. Raises `InvalidInputError`."""
    trimmed = prefix.removesuffix("/")
    return validate_object_key(trimmed) if trimmed else ""


def join_object_key(prefix: str, name: str) -> str:
    """Return the key of `name` below `prefix`, which may be empty."""
    return f"{prefix.removesuffix('/')}/{name}" if prefix else name


def read_small_object(store: ObjectStore, key: str, max_bytes: int) -> bytes:
    """Return the content of an object of at most `max_bytes` bytes; no more are read. Raises `ObjectNotFoundError`, and
    `UnusableFileError` if it is longer."""
    data = bytearray()
    for piece in store.stream(key):
        data += piece
        if len(data) > max_bytes:
            break
    return check_length(bytes(data), max_bytes)


@contextmanager
def open_temporary(path: Path) -> Iterator[Path]:
    """Yield a new temporary file in the directory of `path`, deleted at the end unless moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        temporary.chmod(0o644)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


class LocalObjectStore:
    """Store with one file per object, written as a temporary file and renamed atomically.

    Temporary files start with `TEMPORARY_PREFIX` and are not listed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path = self._get_path(key)
        with _translate_errors("write", key), open_temporary(path) as temporary:
            temporary.write_bytes(data)
            _fsync(temporary)
            if not if_absent:
                temporary.replace(path)
                return
            try:
                path.hardlink_to(temporary)
            except FileExistsError as error:
                raise ConflictError(f"object {key!r} already exists in {self.uri}", field="key", value=key) from error

    def get_bytes(self, key: str) -> bytes:
        with _translate_errors("read", key):
            return self._get_path(key).read_bytes()

    def head(self, key: str) -> ObjectInfo | None:
        path = self._get_path(key)
        with _translate_errors("inspect", key):
            return ObjectInfo(key, path.stat().st_size) if path.is_file() else None

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        trimmed = validate_prefix(prefix)
        with _translate_errors("list", prefix):
            yield from self._walk(f"{trimmed}/" if trimmed else "", start_after)

    def list_directories(self, prefix: str) -> builtins.list[str]:
        trimmed = validate_prefix(prefix)
        directory = f"{trimmed}/" if trimmed else ""
        with _translate_errors("list", prefix):
            names = [name.removesuffix("/") for name in self._list_entries(directory) if name.endswith("/")]
            return sorted(name for name in names if any(self._walk(f"{directory}{name}/", None)))

    def upload_file(self, path: Path, key: str) -> None:
        target = self._get_path(key)
        with _translate_errors("upload", key), open_temporary(target) as temporary:
            shutil.copyfile(path, temporary)
            _fsync(temporary)
            temporary.replace(target)

    def upload_chunks(self, pieces: Iterator[bytes], key: str, size: int) -> None:  # noqa: ARG002 (it grows as needed)
        target = self._get_path(key)
        with _translate_errors("write", key), open_temporary(target) as temporary:
            with temporary.open("wb") as file:
                file.writelines(pieces)
            _fsync(temporary)
            temporary.replace(target)

    def free_bytes(self) -> int | None:
        existing = next(path for path in (self._root, *self._root.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def download_file(self, key: str, path: Path) -> None:
        with _translate_errors("download", key), open_temporary(path) as temporary:
            shutil.copyfile(self._get_path(key), temporary)
            temporary.replace(path)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        with _translate_errors("read", key), self._get_path(key).open("rb") as file:
            position = file.seek(start)
            while chunk := file.read(chunk_size if stop is None else min(chunk_size, max(stop - position, 0))):
                position += len(chunk)
                yield chunk

    def delete(self, key: str) -> None:
        with _translate_errors("delete", key):
            self._get_path(key).unlink(missing_ok=True)

    def delete_many(self, keys: builtins.list[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_prefix(self, prefix: str) -> None:
        trimmed = validate_prefix(prefix)
        if not trimmed:
            raise InvalidInputError("delete_prefix needs a prefix that is not empty", field="prefix", value=prefix)
        with _translate_errors("delete", prefix):
            if (self._root / trimmed).is_dir():
                shutil.rmtree(self._root / trimmed)

    def create_presigned_url(self, key: str, expires_s: int) -> str | None:  # noqa: ARG002 (a directory serves no URLs)
        validate_object_key(key)
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

    def _get_path(self, key: str) -> Path:
        return self._root / validate_object_key(key)

    def _walk(self, directory: str, start_after: str | None) -> Iterator[ObjectInfo]:
        """Yield objects below `directory` ('', or with a trailing slash) in key order, after `start_after`."""
        for name in self._list_entries(directory, start_after):
            key = directory + name
            if name.endswith("/"):
                yield from self._walk(key, start_after)
            else:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield ObjectInfo(key, (self._root / key).stat().st_size)

    def _list_entries(self, directory: str, start_after: str | None = None) -> builtins.list[str]:
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


def _fsync(path: Path) -> None:
    """Write the content to disk, so that a renamed file has it after a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _translate_errors(action: str, key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        if action in {"read", "download"}:
            raise ObjectNotFoundError(f"there is no object {key!r}", field="key", value=key) from error
        raise StorageError(f"cannot {action} {key!r}: {error}", field="key", value=key) from error
    except OSError as error:
        raise StorageError(f"cannot {action} {key!r}: {error}", field="key", value=key) from error


_BUCKET_SCHEMES = {"s3", "gs", "az"}
_URI_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(uri: str, *, patient: bool = True) -> ObjectStore:
    """Return the store at `uri`: a directory, `file:///directory`, or `s3://`, `gs://` or `az://` with bucket and
    prefix. No I/O; `ping` checks whether the store is available.

    A patient store retries for about 30 seconds while its server is unavailable, as workers need. Otherwise it fails
    within seconds, as servers need.

    Raises `InvalidInputError` for any other address.
    """
    scheme = _URI_SCHEME.match(uri)
    name = scheme.group(1).lower() if scheme else "file"
    if name in _BUCKET_SCHEMES:
        from swiftkv_platform.storage.bucket_store import BucketStore

        bucket, prefix = _parse_bucket(uri)
        return BucketStore(name, bucket, prefix, patient=patient)
    if name == "file" and uri:
        return LocalObjectStore(_parse_file(uri) if scheme else Path(uri).expanduser())
    raise _make_error(uri, "its scheme is unknown" if uri else "it is empty")


def _parse_bucket(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise _make_error(uri, "it has a query; set the endpoint by AWS_ENDPOINT_URL")
    if not BUCKET_NAME.fullmatch(parts.netloc):
        raise _make_error(uri, f"it names no bucket ({BUCKET_NAME_RULE})")
    prefix = parts.path.strip("/")
    fault = find_key_fault(prefix) if prefix else None
    if fault is not None:
        raise _make_error(uri, f"its prefix {fault}")
    return parts.netloc, prefix


def _parse_file(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise _make_error(uri, "a file URI must have an absolute path and no host")
    return Path(unquote(parts.path))


def _make_error(uri: str, why: str) -> InvalidInputError:
    shown = re.sub(r"//[^/@]*@", "//", uri)
    return InvalidInputError(
        f"object store address {shown!r} is not valid: {why}; use a directory, file:///directory, "
        "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        field="storage_uri",
        value=shown,
    )
