"""Files of an attempt in the object store, shared with workers on all machines and with later attempts: prepared rows,
the calibrated start, checkpoints, results of the evaluation. Handles keys and manifests only, without torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkv_platform.contract.attempts import HELD_OUT_KL, AttemptId, AttemptRequest, Manifest, ManifestFile, Parent
from swiftkv_platform.distillation.steering import TrainingProgress, choose_model_step
from swiftkv_platform.errors import ModelError, ObjectNotFoundError, StorageError
from swiftkv_platform.jobs.attempt.events import EventReporter, PhaseProgressReporter
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.artifacts import (
    StoredDirectory,
    delete_directory,
    fetch_directory,
    is_complete,
    publish_directory,
    read_manifest,
    upload_files,
    write_manifest,
)
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, join_object_key, open_store

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv_platform.data.prepared import PreparedData
    from swiftkv_platform.model.weights.checkpoint import LazyTensors

OnCommit = Callable[[str, Manifest, TrainingProgress], None]
"""Callback for a complete checkpoint: (key, manifest, progress)."""
OnFailure = Callable[[str, TrainingProgress, StorageError], None]
"""Callback for a checkpoint that could not be stored: (key, progress, error)."""
CHOSEN_STEP_KEY = "chosen_step"
"""Lineage key of a checkpoint: step whose state becomes the model if training ends here; null: the checkpoint's own."""
ENDED_KEY = "ended"
"""Lineage key of a checkpoint: whether training has ended, maybe before the last step."""


@dataclass(frozen=True)
class PreparedInputs:
    """Inputs of training and evaluation, opened on this machine."""

    data: PreparedData
    calibrated: Mapping[str, Tensor] | None
    """Parameters of the calibrated start by the student's names, read on access; None for a copied start."""


@dataclass(frozen=True)
class StoredInputs:
    """Object keys of the inputs of training and evaluation, passed between processes. (Ray would keep a large value on
    the machine that prepared it, which may be lost.)"""

    store_uri: str
    rows_key: str
    """Key of the prepared rows."""
    calibrated_start_key: str | None
    """Key of the calibrated start, which the workers publish before they train; None for a copied start."""

    @property
    def needs_calibration(self) -> bool:
        """Whether the calibrated start does not exist yet."""
        return self.calibrated_start_key is not None and not is_complete(
            open_store(self.store_uri), self.calibrated_start_key
        )

    def fetch_rows(self, directory: Path) -> None:
        fetch_directory(open_store(self.store_uri), self.rows_key, directory)

    def fetch_calibrated_start(self, directory: Path) -> None:
        """Download the calibrated start, if any, next to the rows' `directory`."""
        if self.calibrated_start_key is not None:
            fetch_directory(open_store(self.store_uri), self.calibrated_start_key, _get_start_directory(directory))

    def publish_calibrated_start(self, tensors: Path) -> None:
        """Upload the calibrated start, weight files in the directory `tensors`."""
        assert self.calibrated_start_key is not None, "only jobs that calibrate have a calibrated start"
        publish_directory(
            open_store(self.store_uri), tensors, self.calibrated_start_key, kind="data", lineage={}, metrics={}
        )

    def open(self, directory: Path) -> PreparedInputs:
        """Open the downloaded inputs; tensors are read on access."""
        from swiftkv_platform.data.prepared import PreparedData
        from swiftkv_platform.model.weights.checkpoint import Checkpoint

        start = (
            None if self.calibrated_start_key is None else Checkpoint.from_directory(_get_start_directory(directory))
        )
        return PreparedInputs(PreparedData.load(directory), start)


def find_prepared_rows(store: ObjectStore, request: AttemptRequest) -> str | None:
    """Return the key of the rows that this attempt or an earlier one has prepared, since a resumed run must use the
    same rows; None if there are none."""
    return _find_newest_key(store, request, lambda attempt: attempt.data_prefix)


def publish_rows(store: ObjectStore, request: AttemptRequest, directory: Path) -> str:
    key = request.attempt_id.data_prefix
    publish_directory(store, directory, key, kind="data", lineage={}, metrics={})
    return key


def find_calibrated_start(store: ObjectStore, request: AttemptRequest) -> str | None:
    """Return the key of the calibrated start from this attempt or an earlier one; None if there is none."""
    return _find_newest_key(store, request, lambda attempt: attempt.get_calibrated_start_prefix(request.spec.name))


def make_calibrated_start_key(request: AttemptRequest) -> str | None:
    """Return the key at which this attempt publishes the calibrated start; None for a job that starts from copies or
    continues from a model or checkpoint."""
    calibrates = request.spec.swiftkv.is_calibrated and request.parent is None
    return request.attempt_id.get_calibrated_start_prefix(request.spec.name) if calibrates else None


def _find_newest_key(store: ObjectStore, request: AttemptRequest, prefix: Callable[[AttemptId], str]) -> str | None:
    keys = (prefix(attempt) for attempt in reversed(request.attempt_id.list_attempts_so_far()))
    return next((key for key in keys if is_complete(store, key)), None)


