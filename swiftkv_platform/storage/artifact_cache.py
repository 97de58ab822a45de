"""Cache of published directories on this machine: verified copies, named by manifest digest, shared by all processes.

A copy is created atomically and locked against eviction while in use. Eviction is least recently used. Independent of
the files' meaning.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from swiftkv_platform.contract.attempts import Manifest
from swiftkv_platform.errors import StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.private_directories import ensure_private_directory
from swiftkv_platform.storage.artifacts import fetch_directory, hash_manifest, read_manifest
from swiftkv_platform.storage.object_store import ObjectStore

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
