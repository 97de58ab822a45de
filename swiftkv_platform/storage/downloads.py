"""Downloads from `s3://` addresses, and files of imported models, whose number and sizes are checked before reading.

The owner of a source may change it at any time. So an imported file is read from one descriptor, without following
links, and a file whose size has changed since it was listed is refused.

Published directories are cached on this machine: verified copies, named by manifest digest, shared by all processes. A
copy is created atomically and locked against eviction while in use. Eviction is least recently used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from swiftkv_platform.contract.attempts import Manifest
from swiftkv_platform.errors import BucketError, InvalidInputError, ModelError, StorageError
from swiftkv_platform.limits import IMPORT_DEPTH, IMPORT_FILES, IMPORT_SMALL_FILE_BYTES, IMPORT_SMALL_FILES_BYTES
from swiftkv_platform.logs import get_logger
from swiftkv_platform.private_directories import ensure_private_directory
from swiftkv_platform.sources import Access, Boundary, S3Source
from swiftkv_platform.sources.model_directories import check_model_files
from swiftkv_platform.sources.names import find_key_fault
from swiftkv_platform.storage.artifacts import fetch_directory, hash_manifest, read_manifest
from swiftkv_platform.storage.object_store import CHUNK_SIZE, ObjectInfo, ObjectStore, open_store


def download_model(uri: str, target: Path, *, access: Access, field: str) -> Path:
    """Download the model below `uri` to `target`. Raises `ModelError` if there is none, or, with restricted sources, if
    the model needs code or other files than its own."""
    download_prefix(uri, target, ModelError, field=field)
    if access.is_restricted:
        check_model_files(target, Boundary.from_directories(target), field)
    return target


def make_model_download(workspace: Path, *, access: Access, field: str, fetch: bool = True) -> Callable[[str], Path]:
    """Return a function that downloads the model below an `s3://` address as `download_model`, to a directory below
    `workspace`. `fetch`: whether to download it; False: only return the path, because another process downloads it."""

    def download(uri: str) -> Path:
        target = workspace / f"model-{hashlib.sha256(uri.encode()).hexdigest()[:32]}"
        return download_model(uri, target, access=access, field=field) if fetch else target

    return download


def download_prefix(uri: str, target: Path, missing: type[InvalidInputError], *, field: str) -> None:
    """Download every object below `uri` to `target`. Raises `missing` if there is none."""
    source = S3Source(uri)
    with open_source_bucket(source, missing, field=field) as store:
        for info in list(list_prefix(store, source, missing, field=field)):
            path = target / info.key.removeprefix(source.key).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download_file(info.key, path)


def list_prefix(
    store: ObjectStore, source: S3Source, missing: type[InvalidInputError], *, field: str
) -> Iterator[ObjectInfo]:
    """Yield the objects below `source`, in the bucket `store`. Raises `missing` if there is none."""
    listed = store.list(source.key)
    first = next(listed, None)
    if first is None:
        raise missing.for_field(field, source.name, "; no object exists at or below that address")
    yield first
    yield from listed


@contextmanager
def open_source_bucket(source: S3Source, missing: type[InvalidInputError], *, field: str) -> Iterator[ObjectStore]:
    """Open the bucket of `source`. Raises `missing` instead of `BucketError` for a missing or inaccessible bucket."""
    try:
        yield open_store(source.store)
    except BucketError as error:
        raise missing.for_field(field, source.name, f": {error.message}") from error


_WEIGHTS_SUFFIX = ".safetensors"
_OPEN_DIRECTORY_FLAG = getattr(os, "O_PATH", os.O_RDONLY)
"""Flag to open a parent directory, which need not be readable."""


@dataclass(frozen=True)
class IncomingFile:
    """One file of a model to import."""

    name: str
    """Path relative to the source, with `/`."""
    size: int
    """Bytes when the file was listed; apparent size of a sparse file."""
    stream: Callable[[], Iterator[bytes]]
    """Function that reads the file to its end, even if the file has grown."""
    field: str

    @property
    def is_small(self) -> bool:
        """Whether the file is copied to this machine and validated; weights are only copied from store to store."""
        return not self.name.endswith(_WEIGHTS_SUFFIX)

    def stream_with_size_check(self) -> Iterator[bytes]:
        """Yield the file's bytes, at most `size`. Raises `ModelError` if the file's size has changed."""
        left = self.size
        for piece in self.stream():
            if len(piece) > left:
                raise self._make_changed_error()
            left -= len(piece)
            yield piece
        if left:
            raise self._make_changed_error()

    def _make_changed_error(self) -> ModelError:
        why = "has changed during the import; import it again when it is complete"
        return _make_file_error(self.field, self.name, why)


def list_directory(directory: Path, boundary: Boundary, *, field: str) -> list[IncomingFile]:
    """List the regular files below a directory, sorted by name. Links to files are followed within `boundary`.

    Raises `ModelError` for files outside of it, for pipes, devices and links to directories, and for too many files or
    directories.
    """
    found: list[IncomingFile] = []
    pending = [(boundary.check_path(directory, field, error=ModelError), "")]
    num_entries = 0
    while pending:
        parent, prefix = pending.pop()
        with os.scandir(parent) as entries:
            for entry in entries:
                num_entries += 1
                name = f"{prefix}{entry.name}"
                _check_entry(name, num_entries, field)
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), f"{name}/"))
                else:
                    found.append(_inspect_file(Path(entry.path), name, boundary, field))
    return sorted(found, key=lambda file: file.name)


@contextmanager
def list_bucket(source: S3Source, *, field: str) -> Iterator[list[IncomingFile]]:
    """List the objects below an address; they can be read within the context. Raises `ModelError` for none or too
    many."""
    with open_source_bucket(source, ModelError, field=field) as store:
        found: list[IncomingFile] = []
        for num_entries, info in enumerate(list_prefix(store, source, ModelError, field=field), 1):
            name = info.key.removeprefix(source.key).lstrip("/")
            _check_entry(name, num_entries, field)

            found.append(IncomingFile(name, info.size, partial(store.stream, info.key), field))
        yield found


def check_sizes(files: Sequence[IncomingFile], max_bytes: int, *, field: str) -> int:
    """Return the total bytes. Raises `ModelError` for more than `max_bytes`, or for too large files other than
    weights."""
    small = 0
    for file in files:
        if file.is_small:
            small += file.size
            if file.size > IMPORT_SMALL_FILE_BYTES.default:
                most_small = f"only weights (*{_WEIGHTS_SUFFIX}) may have more than {IMPORT_SMALL_FILE_BYTES.default}"
                raise _make_file_error(
                    field, file.name, f"has {file.size} bytes, and {most_small}; remove it from the source"
                )
    total = sum(file.size for file in files)
    for size, limit, which in (
        (small, IMPORT_SMALL_FILES_BYTES.default, f"files other than weights (*{_WEIGHTS_SUFFIX})"),
        (total, max_bytes, "files"),
    ):
        if size > limit:
            message = f"{field}: the source's {which} have {size} bytes in total; the limit is {limit}"
            raise ModelError(message, field=field, value=size)
    return total


def _check_entry(name: str, num_entries: int, field: str) -> None:
    if num_entries > IMPORT_FILES.default:
        why = f"the source has more than {IMPORT_FILES.default} files and directories; remove unneeded files"
        raise ModelError(f"{field}: {why}", field=field, value=num_entries)
    if name.count("/") > IMPORT_DEPTH.default:
        message = f"{field}: the source has more than {IMPORT_DEPTH.default} nested directories; use fewer levels"
        raise ModelError(message, field=field, value=ascii(name[:200]))
    fault = find_key_fault(os.fsencode(name).decode(errors="backslashreplace"))
    if fault is not None:
        raise ModelError(
            f"{field}: the file name {name[:200]!a} {fault}; rename it", field=field, value=ascii(name[:200])
        )


def _make_file_error(field: str, name: str, why: str) -> ModelError:
    return ModelError(f"{field}: {name!r} {why}", field=field, value=name)


def _inspect_file(path: Path, name: str, boundary: Boundary, field: str) -> IncomingFile:
    real = Path(os.path.realpath(boundary.check_path(path, field, error=ModelError)))
    try:
        status = real.lstat()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); complete the source, or remove it"
        raise _make_file_error(field, name, why) from error
    if not stat.S_ISREG(status.st_mode):
        raise _make_file_error(field, name, "is not a regular file; remove it from the source")
    return IncomingFile(name, status.st_size, partial(_stream_file, real, name, field), field)


def _stream_file(real: Path, name: str, field: str) -> Iterator[bytes]:
    """Yield the bytes of a regular file. Raises `ModelError` if its path now contains a link, which may leave the
    boundary, or is another kind of file."""
    try:
        descriptor = _open_without_links(real)
    except OSError as error:
        why = f"has changed during the import ({error.strerror}); import it again"
        raise _make_file_error(field, name, why) from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _make_file_error(field, name, "is not a regular file")
        while piece := file.read(CHUNK_SIZE):
            yield piece


def _open_without_links(real: Path) -> int:
    """Open a file by its real path, one directory after another, so that no link is followed. Does not block on
    pipes."""
    holder = os.open(real.anchor, _OPEN_DIRECTORY_FLAG | os.O_DIRECTORY)
    try:
        for part in real.parts[1:-1]:
            inner = os.open(part, _OPEN_DIRECTORY_FLAG | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=holder)
            os.close(holder)
            holder = inner
        return os.open(real.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=holder)
    finally:
        os.close(holder)


_VERIFIED = ".verified"
"""Suffix of the file with sizes and modification times of a copy's files when verified."""
_LOCK_SUFFIX = ".lock"
"""Suffix of a copy's lock file: shared lock for use, exclusive lock for eviction."""
_FETCH_LOCK_SUFFIX = ".fetching"
"""Suffix of the lock file of the process that checks or fetches a copy."""
_ABANDONED_AFTER_S = 24 * 3600.0


