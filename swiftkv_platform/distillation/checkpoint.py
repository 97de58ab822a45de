"""Training state, sharded: trained parameters, optimizer, and how far the run is. Where the files go is the store's
business, behind a protocol.

A run needs no other state: the learning rate is a function of the step and the run's course, the rows of a batch are
one of the step, and a step draws no random numbers. Another number of workers, or another sharding strategy, may take a
checkpoint over.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swiftkv_platform.distillation.course import Course
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.distillation.parallel.base import STUDENT, State
from swiftkv_platform.distillation.pieces import INDEX, Piece, RangeReader, ReadRange, read_pieces
from swiftkv_platform.distillation.uploads import CheckpointStore, Progress, Retries, Uploader
from swiftkv_platform.errors import ArtifactCorruptError, ObjectNotFoundError, StorageError, SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.checkpoint import LazyTensors

__all__ = [
    "INDEX",
    "CheckpointStore",
    "Checkpointer",
    "Progress",
    "Retries",
    "TrainedTensors",
    "from_rank_0",
    "load_whole_state",
    "on_all_workers",
]

T = TypeVar("T")

# Said of every checkpoint of a worker that is alone, as `_is_alone` has it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


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
        """Write a checkpoint to this machine; it goes to the store while training goes on.

        One that cannot be stored is reported, and the one before it stays the newest.
        """
        # A step may be saved twice, by a run that died before it could complete the first: the names must differ.
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
        except BaseException:  # such as a full disk, which what is there would keep full
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._uploader.start(directory, name, progress)

    def finish(self) -> None:
        """Wait until the last checkpoint is in the store. Raises `StorageError` if it cannot be stored."""
        self._uploader.finish()

    def restore(self) -> Progress:
        """Load the newest complete checkpoint that is not damaged; a fresh `Progress` where there is none at all.
        Raises `StorageError`: there are some, and none can be read."""
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
        """Load the state that was saved after `step`; waits until it is in the store. Raises `StorageError`: it is not
        there, or cannot be read; a later attempt goes on from the newest checkpoint."""
        self._uploader.wait()
        keys = from_rank_0(lambda: self._store.of_step(step))
        if not keys:
            raise StorageError(f"the checkpoint of step {step}, to which training is to go back, could not be stored")
        self._load(keys)

    def _load(self, keys: Sequence[str]) -> Progress:
        for key in keys[:-1]:
            try:
                return self._load_one(key)
            except (ArtifactCorruptError, ObjectNotFoundError) as error:  # on every worker alike
                get_logger().warning("checkpoint_damaged", key=key, error=error.message)
        return self._load_one(keys[-1])

    def _load_one(self, key: str) -> Progress:
        directory = Path(tempfile.gettempdir()) / from_rank_0(lambda: f"checkpoint-{uuid4().hex}")
        try:
            reader = on_all_workers(lambda: self._open(key, directory))
            step, tokens = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
            _load_state({"progress": {"step": step, "tokens": tokens}}, reader)
            course = _load_course(reader)
            self._parallel.load_state(lambda state: _load_state(state, reader))
            dist.barrier()
        finally:
            if self._local_rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
        return Progress(int(step), int(tokens), course)

    def _open(self, key: str, directory: Path) -> FileSystemReader:
        """A checkpoint that every worker needs all of is downloaded once a machine, else its index alone is."""
        if not self._parallel.loads_parts:
            if self._local_rank == 0:
                self._store.fetch(key, directory)
            return FileSystemReader(directory)
        files = self._store.open(key)
        if self._local_rank == 0:
            files.fetch(INDEX, directory)
        return RangeReader(directory, files.read)


def _load_course(reader: FileSystemReader) -> Course:
    """The course of a checkpoint; one of a version before has none, or not all of its numbers."""
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
    """Take over trained parameters and optimizer state of a checkpoint. Collective.

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
    """Whether a worker can do without collectives over objects. Of large ones gloo's threads make copies, for which
    OpenMP gives each a team; with more such threads than cores it puts all to sleep between operators."""
    return dist.get_world_size() == 1


class TrainedTensors(LazyTensors):
    """The trained tensors of a checkpoint by the student's own names, each read when it is asked for, in the pieces
    that workers have saved it in; needs no process group.

    Args:
        directory: has the checkpoint's index, `INDEX`.
        read_range: reads the other files; None: they are in `directory` as well.
    """

    def __init__(self, directory: Path, read_range: ReadRange | None = None) -> None:
        self._read_range = read_range or partial(_read_file, directory)
        self._index = FileSystemReader(directory).read_metadata()
        prefix = f"model.{STUDENT}"
        self.places = {
            name.removeprefix(prefix): (name, entry)
            for name, entry in self._index.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored, entry = self.places[name]
        first, last, _ = (slice(None) if rows is None else rows).indices(entry.size[0])
        tensor = torch.empty((last - first, *entry.size[1:]), dtype=entry.properties.dtype)
        places, wanted = [], []
        for number, chunk in enumerate(entry.chunks):
            begin, *columns = (
                slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            low, high = max(begin.start, first), min(begin.stop, last)
            if low < high:
                places.append((slice(low - first, high - first), *columns))
                own = slice(low - begin.start, high - begin.start)
                wanted.append((Piece.of(self._index, stored, number), own))
        for number, values in read_pieces(wanted, self._read_range):
            tensor[places[number]] = values
        return tensor


def _read_file(directory: Path, name: str, start: int, stop: int) -> bytes:
    with (directory / name).open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def on_all_workers(function: Callable[[], T]) -> T:
    """Return what `function` returns, once it has returned on every worker. Collective; an error of this project that
    any worker meets is raised on all of them."""
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
