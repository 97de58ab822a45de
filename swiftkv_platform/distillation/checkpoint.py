"""Sharded training state: trained parameters, optimizer state and the run's progress. Uploads run while training goes
on, through a protocol that hides where the files are stored.

No other state is needed to resume: the learning rate depends on the step and the run's course, the rows of a batch on
the step alone, and a step draws no random numbers. A checkpoint can be loaded by another number of workers and by
another sharding strategy.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swiftkv_platform.contract.attempts import ManifestFile
from swiftkv_platform.distillation.course import Course, Progress
from swiftkv_platform.distillation.parallel import Parallel, State
from swiftkv_platform.distillation.pieces import INDEX, RangeReader, ReadRange
from swiftkv_platform.errors import ArtifactCorruptError, ObjectNotFoundError, StorageError, SwiftKVError
from swiftkv_platform.logs import get_logger

T = TypeVar("T")
# Torch logs this at every checkpoint of a single worker, see `_is_alone`.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
_LONGEST_UPLOAD = timedelta(hours=4)


class CheckpointFiles(Protocol):
    """Files of a complete checkpoint. Each has the size that the manifest gives."""

    def fetch(self, name: str, destination: Path) -> None:
        """Download file `name` into the directory `destination`."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of the file `name`, never fewer."""


class CheckpointStore(Protocol):
    """Store of checkpoints; each is complete or invisible. `upload`, `commit` and `failed` run on an upload thread."""

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        """Add one worker's files to checkpoint `name`. May be called again after a failure to upload the rest."""

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: Progress, world_size: int) -> None:
        """Mark checkpoint `name` as complete; all `files` are stored. Delete older checkpoints except the newest few
        and the best one according to `progress`."""

    def failed(self, name: str, progress: Progress, error: StorageError) -> None:
        """Report that checkpoint `name` stays incomplete; training goes on."""

    def candidates(self) -> list[str]:
        """Return the keys of complete checkpoints, the one to resume from first."""

    def of_step(self, step: int) -> list[str]:
        """Keys of complete checkpoints of that step, the one to take first."""

    def fetch(self, key: str, directory: Path) -> None:
        """Download a complete checkpoint to `directory`, which does not exist yet."""

    def open(self, key: str) -> CheckpointFiles:
        """A complete checkpoint, to read parts of."""


@dataclass(frozen=True)
class Retries:
    """Retry policy of an upload: number of tries, and first wait, which doubles with every try."""

    tries: int = 5
    first_wait_s: float = 1.0

    def __call__(self, function: Callable[[], T]) -> T:
        for wait in range(self.tries - 1):
            try:
                return function()
            except StorageError:
                time.sleep(self.first_wait_s * 2**wait)
        return function()


class Checkpointer:
    """Saves and restores one run. Its methods are collective: every worker calls them at the same time.

    Args:
        parallel: the fork, spread over the workers, and its optimizer.
        local_rank: this worker's rank on its machine; the first of a machine downloads for all of it.
    """

    def __init__(
        self, parallel: Parallel, store: CheckpointStore, *, local_rank: int, retries: Retries | None = None
    ) -> None:
        self._parallel = parallel
        self._store = store
        self._local_rank = local_rank
        self._uploader = Uploader(store, retries or Retries())

    def save(self, progress: Progress) -> None:
        """Write a checkpoint to local disk and upload it while training goes on.

        A failed upload is reported; the previous checkpoint then stays the newest.
        """
        # A run that died before it could complete a checkpoint saves the same step again: the names must differ.
        name = from_rank_0(lambda: f"step-{progress.step:08d}-w{dist.get_world_size()}-{uuid4().hex[:8]}")
        directory = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        numbers = progress.course.numbers()
        progressed = {
            "step": torch.tensor(progress.step),
            "tokens": torch.tensor(progress.tokens),
            "course": {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()},
        }
        try:
            state = {**self._parallel.state(), "progress": progressed}
            save(state, storage_writer=FileSystemWriter(directory), no_dist=_is_alone())
        except BaseException:  # such as a full disk: the files left on it would keep it full
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._uploader.start(directory, name, progress)

    def finish(self) -> None:
        """Wait until the last checkpoint is in the store. Raises `StorageError` if it cannot be stored."""
        self._uploader.finish()

    def restore(self) -> Progress:
        """Load the newest complete checkpoint that is not damaged; a fresh `Progress` if there are none. Raises
        `StorageError` if there are some but none can be read."""
        keys = from_rank_0(self._store.candidates)
        if not keys:
            return Progress()
        progress = self._load(keys)
        course = progress.course
        if course.is_measured and not from_rank_0(lambda: self._store.of_step(course.best_step)):
            get_logger().warning("best_checkpoint_lost", step=course.best_step)
            return replace(progress, course=course.without_best())
        return progress

    def go_back(self, step: int) -> None:
        """Load the state saved after `step`, once its upload has ended. Raises `StorageError` if it is missing or
        unreadable; a later attempt resumes from the newest checkpoint."""
        self._uploader.wait()
        keys = from_rank_0(lambda: self._store.of_step(step))
        if not keys:
            raise StorageError(
                f"training must go back to step {step}, but the checkpoint of that step could not be stored"
            )
        self._load(keys)

    def _load(self, keys: Sequence[str]) -> Progress:
        for key in keys[:-1]:
            try:
                return self._load_one(key)
            except (ArtifactCorruptError, ObjectNotFoundError) as error:  # the same on every worker
                get_logger().warning("checkpoint_damaged", key=key, error=error.message)
        return self._load_one(keys[-1])

    def _load_one(self, key: str) -> Progress:
        workspace = Path(tempfile.gettempdir()) / from_rank_0(lambda: f"checkpoint-{uuid4().hex}")
        if self._local_rank == 0:
            workspace.mkdir(mode=0o700)
        try:
            reader = on_all_workers(lambda: self._open(key, workspace / "state"))
            step, tokens = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
            _load_state({"progress": {"step": step, "tokens": tokens}}, reader)
            course = _load_course(reader)
            self._parallel.load_state(lambda state: _load_state(state, reader))
            dist.barrier()
        finally:
            if self._local_rank == 0:
                shutil.rmtree(workspace, ignore_errors=True)
        return Progress(int(step), int(tokens), course)

    def _open(self, key: str, directory: Path) -> FileSystemReader:
        """Fetch a checkpoint once per machine: all of it if every worker needs all, otherwise the index only."""
        if not self._parallel.loads_parts:
            if self._local_rank == 0:
                self._store.fetch(key, directory)
            return FileSystemReader(directory)
        files = self._store.open(key)
        if self._local_rank == 0:
            files.fetch(INDEX, directory)
        return RangeReader(directory, files.read)


