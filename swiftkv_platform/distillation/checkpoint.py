"""Sharded checkpoints: trained parameters, optimizer state and the run's progress, uploaded in the background.

Resuming needs no other state: the learning rate depends on the step and the steering state, the rows of a batch depend
on the step alone, and a step draws no random numbers. Any number of workers and any sharding strategy can load a
checkpoint.
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
from swiftkv_platform.distillation.partial_reads import INDEX_FILE, RangeReader, ReadRange
from swiftkv_platform.distillation.steering import SteeringState, TrainingProgress
from swiftkv_platform.distillation.strategy import Strategy, TrainingState
from swiftkv_platform.errors import ArtifactCorruptError, ObjectNotFoundError, StorageError, SwiftKVError
from swiftkv_platform.logs import get_logger

T = TypeVar("T")
# Torch logs this at every checkpoint of a single worker, see `_is_single_worker`.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
_UPLOAD_TIMEOUT = timedelta(hours=4)


class CheckpointFiles(Protocol):
    """Files of a complete checkpoint, with the sizes in its manifest."""

    def fetch(self, name: str, destination: Path) -> None:
        """Download file `name` into the directory `destination`."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return all bytes of the file `name` from `start` to `stop` (exclusive), never only a part of them."""


class CheckpointStore(Protocol):
    """Store of checkpoints, which are complete or invisible. `upload`, `commit` and `report_failure` run on an upload
    thread."""

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        """Add one worker's files to checkpoint `name`. After a failure, another call uploads the remaining files."""

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: TrainingProgress, world_size: int) -> None:
        """Mark checkpoint `name` as complete; all `files` are stored. Delete older checkpoints except the newest few
        and the best one according to `progress`."""

    def report_failure(self, name: str, progress: TrainingProgress, error: StorageError) -> None:
        """Report that checkpoint `name` could not be stored; training continues."""

    def list_resumable_checkpoints(self) -> list[str]:
        """Return the keys of complete checkpoints, in the order to try them when resuming."""

    def find_by_step(self, step: int) -> list[str]:
        """Return the keys of complete checkpoints of a step, in the order to try them."""

    def fetch(self, key: str, directory: Path) -> None:
        """Download a complete checkpoint to `directory`, which does not exist yet."""

    def open(self, key: str) -> CheckpointFiles:
        """Open a complete checkpoint to read parts of its files."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff of an upload: the wait doubles with every attempt."""

    max_attempts: int = 5
    initial_backoff_s: float = 1.0

    def retry(self, function: Callable[[], T]) -> T:
        for attempt in range(self.max_attempts - 1):
            try:
                return function()
            except StorageError:
                time.sleep(self.initial_backoff_s * 2**attempt)
        return function()


