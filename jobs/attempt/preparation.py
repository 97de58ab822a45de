"""Starting point of training, prepared rows and the calibrated start, in the job's object store, where workers of every
machine and later attempts find it. Knows nothing of what a row holds, and loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class Prepared:
    """Starting point of every worker and of the evaluation."""

    data: PreparedData
    calibrated: Mapping[str, Tensor] | None
    """Parameters of the calibrated start, by the student's names, read when they are asked for; None for a job that
    starts from the copies."""


@dataclass(frozen=True)
class StoredPreparation:
    """Starting point of every worker and of the evaluation, as it travels between processes.

    It names objects and holds none: Ray would keep a large value on the machine that prepared it, which may be lost.
    """

    store_uri: str
    rows: str
    """Key of the prepared rows in that store."""
    start: str | None
    """Key of the calibrated start there, where it is or the workers publish it before they train; None for a job that
    starts from the copies."""

    @property
    def lacks_start(self) -> bool:
        """Whether the workers have yet to find the calibrated start."""
        return self.start is not None and not is_complete(open_store(self.store_uri), self.start)

    def fetch(self, directory: Path) -> None:
        fetch_directory(open_store(self.store_uri), self.rows, directory)

    def fetch_start(self, directory: Path) -> None:
        """Bring the start, if there is one, beside the rows' `directory`."""
        if self.start is not None:
            fetch_directory(open_store(self.store_uri), self.start, _start_beside(directory))

    def publish_start(self, tensors: Path) -> None:
        """Upload the calibrated start, weight files in the directory `tensors`."""
        assert self.start is not None, "called for a job that calibrates"
        publish_directory(open_store(self.store_uri), tensors, self.start, kind="data", lineage={}, metrics={})

    def open(self, directory: Path) -> Prepared:
        """The preparation that was fetched to `directory` and beside it; tensors are read as they are asked for."""
        from swiftkv_platform.data.prepared import PreparedData
        from swiftkv_platform.model.checkpoint import StoredTensors

        start = None if self.start is None else StoredTensors(_start_beside(directory))
        return Prepared(PreparedData.load(directory), start)


def find_rows(store: ObjectStore, request: AttemptRequest) -> str | None:
    """The rows that this attempt or an earlier one prepared: a resumed run must see the very same."""
    return _newest(store, request, lambda attempt: attempt.data_prefix)


def publish_rows(store: ObjectStore, request: AttemptRequest, directory: Path) -> str:
    key = request.attempt_id.data_prefix
    publish_directory(store, directory, key, kind="data", lineage={}, metrics={})
    return key


def find_start(store: ObjectStore, request: AttemptRequest) -> str | None:
    """The calibrated start that this attempt or an earlier one found."""
    return _newest(store, request, lambda attempt: attempt.start_prefix(request.spec.name))


def start_key(request: AttemptRequest) -> str | None:
    """Key at which the workers of this attempt publish the calibrated start, unless an earlier one's is there; None for
    a job that starts from the copies, or continues from a model or checkpoint."""
    calibrates = request.spec.swiftkv.is_calibrated and request.parent is None
    return request.attempt_id.start_prefix(request.spec.name) if calibrates else None


def _newest(store: ObjectStore, request: AttemptRequest, prefix: Callable[[AttemptId], str]) -> str | None:
    keys = (prefix(attempt) for attempt in reversed(request.attempt_id.so_far()))
    return next((key for key in keys if is_complete(store, key)), None)


def _start_beside(rows: Path) -> Path:
    return rows.with_name(f"{rows.name}-start")