def _load_course(reader: FileSystemReader) -> Course:
    """Load the course of a checkpoint. Older versions of this package stored none, or fewer of its numbers."""
    stored = reader.read_metadata().state_dict_metadata
    numbers = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in Course().numbers().items()
        if f"progress.course.{name}" in stored
    }
    if numbers:
        _load_state({"progress": {"course": numbers}}, reader)
    return Course.of({name: float(value) for name, value in numbers.items()})


def load_whole_state(parallel: Parallel, directory: Path, read_range: ReadRange | None = None) -> None:
    """Load trained parameters and optimizer state from a checkpoint. Collective.

    Args:
        directory: has the checkpoint's index, `INDEX`.
        read_range: reads the other files; None: they are in `directory` as well.
    """
    reader = FileSystemReader(directory) if read_range is None else RangeReader(directory, read_range)
    parallel.load_state(lambda state: _load_state(state, reader))


def _load_state(state: State, reader: FileSystemReader) -> None:
    """Overwrite the tensors of `state`. Collective; a failure of the store at any worker is raised on all of them."""
    try:
        load(state, storage_reader=reader, no_dist=_is_alone())
    except CheckpointException as error:
        failures = (failure for failure, _ in error.failures.values())
        failure = next((each for each in failures if isinstance(each, StorageError)), None)
        if failure is None:
            raise
        raise failure from error


def _is_alone() -> bool:
    """Whether there is one worker, which needs no object collectives. For large objects gloo's threads make copies, and
    OpenMP gives each thread a team; with more such threads than cores, OpenMP puts all to sleep between operators."""
    return dist.get_world_size() == 1


class Uploader:
    """Uploads one checkpoint at a time, on a thread of every worker. Rank 0 commits it once all workers have uploaded
    their files.

    Created by all workers at the same time. The threads talk to each other over a process group of their own.
    """

    def __init__(self, store: CheckpointStore, retries: Retries) -> None:
        self._store = store
        self._retries = retries
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_UPLOAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, directory: Path, name: str, progress: Progress) -> None:
        """Upload this worker's `directory`, then delete it. Waits for the previous checkpoint and drops its error,
        which has been reported."""
        self.wait()
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(directory, name, progress), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last checkpoint. Raises `StorageError` on every worker if it is not complete."""
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


def on_all_workers(function: Callable[[], T]) -> T:
    """Call `function` on every worker and return this worker's result. Collective: a `SwiftKVError` on any worker is
    raised on all of them."""
    failure: SwiftKVError | None = None
    try:
        result = function()
    except SwiftKVError as error:
        failure = error
    failures: list[SwiftKVError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    first = next((each for each in failures if each is not None), None)
    if first is not None:
        raise first
    return result


def from_rank_0(make: Callable[[], T]) -> T:
    """Return on every worker what `make` returns on rank 0."""
    values: list[T | None] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return cast("T", values[0])