def _get_start_directory(rows: Path) -> Path:
    return rows.with_name(f"{rows.name}-start")


class AttemptCheckpoints:
    """The `CheckpointStore` of an attempt. It writes below the attempt's own prefix, but may resume from an earlier
    attempt.

    Args:
        keep: number of newest complete checkpoints to keep, in addition to that of the best state.
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
        return upload_files(self._store, directory, join_object_key(self._prefix, name))

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: TrainingProgress, world_size: int) -> None:
        key = join_object_key(self._prefix, name)
        steering = progress.steering
        lineage: dict[str, Any] = {"step": progress.step, "tokens": progress.tokens, "world_size": world_size}
        if progress.held_out_kl is not None and math.isfinite(progress.held_out_kl):
            lineage[HELD_OUT_KL] = progress.held_out_kl
        if steering.is_measured:
            lineage |= {CHOSEN_STEP_KEY: choose_model_step(steering, self._training), ENDED_KEY: bool(steering.ended)}
            lineage |= {"best_step": steering.best_step, "best_kl": steering.best_kl, "start_kl": steering.start_kl}
        manifest = write_manifest(self._store, key, files, kind="checkpoint", lineage=lineage, metrics={})
        self._on_commit(key, manifest, progress)
        self._delete_old_checkpoints(steering.best_step)

    def report_failure(self, name: str, progress: TrainingProgress, error: StorageError) -> None:
        self._on_failure(join_object_key(self._prefix, name), progress, error)

    def find_newest(self) -> str | None:
        """Return the key of this attempt's newest complete checkpoint, or else the key to resume from."""
        return next(self._iter_complete(), None) or self._resume_from

    def list_resumable_checkpoints(self) -> list[str]:
        """Return the newest checkpoint, and fallbacks in case it is damaged: older checkpoints, then those of earlier
        attempts."""
        if self._resume_from is None:
            return [*self._iter_complete()]
        earlier = list(
            self._attempts.iterate_complete_checkpoints(self._attempt.job_id, before_attempt=self._attempt.number)
        )
        older = earlier[earlier.index(self._resume_from) + 1 :] if self._resume_from in earlier else []
        return [*self._iter_complete(), self._resume_from, *older]

    def find_by_step(self, step: int) -> list[str]:
        return list(iter_checkpoints_of_step(self._store, self._attempt, step))

    def find_model(self) -> str | None:
        """Return the key of the checkpoint that becomes the model; call it after training."""
        newest = self.find_newest()
        return None if newest is None else find_model_checkpoint(self._store, self._attempt, newest)

    def fetch(self, key: str, directory: Path) -> None:
        fetch_directory(self._store, key, directory)

    def open(self, key: str) -> StoredDirectory:
        return StoredDirectory(self._store, key)

    def _iter_complete(self) -> Iterator[str]:
        """Yield the keys of the complete checkpoints, newest first: names begin with the step."""
        for name in sorted(self._store.list_directories(self._prefix), reverse=True):
            key = join_object_key(self._prefix, name)
            if is_complete(self._store, key):
                yield key

    def _delete_old_checkpoints(self, best_step: int) -> None:
        """Delete checkpoints older than the newest `keep`, including incomplete ones of dead runs, except that of the
        best state. Does nothing if there is a later attempt, which may resume from any of them."""
        if self._attempts.is_superseded(self._attempt):
            return
        kept = list(islice(self._iter_complete(), self._keep))
        kept += iter_own_checkpoints_of_step(self._store, self._attempt, best_step)
        oldest = min(kept[: self._keep])
        for name in self._store.list_directories(self._prefix):
            key = join_object_key(self._prefix, name)
            if key < oldest and key not in kept:
                delete_directory(self._store, key)


def find_model_checkpoint(store: ObjectStore, attempt: AttemptId, last: str) -> str:
    """Return the key of the checkpoint that becomes the model: that of the step named in the manifest of `last`, or
    `last` itself if the former could not be stored."""
    lineage = read_manifest(store, last).lineage
    chosen = lineage.get(CHOSEN_STEP_KEY)
    if chosen is None or chosen == lineage["step"]:
        return last
    key = next(iter_checkpoints_of_step(store, attempt, chosen), None)
    if key is None:
        get_logger().warning("best_checkpoint_lost", step=chosen)
    return key or last


def find_completed_training_checkpoint(store: ObjectStore, request: AttemptRequest, total_steps: int) -> str | None:
    """Return the checkpoint that becomes the model if no training is left: the run of `resume_from` has ended, or the
    job trains no steps after its parent. None otherwise."""
    if total_steps == 0:
        assert request.parent is not None, "without a parent, a job trains"
        return request.parent.key
    if request.resume_from is None:
        return None
    lineage = read_manifest(store, request.resume_from).lineage
    if int(lineage["step"]) < total_steps and not lineage.get(ENDED_KEY):
        return None
    return find_model_checkpoint(store, request.attempt_id, request.resume_from)


