"""Downloads from `s3://` addresses, and files of imported models, whose number and sizes are checked before reading.

The owner of a source may change it at any time. So an imported file is read from one descriptor, without following
links, and a file whose size has changed since it was listed is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftkv_platform.errors import BucketError, InvalidInputError, ModelError
from swiftkv_platform.limits import IMPORT_DEPTH, IMPORT_FILES, IMPORT_SMALL_FILE_BYTES, IMPORT_SMALL_FILES_BYTES
from swiftkv_platform.sources import Access, Boundary, S3Source
from swiftkv_platform.sources.model_directories import check_model_files
from swiftkv_platform.sources.names import find_key_fault
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.object_store import CHUNK_SIZE, ObjectInfo, ObjectStore


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
