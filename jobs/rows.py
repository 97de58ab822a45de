"""The prepared rows of a job in its object store, where workers of every machine and later attempts find them. Knows
nothing of what a row holds, and loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.attempts import AttemptRequest, data_prefix
from swiftkv_platform.storage.artifacts import fetch_directory, is_complete, publish_directory
from swiftkv_platform.storage.object_store import ObjectStore, open_store

if TYPE_CHECKING:
    from torch import Tensor

    from jobs.prepare import Prepared


@dataclass(frozen=True)
class StoredPreparation:
    """What every worker, and the evaluation, starts from, as it travels between processes."""

    store_uri: str
    rows: str
    """Key of the prepared rows in that store."""
    calibrated: dict[str, Tensor] | None
    """See `Prepared`."""

    def fetch(self, directory: Path) -> None:
        """Bring the rows to `directory`."""
        fetch_directory(open_store(self.store_uri), self.rows, directory)

    def open(self, directory: Path) -> Prepared:
        """With the rows that lie in `directory`, which may be deleted afterwards."""
        from jobs.prepare import Prepared
        from swiftkv_platform.distillation.prepared_data import PreparedData

        return Prepared(PreparedData.load(directory), self.calibrated)


def find_rows(store: ObjectStore, request: AttemptRequest) -> str | None:
    """The rows that this attempt or an earlier one prepared: a resumed run must see the very same."""
    keys = (data_prefix(request.job_id, attempt) for attempt in range(request.attempt, 0, -1))
    return next((key for key in keys if is_complete(store, key)), None)


def publish_rows(store: ObjectStore, request: AttemptRequest, directory: Path) -> str:
    """Upload the rows in `directory`; returns their key."""
    key = data_prefix(request.job_id, request.attempt)
    publish_directory(store, directory, key, kind="data", lineage={}, metrics={})
    return key