class Checkpointer:
    """Saves and restores the state of a run. Its methods are collective: every worker calls them at the same time.

    Args:
        local_rank: this worker's rank on its machine; rank 0 downloads for all of them.
    """

    def __init__(
        self, strategy: Strategy, store: CheckpointStore, *, local_rank: int, retry_policy: RetryPolicy | None = None
    ) -> None:
        self._strategy = strategy
        self._store = store
        self._local_rank = local_rank
        self._uploader = Uploader(store, retry_policy or RetryPolicy())

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint to local disk and upload it in the background.

        After a failed upload, which is reported, the previous checkpoint remains the newest.
        """
        # A run that died before its checkpoint was complete saves the same step again, so names must be unique.
        name = broadcast_from_rank_0(lambda: f"step-{progress.step:08d}-w{dist.get_world_size()}-{uuid4().hex[:8]}")
        directory = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        steering = progress.steering.to_floats()
        counters = {
            "step": torch.tensor(progress.step),
            "tokens": torch.tensor(progress.tokens),
            "course": {key: torch.tensor(value, dtype=torch.float64) for key, value in steering.items()},
        }
        try:
            state = {**self._strategy.get_state(), "progress": counters}
            save(state, storage_writer=FileSystemWriter(directory), no_dist=_is_single_worker())
        except BaseException:  # e.g. a full disk, which these files would keep full
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._uploader.start_upload(directory, name, progress)

    def finish(self) -> None:
        """Wait until the last checkpoint is stored. Raises `StorageError` if that fails."""
        self._uploader.finish()

    def restore(self) -> TrainingProgress:
        """Load the newest intact checkpoint; return a new `TrainingProgress` if there are no checkpoints. Raises
        `StorageError` if none of the existing ones can be read."""
        keys = broadcast_from_rank_0(self._store.list_resumable_checkpoints)
        if not keys:
            return TrainingProgress()
        progress = self._load_first_intact(keys)
        state = progress.steering
        if state.is_measured and not broadcast_from_rank_0(lambda: self._store.find_by_step(state.best_step)):
            get_logger().warning("best_checkpoint_lost", step=state.best_step)
            return replace(progress, steering=state.without_best())
        return progress

    def roll_back(self, step: int) -> None:
        """Load the checkpoint of `step`, after its upload has ended. Raises `StorageError` if it is missing or
        unreadable; a later attempt resumes from the newest checkpoint."""
        self._uploader.wait_for_upload()
        keys = broadcast_from_rank_0(lambda: self._store.find_by_step(step))
        if not keys:
            raise StorageError(
                f"training cannot roll back to step {step}: the checkpoint of that step could not be "
                "stored; resume the job to continue from its newest checkpoint"
            )
        self._load_first_intact(keys)

    def _load_first_intact(self, keys: Sequence[str]) -> TrainingProgress:
        for key in keys[:-1]:
            try:
                return self._load_checkpoint(key)
            except (ArtifactCorruptError, ObjectNotFoundError) as error:  # the same on every worker
                get_logger().warning("checkpoint_damaged", key=key, error=error.message)
        return self._load_checkpoint(keys[-1])

    def _load_checkpoint(self, key: str) -> TrainingProgress:
        workspace = Path(tempfile.gettempdir()) / broadcast_from_rank_0(lambda: f"checkpoint-{uuid4().hex}")
        if self._local_rank == 0:
            workspace.mkdir(mode=0o700)
        try:
            reader = run_on_all_workers(lambda: self._open_reader(key, workspace / "state"))
            step, tokens = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
            _load_state({"progress": {"step": step, "tokens": tokens}}, reader)
            steering = _load_steering_state(reader)
            self._strategy.load_state(lambda state: _load_state(state, reader))
            dist.barrier()
        finally:
            if self._local_rank == 0:
                shutil.rmtree(workspace, ignore_errors=True)
        return TrainingProgress(int(step), int(tokens), steering)

    def _open_reader(self, key: str, directory: Path) -> FileSystemReader:
        """Open a checkpoint. Rank 0 of a machine downloads the whole checkpoint, or only the index if workers read
        shards."""
        if not self._strategy.reads_own_shards:
            if self._local_rank == 0:
                self._store.fetch(key, directory)
            return FileSystemReader(directory)
        files = self._store.open(key)
        if self._local_rank == 0:
            files.fetch(INDEX_FILE, directory)
        return RangeReader(directory, files.read)


def _load_steering_state(reader: FileSystemReader) -> SteeringState:
    """Load the steering state of a checkpoint. Older versions of this package stored none, or fewer fields."""
    stored = reader.read_metadata().state_dict_metadata
    values = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in SteeringState().to_floats().items()
        if f"progress.course.{name}" in stored
    }
    if values:
        _load_state({"progress": {"course": values}}, reader)
    return SteeringState.from_floats({name: float(value) for name, value in values.items()})


def load_training_state(strategy: Strategy, directory: Path, read_range: ReadRange | None = None) -> None:
    """Load trained parameters and optimizer state from a checkpoint. Collective.

    Args:
        directory: directory of the checkpoint's `INDEX_FILE`.
        read_range: reads the other files; None: they are in `directory` too.
    """
    reader = FileSystemReader(directory) if read_range is None else RangeReader(directory, read_range)
    strategy.load_state(lambda state: _load_state(state, reader))


def _load_state(state: TrainingState, reader: FileSystemReader) -> None:
    """Overwrite the tensors of `state`. Collective: a storage error of any worker is raised on all of them."""
    try:
        load(state, storage_reader=reader, no_dist=_is_single_worker())
    except CheckpointException as error:
        failures = (failure for failure, _ in error.failures.values())
        failure = next((each for each in failures if isinstance(each, StorageError)), None)
        if failure is None:
            raise
        raise failure from error


def _is_single_worker() -> bool:
    """Whether there is one worker, which skips object collectives. Gloo's threads copy large objects, and OpenMP gives
    each thread a team; with more threads than cores, OpenMP puts all of them to sleep between operators."""
    return dist.get_world_size() == 1


class Uploader:
    """Uploads one checkpoint at a time, on a thread of every worker. Rank 0 commits it once all workers have uploaded
    their files.

    Created by all workers at the same time. The threads communicate over their own process group.
    """

    def __init__(self, store: CheckpointStore, retry_policy: RetryPolicy) -> None:
        self._store = store
        self._retry_policy = retry_policy
        self._group = dist.new_group(backend="gloo", timeout=_UPLOAD_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start_upload(self, directory: Path, name: str, progress: TrainingProgress) -> None:
        """Upload this worker's `directory`, then delete it. Waits for the previous checkpoint first; its error has been
        reported already."""
        self.wait_for_upload()
        self._error = None
        self._thread = threading.Thread(target=self._run_upload, args=(directory, name, progress), name="checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last checkpoint. Raises `StorageError` on every worker if it is not complete."""
        self.wait_for_upload()
        if self._error is not None:
            raise self._error

    def wait_for_upload(self) -> None:
        """Wait until the last checkpoint is complete or reported as failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not isinstance(self._error, StorageError):
            raise self._error

    def _run_upload(self, directory: Path, name: str, progress: TrainingProgress) -> None:
        try:
            self._error = self._upload_files(directory, name, progress)
        except BaseException as error:
            self._error = error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _upload_files(self, directory: Path, name: str, progress: TrainingProgress) -> StorageError | None:
        """Upload this worker's files. Returns the error of the checkpoint, if any, the same on every worker."""
        own_files: dict[str, ManifestFile] | StorageError
        try:
            own_files = (
                self._retry_policy.retry(lambda: self._store.upload(directory, name))
                if any(directory.iterdir())
                else {}
            )
        except StorageError as error:
            own_files = error
        parts: list[dict[str, ManifestFile] | StorageError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own_files, group=self._group)
        result = [next((part for part in parts if isinstance(part, StorageError)), None)]
        if dist.get_rank() == 0:
            files = {path: file for part in parts if isinstance(part, dict) for path, file in part.items()}
            result = [result[0] or self._commit(name, files, progress)]
            if result[0] is not None:
                self._store.report_failure(name, progress, result[0])
        dist.broadcast_object_list(result, group=self._group)
        return result[0]

    def _commit(self, name: str, files: Mapping[str, ManifestFile], progress: TrainingProgress) -> StorageError | None:
        try:
            self._retry_policy.retry(lambda: self._store.commit(name, files, progress, dist.get_world_size()))
        except StorageError as error:
            return error
        return None


def run_on_all_workers(function: Callable[[], T]) -> T:
    """Return this worker's `function()`. Collective: a `SwiftKVError` on any worker is raised on all of them."""
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


def broadcast_from_rank_0(make: Callable[[], T]) -> T:
    """Return rank 0's `make()` on every worker."""
    values: list[T | None] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return cast("T", values[0])
