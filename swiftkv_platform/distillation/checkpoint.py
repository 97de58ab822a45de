"""Training state, sharded: trained parameters, optimizer, and how far the run is. Where the files go is the store's
business, behind a protocol.

A run needs no other state: the learning rate is a function of the step and the run's course, the rows of a batch are
one of the step, and a step draws no random numbers. Another number of workers, or another sharding strategy, may take a
checkpoint over.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TypeVar, cast
from uuid import uuid4
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swiftkv_platform.distillation.course import Course
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.distillation.parallel.base import STUDENT
from swiftkv_platform.distillation.uploads import CheckpointStore, Progress, Retries, Uploader
from swiftkv_platform.errors import ArtifactCorruptError, ObjectNotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.checkpoint import LazyTensors

__all__ = [
    "CheckpointStore",
    "Checkpointer",
    "Progress",
    "Retries",
    "TrainedTensors",
    "from_rank_0",
    "load_whole_state",
]

T = TypeVar("T")
INDEX = ".metadata"
"""File that says where each tensor of a checkpoint is, in which pieces."""


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
            save({**self._parallel.state(), "progress": progressed}, storage_writer=FileSystemWriter(directory))
        except BaseException:  # such as a full disk, which what is there would keep full
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._uploader.start(directory, name, progress)

    def finish(self) -> None:
        """Wait until the last checkpoint is in the store. Raises `StorageError` if it cannot be stored."""
        self._uploader.finish()

    def restore(self) -> Progress:
        """Load the newest complete checkpoint that is not damaged; a fresh `Progress` where there is none at all.

        Raises:
            StorageError: there are some, and none can be read.
        """
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
        """Load the state that was saved after `step`; waits until it is in the store.

        Raises:
            StorageError: it is not there, or cannot be read; a later attempt goes on from the newest checkpoint.
        """
        self._uploader.wait()
        keys = from_rank_0(lambda: self._store.of_step(step))
        if not keys:
            raise StorageError(f"the checkpoint of step {step}, to which training is to go back, could not be stored")
        self._load(keys)

    def _load(self, keys: Sequence[str]) -> Progress:
        """Load the first of `keys` that can be read."""
        directory = Path(tempfile.gettempdir()) / from_rank_0(lambda: f"checkpoint-{uuid4().hex}")
        try:
            self._fetch_first(keys, directory)
            step, tokens = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
            load({"progress": {"step": step, "tokens": tokens}}, storage_reader=FileSystemReader(directory))
            course = _load_course(directory)
            load_whole_state(self._parallel, directory)
            dist.barrier()
        finally:
            if self._local_rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
        return Progress(int(step), int(tokens), course)

    def _fetch_first(self, keys: Sequence[str], directory: Path) -> None:
        """Download the first of `keys` that comes whole to every machine."""
        for key in keys:
            failure: StorageError | None = None
            if self._local_rank == 0:
                try:
                    self._store.fetch(key, directory)
                except (ArtifactCorruptError, ObjectNotFoundError) as error:
                    failure = error
            failures: list[StorageError | None] = [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure)
            damage = next((one for one in failures if one is not None), None)
            if damage is None:
                return
            get_logger().warning("checkpoint_damaged", key=key, error=damage.message)
            if key == keys[-1]:
                raise damage
            if self._local_rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
            dist.barrier()


def _load_course(directory: Path) -> Course:
    """The course of a checkpoint; one of a version before has none, or not all of its numbers."""
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    numbers = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in Course().numbers().items()
        if f"progress.course.{name}" in stored
    }
    if numbers:
        load({"progress": {"course": numbers}}, storage_reader=FileSystemReader(directory))
    return Course.of({name: float(value) for name, value in numbers.items()})


def load_whole_state(parallel: Parallel, directory: Path) -> None:
    """Take over trained parameters and optimizer state of a downloaded checkpoint. Collective."""
    parallel.load_state(lambda state: load(state, storage_reader=FileSystemReader(directory)))


ReadRange = Callable[[str, int, int], bytes]
"""Bytes of a checkpoint's file, by its name, from the first number up to the second."""


class TrainedTensors(LazyTensors):
    """The trained tensors of a checkpoint by the student's own names, each read when it is asked for, in the pieces
    that workers have saved it in; needs no process group.

    Args:
        directory: has the checkpoint's index, `INDEX`.
        read_range: reads the other files; None: they are in `directory` as well.
    """

    def __init__(self, directory: Path, read_range: ReadRange | None = None) -> None:
        self._read_range = read_range or partial(_read_file, directory)
        index = FileSystemReader(directory).read_metadata()
        self._places = index.storage_data
        prefix = f"model.{STUDENT}"
        self._entries = {
            name.removeprefix(prefix): (name, entry)
            for name, entry in index.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored, entry = self._entries[name]
        first, last, _ = (slice(None) if rows is None else rows).indices(entry.size[0])
        tensor = torch.empty((last - first, *entry.size[1:]), dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            begin, *columns = (
                slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            low, high = max(begin.start, first), min(begin.stop, last)
            if low < high:
                piece = self._piece(MetadataIndex(stored, chunk.offsets))
                tensor[slice(low - first, high - first), *columns] = piece[low - begin.start : high - begin.start]
        return tensor

    def _piece(self, index: MetadataIndex) -> Tensor:
        place = self._places[index]
        data = self._read_range(place.relative_path, place.offset, place.offset + place.length)
        try:
            with ZipFile(BytesIO(data)) as archive:  # torch leaves its checksums unread
                damaged = archive.testzip()
        except BadZipFile as error:
            raise _damaged(place.relative_path, index.fqn) from error
        if damaged is not None:
            raise _damaged(place.relative_path, index.fqn)
        piece: Tensor = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
        return piece

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read_file(directory: Path, name: str, start: int, stop: int) -> bytes:
    with (directory / name).open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _damaged(file: str, name: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"{file!r} of a checkpoint does not hold {name} as it was saved; another checkpoint of the job would do",
        field="file",
        value=file,
    )


def from_rank_0(make: Callable[[], T]) -> T:
    """Return on every worker what `make` returns on rank 0."""
    values: list[T | None] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return cast("T", values[0])
