"""Checkpoint uploads in the background of training: what waits for them, and what a failing store loses."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from swiftkv_platform.contract.attempts import ManifestFile, StopRequest
from swiftkv_platform.distillation.checkpoint import RetryPolicy, Uploader
from swiftkv_platform.distillation.steering import TrainingProgress
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.errors import LossNotFiniteError, StorageError
from swiftkv_platform.planning.training import RunSchedule
from swiftkv_platform.specs import JobSpec
from tests.numerics.distillation_worker import group_of_one

AT_ONCE = RetryPolicy(max_attempts=3, initial_backoff_s=0.0)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


class Store:
    """A checkpoint store that waits until `reachable` is set and fails the next `failures` uploads."""

    def __init__(self, *, failures: int = 0, error: type[Exception] = StorageError) -> None:
        self.reachable = threading.Event()
        self.reachable.set()
        self.failures = failures
        self.error = error
        self.committed: list[str] = []
        self.kls: dict[str, float | None] = {}
        self.lost: list[str] = []

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        self.reachable.wait()
        if self.failures > 0:
            self.failures -= 1
            raise self.error("away")
        return {path.name: ManifestFile(size=path.stat().st_size, sha256="0") for path in directory.iterdir()}

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: TrainingProgress, world_size: int) -> None:
        assert [*files] == ["weights"]
        self.committed.append(name)
        self.kls[name] = progress.held_out_kl

    def report_failure(self, name: str, progress: TrainingProgress, error: StorageError) -> None:
        self.lost.append(name)


def staged(tmp_path: Path, name: str) -> Path:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "weights").write_bytes(b"w")
    return directory


def test_training_goes_on_during_an_upload_and_the_end_waits_for_it(tmp_path: Path) -> None:
    store = Store()
    store.reachable.clear()
    uploader = Uploader(cast("Any", store), AT_ONCE)
    directory = staged(tmp_path, "a")
    uploader.start_upload(directory, "a", TrainingProgress(1))
    assert store.committed == []  # `start` did not wait for the upload
    store.reachable.set()
    uploader.finish()
    assert store.committed == ["a"]
    assert not directory.exists()


def test_a_store_that_comes_back_in_time_loses_nothing(tmp_path: Path) -> None:
    """A checkpoint that cannot be stored is reported, and those before and after it are stored."""
    store = Store(failures=2)
    uploader = Uploader(cast("Any", store), AT_ONCE)
    uploader.start_upload(staged(tmp_path, "a"), "a", TrainingProgress(1))
    uploader.finish()
    assert (store.committed, store.lost) == (["a"], [])
    store.failures = 3
    uploader.start_upload(staged(tmp_path, "b"), "b", TrainingProgress(2))
    uploader.start_upload(staged(tmp_path, "c"), "c", TrainingProgress(3))
    uploader.finish()
    assert (store.committed, store.lost) == (["a", "c"], ["b"])


@pytest.mark.parametrize(("failures", "error", "lost"), [(3, StorageError, ["a"]), (1, ValueError, [])])
def test_the_last_checkpoint_must_arrive(
    failures: int, error: type[Exception], lost: list[str], tmp_path: Path
) -> None:
    """`finish` raises; an error that is not the store's is neither retried nor reported as a lost checkpoint."""
    store = Store(failures=failures, error=error)
    uploader = Uploader(cast("Any", store), AT_ONCE)
    uploader.start_upload(staged(tmp_path, "a"), "a", TrainingProgress(1))
    with pytest.raises(error, match="away"):
        uploader.finish()
    assert store.lost == lost


class _Checkpointer:
    """Saves a file after every step."""

    def __init__(self, store: Store, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._uploader = Uploader(cast("Any", store), AT_ONCE)
        self.finish = self._uploader.finish

    def restore(self) -> TrainingProgress:
        return TrainingProgress()

    def save(self, progress: TrainingProgress) -> None:
        name = f"step-{progress.step}"
        self._uploader.start_upload(staged(self._tmp_path, name), name, progress)


class _Trainer(Trainer):
    """A trainer of two steps without a model; if it `diverges`, the loss of the second is not finite."""

    def __init__(self, store: Store, tmp_path: Path, *, diverges: bool) -> None:
        spec = JobSpec.model_validate({"name": "n", "checkpoint": {"every_steps": 1}})
        # A worker and listener that is alone and never asked to stop.
        alone: Any = Mock(all_reduce_max=lambda request: request, poll_stop_request=lambda: StopRequest.NONE)
        checkpointer: Any = _Checkpointer(store, tmp_path)
        super().__init__(alone, cast("Any", ()), checkpointer, spec, total_steps=2, listener=alone)
        self._diverges = diverges

    def train_step(self, progress: TrainingProgress) -> StepMetrics:
        if self._diverges and progress.step == 1:
            raise LossNotFiniteError("step 2: loss nan")
        return StepMetrics(progress.step + 1, 1, {}, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, world_size=1)


@pytest.mark.parametrize("error", [StorageError, ValueError])
def test_why_training_ended_counts_more_than_its_last_checkpoint(error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(LossNotFiniteError, match="loss nan") as caught:
        _Trainer(Store(failures=3, error=error), tmp_path, diverges=True).run()
    assert caught.value.__notes__ == ["The last checkpoint was not stored: away"]


def test_a_run_that_ends_well_needs_its_last_checkpoint(tmp_path: Path) -> None:
    store = Store(failures=6)
    with pytest.raises(StorageError, match="away"):
        _Trainer(store, tmp_path, diverges=False).run()
    assert store.lost == ["step-1", "step-2"]


class _Measured:
    """Held-out rows that give these KLs, one a measurement."""

    def __init__(self, *kls: float) -> None:
        self.measure_kl = iter(kls).__next__


def test_a_checkpoint_has_the_held_out_kl_of_its_own_state_after_going_back_too(tmp_path: Path) -> None:
    store = Store()
    trainer: Any = _Trainer(store, tmp_path, diverges=False)
    trainer._validation, trainer._checkpointer.roll_back = _Measured(0.5, 0.3, 0.9), lambda step: None
    trainer._schedule = RunSchedule(total_steps=2, every_steps=1, measurement_interval=1, best_every=1)
    trainer.run()
    assert store.kls == {"step-0": 0.5, "step-1": 0.3, "step-2": 0.3}
