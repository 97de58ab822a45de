"""Access of workers to the model or checkpoint that a job continues from: keys and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.contract.attempts import Parent
from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.storage.artifacts import StoredDirectory, fetch_directory
from swiftkv_platform.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor


def fetch_parent(store: ObjectStore, parent: Parent, directory: Path) -> None:
    """Download a parent's files, verified against its manifest. Raises `ModelError` if the parent is gone."""
    with _there(parent):
        fetch_directory(store, parent.key, directory)


def open_parent(store: ObjectStore, parent: Parent, directory: Path, *, fetches: bool) -> StoredDirectory:
    """Open a parent's files to read parts of them. Raises `ModelError` if the parent is gone.

    Args:
        directory: destination of a checkpoint's index.
        fetches: whether this worker downloads the index for its machine.
    """
    with _there(parent):
        files = StoredDirectory(store, parent.key)
        if fetches and parent.kind == "checkpoint":
            from swiftkv_platform.distillation.pieces import INDEX

            files.fetch(INDEX, directory)
        return files


@contextmanager
def _there(parent: Parent) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        raise ModelError.of(
            "training.from",
            parent.name,
            ", whose files are no longer in the object store; use another model or checkpoint",
        ) from error


def trained_tensors(parent: Parent, directory: Path, files: StoredDirectory | None = None) -> Mapping[str, Tensor]:
    """Return the tensors of a parent by the student's names, each read on access. `files`: the result of `open_parent`
    to read from; None: the parent has been downloaded to `directory`."""
    if parent.kind == "checkpoint":
        from swiftkv_platform.distillation.pieces import TrainedTensors

        return TrainedTensors(directory, None if files is None else files.read)
    if files is not None:
        from swiftkv_platform.distillation.ranged_tensors import RangedTensors

        return RangedTensors({name: file.size for name, file in files.manifest.files.items()}, files.read)
    from swiftkv_platform.model.checkpoint import StoredTensors

    return StoredTensors(directory)


def check_all_there(parent: Parent, missing: Sequence[str]) -> None:
    """Raise `ModelError` if a model lacks trained tensors because it stores them under other names. A checkpoint may
    lack those that its job did not train."""
    if parent.kind == "model" and missing:
        raise ModelError(
            f"training.from is {parent.name!r}, a model that does not store {missing[0]} as one tensor, as models with "
            "experts do not; use a checkpoint of its job",
            field="training.from",
            value=parent.name,
        )