def iter_checkpoints_of_step(store: ObjectStore, attempt: AttemptId, step: int) -> Iterator[str]:
    """Yield the keys of the complete checkpoints of a step, newest attempt first."""
    for one in reversed(attempt.list_attempts_so_far()):
        yield from iter_own_checkpoints_of_step(store, one, step)


def iter_own_checkpoints_of_step(store: ObjectStore, attempt: AttemptId, step: int) -> Iterator[str]:
    """Yield the keys of an attempt's complete checkpoints of a step."""
    prefix = attempt.checkpoints_prefix
    for name in store.list_directories(prefix):
        key = join_object_key(prefix, name)
        if name.startswith(f"step-{step:08d}-") and is_complete(store, key):
            yield key


def read_newest_object(store: ObjectStore, attempt: AttemptId, key: Callable[[AttemptId], str]) -> bytes | None:
    """Return the object at `key` of the newest attempt that has stored it; None if there is none."""
    for one in reversed(attempt.list_attempts_so_far()):
        with suppress(ObjectNotFoundError):
            return store.get_bytes(key(one))
    return None


def _make_rows_part(name: str) -> str:
    return f"rows-{name}"


class StoredResults:
    """The `ResultStore` of an attempt. Results of another checkpoint are not reused."""

    def __init__(self, store: ObjectStore, request: AttemptRequest, checkpoint: str) -> None:
        self._store = store
        self._attempt = request.attempt_id
        self._digest = hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
        self._progress = PhaseProgressReporter(EventReporter(store, request.attempt_id, "evaluation"), "evaluate")

    def load_result(self, name: str) -> bytes | None:
        kept = self._read_newest(name)
        if kept is None:
            self._progress.start_part(name)
        return kept

    def _read_newest(self, part: str) -> bytes | None:
        return read_newest_object(
            self._store, self._attempt, lambda attempt: attempt.evaluation_key(self._digest, part)
        )

    def store_result(self, name: str, data: bytes) -> None:
        self._store.put_bytes(self._attempt.evaluation_key(self._digest, name), data)

    def store_rows(self, name: str, data: bytes) -> None:
        self.store_result(_make_rows_part(name), data)

    def publish_rows(self, names: Sequence[str]) -> None:
        """Copy the stored results of rows to where they outlive the evaluation; some may be of an earlier attempt."""
        for name in names:
            data = self._read_newest(_make_rows_part(name))
            if data is None:
                raise StorageError(f"the results of the rows {name} are missing; the next attempt evaluates again")
            self._store.put_bytes(self._attempt.row_results_key(name), data)

    def report_progress(self, name: str, done: int, total: int) -> None:
        self._progress.report_progress(name, done, total)


def fetch_parent(store: ObjectStore, parent: Parent, directory: Path) -> None:
    """Download a parent's files and verify them against its manifest. Raises `ModelError` if the parent is deleted."""
    with _report_missing_parent(parent):
        fetch_directory(store, parent.key, directory)


def open_parent(store: ObjectStore, parent: Parent, directory: Path, *, is_downloader: bool) -> StoredDirectory:
    """Open a parent's files to read parts of them. Raises `ModelError` if the parent is deleted.

    Args:
        directory: destination of a checkpoint's index.
        is_downloader: whether this worker downloads the index for its machine.
    """
    with _report_missing_parent(parent):
        files = StoredDirectory(store, parent.key)
        if is_downloader and parent.kind == "checkpoint":
            from swiftkv_platform.distillation.partial_reads import INDEX_FILE

            files.fetch(INDEX_FILE, directory)
        return files


@contextmanager
def _report_missing_parent(parent: Parent) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        raise ModelError.for_field(
            "training.from",
            parent.name,
            ", whose files have been deleted from the object store; use another model or checkpoint",
        ) from error


def open_trained_tensors(parent: Parent, directory: Path, files: StoredDirectory | None = None) -> LazyTensors:
    """Return the tensors of a parent by the student's names, read on access. `files`: result of `open_parent`; None:
    the parent has been downloaded to `directory`."""
    if parent.kind == "checkpoint":
        from swiftkv_platform.distillation.partial_reads import CheckpointTensors

        return CheckpointTensors(directory, None if files is None else files.read)
    if files is not None:
        from swiftkv_platform.distillation.partial_reads import RangedSafetensors

        return RangedSafetensors({name: file.size for name, file in files.manifest.files.items()}, files.read)
    from swiftkv_platform.model.weights.checkpoint import Checkpoint

    return Checkpoint.from_directory(directory)


def check_no_missing_tensors(parent: Parent, missing: Sequence[str]) -> None:
    """Raise `ModelError` if a model stores trained tensors under other names. A checkpoint may lack tensors that its
    job did not train."""
    if parent.kind == "model" and missing:
        why = f", a model that does not store {missing[0]} as one tensor, e.g. because it has experts"
        raise ModelError.for_field("training.from", parent.name, f"{why}; use a checkpoint of its job")
