"""Directories of files in an object store, published atomically and verified when fetched.

A directory is complete once it has a `manifest.json`, which is written last, with size and SHA-256 of every file.
Independent of the files' meaning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from swiftkv_platform.contract.attempts import MANIFEST, Manifest, ManifestFile, ManifestKind
from swiftkv_platform.errors import (
    ArtifactCorruptError,
    ConflictError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
)
from swiftkv_platform.limits import MANIFEST_BYTES, MANIFEST_STRINGS, MANIFEST_VALUES
from swiftkv_platform.sources.untrusted_files import UnusableFileError, check_length
from swiftkv_platform.storage.object_store import (
    CHUNK_SIZE,
    ObjectStore,
    join_object_key,
    read_small_object,
    validate_object_key,
)
from swiftkv_platform.web.safe_json import exceeds_limits

_MAX_CONCURRENT_FILES = 4
_MAX_CONCURRENT_PARTS = 4
_PART_SIZE = 64 << 20
"""Bytes per part; each part is fetched over one connection."""
_MAX_REASON_LENGTH = 300

T = TypeVar("T")


def publish_directory(
    store: ObjectStore,
    directory: Path,
    prefix: str,
    *,
    kind: ManifestKind,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, Any],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Manifest:
    """Upload every file below `directory` to `prefix`, then the manifest, and return the manifest.

    Idempotent: a retry completes a failed upload. Raises `ConflictError` if `prefix` is complete with other files.
    `progress`: called with uploaded and total bytes.
    """
    if is_complete(store, prefix):
        return _require_same_files(read_manifest(store, prefix), describe_directory(directory), prefix)
    files = upload_files(store, directory, prefix, progress)
    return write_manifest(store, prefix, files, kind=kind, lineage=lineage, metrics=metrics)


def describe_directory(directory: Path) -> dict[str, ManifestFile]:
    """Return size and SHA-256 of every file below `directory` by relative path, without a `manifest.json` at the top.

    Raises `InvalidInputError` if there is no file.
    """
    names = {path.relative_to(directory).as_posix(): path for path in sorted(_list_files(directory))}
    if not names:
        raise InvalidInputError.for_field("directory", str(directory), ", which has no files")
    with ThreadPoolExecutor(_MAX_CONCURRENT_FILES) as pool:
        return dict(zip(names, pool.map(_describe_file, names.values()), strict=True))


def upload_files(
    store: ObjectStore,
    directory: Path,
    prefix: str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, ManifestFile]:
    """Upload every file below `directory` to `prefix`, without a manifest.

    Several ranks may upload their own files to one prefix; one of them merges the results and passes them to
    `write_manifest`. `progress`: see `publish_directory`.
    """
    files = describe_directory(directory)
    done, total = 0, sum(file.size for file in files.values())
    progress(done, total)
    with ThreadPoolExecutor(_MAX_CONCURRENT_FILES) as pool:
        uploads = pool.map(lambda name: store.upload_file(directory / name, join_object_key(prefix, name)), files)
        for file, _ in zip(files.values(), uploads, strict=True):
            done += file.size
            progress(done, total)
    return files


def write_manifest(
    store: ObjectStore,
    prefix: str,
    files: Mapping[str, ManifestFile],
    *,
    kind: ManifestKind,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> Manifest:
    """Complete `prefix` after all files are uploaded. Returns the stored manifest.

    Raises `ConflictError` if the prefix is complete with other files, and `InvalidInputError` for invalid file names,
    lineage or metrics.
    """
    manifest = Manifest(
        kind=kind, files=dict(files), created_at=time.time(), lineage=dict(lineage), metrics=dict(metrics)
    )
    _check_names(manifest)
    try:
        store.put_bytes(join_object_key(prefix, MANIFEST), to_canonical_json(manifest), if_absent=True)
    except ConflictError:
        return _require_same_files(read_manifest(store, prefix), files, prefix)
    return manifest


def is_complete(store: ObjectStore, prefix: str) -> bool:
    """Whether the directory has a manifest, and so all files."""
    return store.head(join_object_key(prefix, MANIFEST)) is not None


def read_manifest(store: ObjectStore, prefix: str) -> Manifest:
    """Return the manifest of a complete directory. Raises `ObjectNotFoundError` for an incomplete or missing directory,
    and `ArtifactCorruptError` for an invalid manifest."""
    key = join_object_key(prefix, MANIFEST)
    try:
        return parse_manifest(read_small_object(store, key, MANIFEST_BYTES.default))
    except UnusableFileError as error:
        raise ArtifactCorruptError(f"manifest {key!r} in {store.uri} {error}", field="key", value=key) from error


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest. Raises `UnusableFileError` if it is invalid or has too many values."""
    check_length(data, MANIFEST_BYTES.default)
    if exceeds_limits(data, MANIFEST_VALUES.default, MANIFEST_STRINGS.default):
        raise UnusableFileError(f"has more than {MANIFEST_VALUES.default} values or {MANIFEST_STRINGS.default} strings")
    try:
        manifest = Manifest.model_validate_json(data)
        _check_names(manifest)
    except InvalidInputError as error:
        raise UnusableFileError(f"cannot be read: {error.message}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:_MAX_REASON_LENGTH]
        raise UnusableFileError(f"cannot be read: {why}") from error
    return manifest


def hash_manifest(manifest: Manifest) -> str:
    """Return the SHA-256 (hex) of the stored manifest, which identifies the content of all files."""
    return hashlib.sha256(to_canonical_json(manifest)).hexdigest()


def delete_directory(store: ObjectStore, prefix: str) -> None:
    """Delete a directory, manifest first, so that it is incomplete at once."""
    store.delete(join_object_key(prefix, MANIFEST))
    store.delete_prefix(prefix)


def fetch_directory(store: ObjectStore, prefix: str, destination: Path) -> Manifest:
    """Download the complete directory at `prefix` to `destination` atomically, and verify size and SHA-256 of every
    file.

    A `destination` with exactly these files (after hashing) is kept; one with another or a damaged artifact is
    replaced.

    Raises `ObjectNotFoundError` if `prefix` is incomplete, `ArtifactCorruptError` if a file differs from the manifest,
    and `ConflictError` if `destination` exists and is not an artifact.
    """
    manifest = read_manifest(store, prefix)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # One process of this machine at a time fetches it; the lock file stays.
        with (destination.parent / f".{destination.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _has_files(destination, manifest):
                _download_and_replace(destination, store, prefix, manifest)
    except OSError as error:
        raise _make_write_error(destination, error) from error
    return manifest


def _make_write_error(destination: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {destination}: {error}", field="destination", value=str(destination))


class StoredDirectory:
    """A complete directory in an object store, with files and byte ranges read on demand.

    File sizes are checked when the directory is opened, lengths of ranges when they are read. SHA-256 covers whole
    files, so only `fetch` verifies it.

    Raises `ObjectNotFoundError` if it is incomplete, `ArtifactCorruptError` if a file is missing or has another size.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self.manifest = read_manifest(store, prefix)
        sizes = {info.key: info.size for info in store.list(prefix)}
        for name, file in self.manifest.files.items():
            key = join_object_key(prefix, name)
            if key not in sizes:
                raise _make_missing_error(store, key, file)
            if sizes[key] != file.size:
                raise _make_corrupt_error(store, key, f"expected {file.size} bytes, found {sizes[key]} bytes")

    def fetch(self, name: str, destination: Path) -> None:
        """Download and verify one file into the directory `destination`. Raises as `fetch_file`."""
        key, file = self._find_file(name)
        try:
            fetch_file(self._store, key, destination / name, file)
        except OSError as error:
            raise _make_write_error(destination, error) from error

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of one file. Raises `ArtifactCorruptError` if it does not have all of them."""
        key, file = self._find_file(name)
        try:
            data = b"".join(self._store.stream(key, start=start, stop=stop))
        except ObjectNotFoundError as error:
            raise _make_missing_error(self._store, key, file) from error
        if len(data) != stop - start:
            raise _make_corrupt_error(
                self._store, key, f"expected {stop - start} bytes from byte {start} on, found {len(data)}"
            )
        return data

    def _find_file(self, name: str) -> tuple[str, ManifestFile]:
        key = join_object_key(self._prefix, name)
        if name not in self.manifest.files:
            raise _make_corrupt_error(self._store, key, "it is not in the manifest")
        return key, self.manifest.files[name]


def _download_and_replace(destination: Path, store: ObjectStore, prefix: str, manifest: Manifest) -> None:
    """Download to a temporary directory, then move it to `destination`."""
    is_artifact = (destination / MANIFEST).is_file()
    if destination.exists() and not (destination.is_dir() and (is_artifact or not any(destination.iterdir()))):
        why = ", which is not empty and is not an artifact; use an empty or new directory"
        raise ConflictError.for_field("destination", str(destination), why)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=destination.parent) as workspace:
        fresh = Path(workspace) / "new"
        fresh.mkdir()
        files = [(store, join_object_key(prefix, name), fresh / name, file) for name, file in manifest.files.items()]
        for _ in _call_in_parallel(_MAX_CONCURRENT_FILES, fetch_file, files):
            pass
        (fresh / MANIFEST).write_bytes(to_canonical_json(manifest))
        if destination.exists():
            destination.rename(Path(workspace) / "old")
        fresh.rename(destination)


def _call_in_parallel(num_threads: int, function: Callable[..., T], calls: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """Yield the results of the calls in order. The first failure cancels calls that have not started."""
    with ThreadPoolExecutor(num_threads) as pool:
        running = [pool.submit(function, *arguments) for arguments in calls]
        try:
            for call in running:
                yield call.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def fetch_file(store: ObjectStore, key: str, path: Path, expected: ManifestFile) -> None:
    """Download an object to the file `path`, large ones in parallel parts, and verify its size and SHA-256.

    Raises `ArtifactCorruptError` if they differ from `expected`.
    """
    digest, size = hashlib.sha256(), 0
    starts = range(0, max(expected.size, 1), _PART_SIZE)
    stops = [*starts[1:], None]  # no stop for the last part, to detect a longer object
    parts = [(store, key, path, start, stop) for start, stop in zip(starts, stops, strict=True)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        with path.open("rb", buffering=0) as file:  # unbuffered: read only what is written
            for length in _call_in_parallel(_MAX_CONCURRENT_PARTS, _fetch_part, parts):
                size += length
                while (left := size - file.tell()) and (chunk := file.read(min(left, CHUNK_SIZE))):
                    digest.update(chunk)
    except ObjectNotFoundError as error:
        raise _make_missing_error(store, key, expected) from error
    if ManifestFile(size=size, sha256=digest.hexdigest()) != expected:
        raise _make_corrupt_error(
            store,
            key,
            f"expected {expected.size} bytes with sha256 {expected.sha256}, "
            f"found {size} bytes with sha256 {digest.hexdigest()}",
        )


def _fetch_part(store: ObjectStore, key: str, path: Path, start: int, stop: int | None) -> int:
    """Write a part of an object at its offset of the file. Returns its length in bytes."""
    with path.open("r+b") as file:
        file.seek(start)
        for chunk in store.stream(key, start=start, stop=stop):
            file.write(chunk)
        return file.tell() - start


def _make_missing_error(store: ObjectStore, key: str, expected: ManifestFile) -> ArtifactCorruptError:
    return _make_corrupt_error(store, key, f"it is missing, expected {expected.size} bytes")


def _make_corrupt_error(store: ObjectStore, key: str, difference: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"{key!r} in {store.uri} differs from its manifest: {difference}; publish the directory under another prefix",
        field="file",
        value=key,
    )


def _has_files(directory: Path, manifest: Manifest) -> bool:
    """Whether `directory` has exactly the files of `manifest`."""
    if not (directory / MANIFEST).is_file() or (directory / MANIFEST).read_bytes() != to_canonical_json(manifest):
        return False
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in _list_files(directory)}
    if sizes != {name: file.size for name, file in manifest.files.items()}:
        return False
    return describe_directory(directory) == manifest.files


def _list_files(directory: Path) -> Iterator[Path]:
    """Return the files below `directory`, without a manifest at its top."""
    return (path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST)


def _describe_file(path: Path) -> ManifestFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_SIZE):
            digest.update(chunk)
            size += len(chunk)
    return ManifestFile(size=size, sha256=digest.hexdigest())


def _require_same_files(existing: Manifest, files: Mapping[str, ManifestFile], prefix: str) -> Manifest:
    differing = sorted(
        name for name in existing.files.keys() | files.keys() if existing.files.get(name) != files.get(name)
    )
    if differing:
        why = f", which already has an artifact with different files ({', '.join(differing[:3])}); use another prefix"
        raise ConflictError.for_field("prefix", prefix, why)
    return existing


def _check_names(manifest: Manifest) -> None:
    for name in manifest.files:
        validate_object_key(name)
        if name == MANIFEST:
            raise InvalidInputError(
                f"{MANIFEST!r} is reserved for the manifest; rename the file",
                field="files",
                value=name,
            )


def to_canonical_json(manifest: Manifest) -> bytes:
    """Return the manifest as canonical JSON: sorted keys, no whitespace, UTF-8. Raises `InvalidInputError`."""
    document = manifest.model_dump()  # JSON mode would turn NaN into null
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"lineage and metrics of a manifest must be plain JSON with finite numbers: {error}", field="lineage"
        ) from error
    return text.encode()
