"""Checkpoints of one attempt in the object store. Knows keys and manifests, nothing of what the files hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.attempts import AttemptRequest, Manifest, ManifestFile
from swiftkv_platform.distillation.course import chosen_step
from swiftkv_platform.distillation.uploads import Progress
from swiftkv_platform.errors import StorageError
from swiftkv_platform.jobs.attempt.chosen import (
    CHOSEN_STEP,
    ENDED,
    checkpoints_of_step,
    model_checkpoint,
    own_checkpoints_of_step,
)
from swiftkv_platform.storage.artifacts import (
    StoredDirectory,
    delete_directory,
    fetch_directory,
    is_complete,
    upload_files,
    write_manifest,
)
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, join_key

OnCommit = Callable[[str, Manifest, Progress], None]
"""Callback for a complete checkpoint: its key, manifest and progress."""
OnFailure = Callable[[str, Progress, StorageError], None]
"""Callback for a checkpoint that could not be stored: its key, progress and why."""


class AttemptCheckpoints:
    """The `CheckpointStore` of an attempt: it writes below the attempt's own prefix, and may start elsewhere.

    Args:
        keep: newest complete checkpoints of this attempt that are kept, beside that of the best state.
    """

    def __init__(
        self,
        store: ObjectStore,
        request: AttemptRequest,
        *,
        keep: int,
        on_commit: OnCommit = lambda *_: None,
        on_failure: OnFailure = lambda *_: None,
    ) -> None:
        self._store = store
        self._attempts = AttemptStore(store)
        self._attempt = request.attempt_id
        self._prefix = request.attempt_id.checkpoints_prefix
        self._resume_from = request.resume_from
        self._keep = keep
        self._training = request.spec.training
        self._on_commit = on_commit
        self._on_failure = on_failure

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        return upload_files(self._store, directory, join_key(self._prefix, name))

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: Progress, world_size: int) -> None:
        key = join_key(self._prefix, name)
        course = progress.course
        lineage: dict[str, Any] = {"step": progress.step, "tokens": progress.tokens, "world_size": world_size}
        if course.is_measured:
            lineage |= {CHOSEN_STEP: chosen_step(course, self._training), ENDED: bool(course.ended)}
            lineage |= {"best_step": course.best_step, "best_kl": course.best_kl, "start_kl": course.start_kl}
        manifest = write_manifest(self._store, key, files, kind="checkpoint", lineage=lineage, metrics={})
        self._on_commit(key, manifest, progress)
        self._prune(course.best_step)

    def failed(self, name: str, progress: Progress, error: StorageError) -> None:
        self._on_failure(join_key(self._prefix, name), progress, error)

    def newest(self) -> str | None:
        """This attempt's newest complete checkpoint; before it has one, the one it was told to resume from."""
        return next(self._complete(), None) or self._resume_from

    def candidates(self) -> list[str]:
        """The newest, and what to go on from should that be damaged: older ones, then those of earlier attempts."""
        if self._resume_from is None:
            return [*self._complete()]
        earlier = list(self._attempts.complete_checkpoints(self._attempt.job_id, before_attempt=self._attempt.number))
        older = earlier[earlier.index(self._resume_from) + 1 :] if self._resume_from in earlier else []
        return [*self._complete(), self._resume_from, *older]

    def of_step(self, step: int) -> list[str]:
        return list(checkpoints_of_step(self._store, self._attempt, step))

    def model(self) -> str | None:
        """Key of the checkpoint that the model is made of, once training has ended."""
        newest = self.newest()
        return None if newest is None else model_checkpoint(self._store, self._attempt, newest)

    def fetch(self, key: str, directory: Path) -> None:
        fetch_directory(self._store, key, directory)

    def open(self, key: str) -> StoredDirectory:
        return StoredDirectory(self._store, key)

    def _complete(self) -> Iterator[str]:
        """Keys of the complete checkpoints, newest first: names begin with the step."""
        for name in sorted(self._store.list_directories(self._prefix), reverse=True):
            key = join_key(self._prefix, name)
            if is_complete(self._store, key):
                yield key

    def _prune(self, best_step: int) -> None:
        """Delete what sorts before the newest `keep`, with what a run that died left unfinished there, but for the best
        state. A later attempt may go on from any of it."""
        if self._attempts.is_superseded(self._attempt):
            return
        kept = list(islice(self._complete(), self._keep))
        kept += own_checkpoints_of_step(self._store, self._attempt, best_step)
        oldest = min(kept[: self._keep])
        for name in self._store.list_directories(self._prefix):
            key = join_key(self._prefix, name)
            if key < oldest and key not in kept:
                delete_directory(self._store, key)
