"""Checkpoints on their way to the store while training goes on. Knows files and names, nothing of what they hold."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist

from swiftkv_platform.contract.attempts import ManifestFile
from swiftkv_platform.distillation.course import Course
from swiftkv_platform.errors import StorageError

T = TypeVar("T")
_LONGEST_UPLOAD = timedelta(hours=4)


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Positions the loss has counted."""
    course: Course = field(default_factory=Course)


class CheckpointFiles(Protocol):
    """Files of a complete checkpoint, each of the size that its manifest says."""

    def fetch(self, name: str, destination: Path) -> None:
        """Download one of them into the directory `destination`."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes of one of them, all that are asked for."""


class CheckpointStore(Protocol):
    """Store of checkpoints; one is complete or invisible. Uploads come from a thread of their own."""

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        """Add one worker's files to checkpoint `name`; again after a failure, it completes them."""

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: Progress, world_size: int) -> None:
        """Make `name`, all of whose `files` are there, complete, and drop what is older than the newest few,
        the state that `progress` says is the best left out."""

    def failed(self, name: str, progress: Progress, error: StorageError) -> None:
        """Checkpoint `name` stays incomplete, and training goes on."""

    def candidates(self) -> list[str]:
        """Keys of complete checkpoints, the one to go on from first."""

    def of_step(self, step: int) -> list[str]:
        """Keys of complete checkpoints of that step, the one to take first."""

    def fetch(self, key: str, directory: Path) -> None:
        """Download a complete checkpoint to `directory`, which does not exist yet."""

    def open(self, key: str) -> CheckpointFiles:
        """A complete checkpoint, to read parts of."""


@dataclass(frozen=True)
class Retries:
    """Tries of an upload before it counts as failed; the wait between tries doubles."""

    tries: int = 5
    first_wait_s: float = 1.0

    def __call__(self, function: Callable[[], T]) -> T:
        for wait in range(self.tries - 1):
            try:
                return function()
            except StorageError:
                time.sleep(self.first_wait_s * 2**wait)
        return function()


class Uploader:
    """Uploads one checkpoint at a time, on a thread of every worker; the first one completes it when all have theirs.

    Created by all workers at the same time. The threads talk to each other over a process group of their own.
    """

    def __init__(self, store: CheckpointStore, retries: Retries) -> None:
        self._store = store
        self._retries = retries
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_UPLOAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, directory: Path, name: str, progress: Progress) -> None:
        """Upload and then delete this worker's `directory`. Waits for the checkpoint before, whose failure is past."""
        self.wait()
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(directory, name, progress), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last checkpoint. Raises `StorageError` where it is not complete, on every worker alike."""
        self.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the last checkpoint, complete or reported as lost."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not isinstance(self._error, StorageError):
            raise self._error

    def _run(self, directory: Path, name: str, progress: Progress) -> None:
        try:
            self._error = self._upload(directory, name, progress)
        except BaseException as error:
            self._error = error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _upload(self, directory: Path, name: str, progress: Progress) -> StorageError | None:
        """Upload and return the error that left the checkpoint incomplete, if any, the same on every worker."""
        mine: dict[str, ManifestFile] | StorageError
        try:
            mine = self._retries(lambda: self._store.upload(directory, name)) if any(directory.iterdir()) else {}
        except StorageError as error:
            mine = error
        parts: list[dict[str, ManifestFile] | StorageError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine, group=self._group)
        result = [next((part for part in parts if isinstance(part, StorageError)), None)]
        if dist.get_rank() == 0:
            files = {path: file for part in parts if isinstance(part, dict) for path, file in part.items()}
            result = [result[0] or self._commit(name, files, progress)]
            if result[0] is not None:
                self._store.failed(name, progress, result[0])
        dist.broadcast_object_list(result, group=self._group)
        return result[0]

    def _commit(self, name: str, files: Mapping[str, ManifestFile], progress: Progress) -> StorageError | None:
        try:
            self._retries(lambda: self._store.commit(name, files, progress, dist.get_world_size()))
        except StorageError as error:
            return error
        return None