class ArtifactCache:
    """Copies below a directory, at most `max_bytes` in total. A larger artifact is fetched for each use."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes

    @contextmanager
    def open_copy(self, store: ObjectStore, prefix: str) -> Iterator[tuple[Path, Manifest]]:
        """Yield (local copy, manifest) of the complete directory at `prefix`. The copy is not evicted within the
        context.

        One process per machine fetches a missing copy while others wait. Every byte is verified after fetching. A
        copy whose files changed in size or modification time is verified again, and replaced if it differs.

        Raises as `fetch_directory`, and `StorageError` if the cache cannot be written.
        """
        manifest = read_manifest(store, prefix)
        if manifest.size > self._max_bytes:
            with tempfile.TemporaryDirectory(prefix="swiftkv-model-") as workspace:
                path = Path(workspace) / "model"
                yield path, fetch_directory(store, prefix, path)
            return
        path = self._directory / hash_manifest(manifest)
        try:
            lock = self._fetch_and_lock(store, prefix, path, manifest)
        except OSError as error:
            raise StorageError(
                f"model cache {self._directory}: {error}", field="directory", value=str(self._directory)
            ) from error
        with lock:
            yield path, manifest

    def _fetch_and_lock(self, store: ObjectStore, prefix: str, path: Path, manifest: Manifest) -> TextIO:
        """Check or fetch the copy, and return its open lock file, which prevents eviction until closed."""
        ensure_private_directory(self._directory)
        lock = self._get_lock_path(path.name).open("w")
        try:
            with path.with_name(path.name + _FETCH_LOCK_SUFFIX).open("w") as fetching:
                fcntl.flock(fetching, fcntl.LOCK_EX)
                fcntl.flock(lock, fcntl.LOCK_SH)  # other processes may use the copy too
                if not self._is_intact(path):
                    self._evict(manifest.size, except_name=path.name)
                    fetch_directory(store, prefix, path)
                    path.with_name(path.name + _VERIFIED).write_text(json.dumps(_describe_files(path)))
            os.utime(self._get_lock_path(path.name))  # time of last use
        except BaseException:
            lock.close()
            raise
        return lock

    def _is_intact(self, path: Path) -> bool:
        """Whether the copy's files have the sizes and modification times they had when verified."""
        try:
            return bool(
                json.loads(path.with_name(path.name + _VERIFIED).read_text()) == _describe_files(path) and path.is_dir()
            )
        except (FileNotFoundError, ValueError):
            return False

    def _evict(self, size: int, *, except_name: str) -> None:
        """Remove unused copies, least recently used first, until `size` more bytes fit into `max_bytes` and the
        disk."""
        for abandoned in self._directory.glob(".fetch-*"):  # of a killed process
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(abandoned, ignore_errors=True)
        inside = self._directory.iterdir()
        copies = {
            path.name: _measure_size(path)
            for path in inside
            if path.is_dir() and self._get_lock_path(path.name).exists()
        }
        copies.pop(except_name, None)
        total = sum(copies.values())
        for name in sorted(copies, key=lambda name: self._get_lock_path(name).stat().st_mtime):
            if total + size <= self._max_bytes and shutil.disk_usage(self._directory).free >= size:
                return
            if self._remove(name):
                total -= copies[name]

    def _remove(self, digest: str) -> bool:
        """Remove a copy unless it is in use. Returns whether it was removed."""
        with self._get_lock_path(digest).open("r") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            (self._directory / (digest + _VERIFIED)).unlink(missing_ok=True)
            shutil.rmtree(self._directory / digest)
            get_logger().info("cached_model_removed", manifest_digest=digest)
            return True

    def _get_lock_path(self, digest: str) -> Path:
        return self._directory / (digest + _LOCK_SUFFIX)


def _describe_files(directory: Path) -> dict[str, list[int]]:
    """Return size and modification time (ns) of every file, by relative path."""
    files = {path: path.stat() for path in directory.rglob("*") if path.is_file()}
    return {path.relative_to(directory).as_posix(): [it.st_size, it.st_mtime_ns] for path, it in sorted(files.items())}


def _measure_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
