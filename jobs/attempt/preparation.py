"""Starting point of training, prepared rows and the calibrated start, in the job's object store, where workers of every
machine and later attempts find it. Knows nothing of what a row holds, and loads no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import fetch_directory, is_complete, publish_directory
from swiftkv_platform.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv_platform.data.prepared import PreparedData

_TENSORS = "calibrated.safetensors"


@dataclass(frozen=True)
class Prepared:
    """Starting point of every worker and of the evaluation."""

    data: PreparedData
    calibrated: dict[str, Tensor] | None
    """Parameters of the calibrated start, by the student's names; None for a job that starts from the copies."""


@dataclass(frozen=True)
class StoredPreparation:
    """Starting point of every worker and of the evaluation, as it travels between processes.

    It names objects and holds none: Ray would keep a large value on the machine that prepared it, which may be lost.
    """

    store_uri: str
    rows: str
    """Key of the prepared rows in that store."""
    start: str | None
    """Key of the calibrated start there; None for a job that starts from the copies."""

    def fetch(self, directory: Path) -> None:
        """Bring the rows to `directory`, and the start beside it."""
        store = open_store(self.store_uri)
        fetch_directory(store, self.rows, directory)
        if self.start is not None:
            fetch_directory(store, self.start, _start_beside(directory))

    def open(self, directory: Path) -> Prepared:
        """Read what `fetch` brought to `directory` and beside it; it may be deleted afterwards."""
        from swiftkv_platform.data.prepared import PreparedData

        start = None if self.start is None else _read(_start_beside(directory))
        return Prepared(PreparedData.load(directory), start)


def find_rows(store: ObjectStore, request: AttemptRequest) -> str | None:
    """The rows that this attempt or an earlier one prepared: a resumed run must see the very same."""
    return _newest(store, request, lambda attempt: attempt.data_prefix)


def publish_rows(store: ObjectStore, request: AttemptRequest, directory: Path) -> str:
    """Upload the rows in `directory`; returns their key."""
    key = request.attempt_id.data_prefix
    publish_directory(store, directory, key, kind="data", lineage={}, metrics={})
    return key


def find_start(store: ObjectStore, request: AttemptRequest) -> str | None:
    """The calibrated start that this attempt or an earlier one found."""
    return _newest(store, request, lambda attempt: attempt.start_prefix(request.spec.name))


def load_start(store: ObjectStore, key: str) -> dict[str, Tensor]:
    """Parameters of the calibrated start, by the student's names."""
    with tempfile.TemporaryDirectory(prefix="start-") as workspace:
        fetch_directory(store, key, Path(workspace) / "tensors")
        return _read(Path(workspace) / "tensors")


def publish_start(store: ObjectStore, request: AttemptRequest, calibrated: dict[str, Tensor]) -> str:
    """Upload the parameters of the calibrated start; returns their key."""
    from safetensors.torch import save_file

    key = request.attempt_id.start_prefix(request.spec.name)
    with tempfile.TemporaryDirectory(prefix="start-") as directory:
        save_file({name: tensor.contiguous() for name, tensor in calibrated.items()}, Path(directory) / _TENSORS)
        publish_directory(store, Path(directory), key, kind="data", lineage={}, metrics={})
    return key


def _newest(store: ObjectStore, request: AttemptRequest, prefix: Callable[[AttemptId], str]) -> str | None:
    keys = (prefix(attempt) for attempt in reversed(request.attempt_id.so_far()))
    return next((key for key in keys if is_complete(store, key)), None)


def _start_beside(rows: Path) -> Path:
    return rows.with_name(f"{rows.name}-start")


def _read(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / _TENSORS)
