"""Training state, sharded: trained parameters, optimizer, and how far the run is. Where the files go is the store's
business, behind a protocol.

A run needs no other state: the learning rate and the rows of a batch are functions of the step, and a step draws no
random numbers. Another number of workers, or the other sharding strategy, may take a checkpoint over.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from swiftkv_platform.attempts import ManifestFile

T = TypeVar("T")
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_STUDENT = "student."
"""Prefix of the student's parameters in the fork's names."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Positions the loss has counted."""


class CheckpointStore(Protocol):
    """Where checkpoints live; one is complete or invisible."""

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        """Add one worker's files to checkpoint `name`."""

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: Progress, world_size: int) -> None:
        """Make `name`, all of whose `files` are there, complete, and drop what is older than the newest few."""

    def newest(self) -> str | None:
        """Key of the newest complete checkpoint, if there is one."""

    def fetch(self, key: str, directory: Path) -> None:
        """Download a complete checkpoint to `directory`, which does not exist yet."""


class Checkpointer:
    """Saves and restores one run. Its methods are collective: every worker calls them at the same time.

    Args:
        module: the fork, spread over the workers.
        local_rank: this worker's rank on its machine; the first of a machine downloads for all of it.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, store: CheckpointStore, *, local_rank: int) -> None:
        self._module = module
        self._optimizer = optimizer
        self._store = store
        self._local_rank = local_rank

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; each worker uploads its own files, the first one completes it when all are there."""
        world_size = dist.get_world_size()
        # A step may be saved twice, by a run that died before it could complete the first: the names must differ.
        name = from_rank_0(lambda: f"step-{progress.step:08d}-w{world_size}-{uuid4().hex[:8]}")
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as workspace:
            directory = Path(workspace)
            save(self._state(progress), storage_writer=FileSystemWriter(directory))
            files = self._store.upload(directory, name) if any(directory.iterdir()) else {}
        uploaded: list[dict[str, ManifestFile] | None] = [None] * world_size
        dist.all_gather_object(uploaded, files)
        if dist.get_rank() == 0:
            merged = {path: file for part in uploaded if part for path, file in part.items()}
            self._store.commit(name, merged, progress, world_size)

    def restore(self) -> Progress:
        """Load the newest complete checkpoint; a fresh `Progress` where there is none."""
        key = from_rank_0(self._store.newest)
        if key is None:
            return Progress()
        directory = Path(tempfile.gettempdir()) / from_rank_0(lambda: f"checkpoint-{uuid4().hex}")
        try:
            if self._local_rank == 0:
                self._store.fetch(key, directory)
            dist.barrier()
            state = self._state(Progress())
            load(state, storage_reader=FileSystemReader(directory))
            dist.barrier()
        finally:
            if self._local_rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
        set_model_state_dict(self._module, state["model"], options=_TRAINED)
        set_optimizer_state_dict(self._module, self._optimizer, state["optimizer"], options=_TRAINED)
        return Progress(**state["progress"])

    def _state(self, progress: Progress) -> dict[str, Any]:
        return {
            "model": self._trained_tensors(),
            "optimizer": get_optimizer_state_dict(self._module, self._optimizer, options=_TRAINED),
            "progress": {"step": progress.step, "tokens": progress.tokens},
        }

    def _trained_tensors(self) -> dict[str, Any]:
        """By name. Torch leaves out frozen parameters, but not the second name of one that is tied to another."""
        named = self._module.named_parameters(remove_duplicate=False)
        frozen = {name.removeprefix("module.") for name, parameter in named if not parameter.requires_grad}
        state = get_model_state_dict(self._module, options=_TRAINED)
        return {name: tensor for name, tensor in state.items() if name not in frozen}


def read_trained(directory: Path) -> dict[str, Tensor]:
    """The trained tensors of a downloaded checkpoint, whole and by the student's own names; needs no process group."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    prefix = f"model.{_STUDENT}"
    model: dict[str, Tensor] = {
        name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        load({"model": model}, storage_reader=FileSystemReader(directory), no_dist=True)
    return {name.removeprefix(_STUDENT): tensor for name, tensor in model.items()}


def from_rank_0(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every worker."""
    values: list[T | None] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    return cast("T", values[0])
