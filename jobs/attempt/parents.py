"""The model or checkpoint that a job continues from, on this machine. Knows keys and files, little of their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.contract.parents import Parent
from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor


def fetch_parent(store: ObjectStore, parent: Parent, directory: Path) -> None:
    """Download a parent's files, each checked against its manifest.

    Raises:
        ModelError: it is gone.
    """
    try:
        fetch_directory(store, parent.key, directory)
    except ObjectNotFoundError as error:
        raise ModelError(
            f"training.from is {parent.name!r}, whose files are not in the object store any more; another model or "
            "checkpoint would do",
            field="training.from",
            value=parent.name,
        ) from error


def trained_tensors(parent: Parent, directory: Path) -> Mapping[str, Tensor]:
    """The tensors of a downloaded parent, by the student's names, each read when it is asked for."""
    if parent.kind == "checkpoint":
        from swiftkv_platform.distillation.checkpoint import TrainedTensors

        return TrainedTensors(directory)
    from swiftkv_platform.model.checkpoint import StoredTensors

    return StoredTensors(directory)


def check_all_there(parent: Parent, missing: Sequence[str]) -> None:
    """Refuse a model that stores what is trained under other names. A checkpoint lacks what its job did not train.

    Raises:
        ModelError: a model lacks one of the names.
    """
    if parent.kind == "model" and missing:
        raise ModelError(
            f"training.from is {parent.name!r}, a model that does not store {missing[0]} as one tensor, as models with "
            "experts do not; a checkpoint of its job would do",
            field="training.from",
            value=parent.name,
        )
