"""The newest checkpoint, and the ones that stay, on a real directory store."""

import math
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId, Manifest
from swiftkv_platform.distillation.steering import SteeringState, TrainingProgress
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints, find_completed_training_checkpoint
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import hash_manifest, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from tests.unit.jobs.attempts import request


class Checkpoints(AttemptCheckpoints):
    """An attempt's checkpoints, each with the same file of a shard."""

    def __init__(self, store: ObjectStore, shard: Path, attempt: int = 2, *, keep: int = 1, **fields: Any) -> None:
        self.shard, self.prefix = shard, AttemptId("job", attempt).checkpoints_prefix
        self.heard: list[tuple[str, Manifest, TrainingProgress]] = []
        super().__init__(store, request(attempt, **fields), keep=keep, on_commit=lambda *told: self.heard.append(told))

    def save(self, step: int, *, world_size: int = 2, best_step: int | None = None, ended: int = 0) -> str:
        """Store a checkpoint and return its key. With a `best_step`, the run is one that is measured."""
        name = f"step-{step:08d}-w{world_size}-a"
        steering = (
            SteeringState()
            if best_step is None
            else SteeringState(start_kl=0.5, best_kl=0.1, best_step=best_step, ended=ended)
        )
        self.commit(
            name, self.upload(self.shard, name), TrainingProgress(step, 10 * step, steering), world_size=world_size
        )
        return f"{self.prefix}/{name}"

    def kept(self) -> list[int]:
        """Steps of the checkpoints in the store, complete or not."""
        return [int(name.split("-")[1]) for name in self._store.list_directories(self.prefix)]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "__0_0.distcp").write_bytes(b"weights")
    return tmp_path / "shard"


def test_an_attempt_goes_on_from_the_newest_and_never_from_a_newer_one_than_told(
    store: ObjectStore, shard: Path
) -> None:
    assert Checkpoints(store, shard).find_newest() is None
    before = Checkpoints(store, shard, 1, keep=9)
    three, six, _nine = (before.save(step) for step in (3, 6, 9))
    checkpoints = Checkpoints(store, shard, resume_from=six)
    assert (checkpoints.find_newest(), checkpoints.list_resumable_checkpoints()) == (six, [six, three])
    eight = checkpoints.save(8)
    assert (checkpoints.find_newest(), checkpoints.list_resumable_checkpoints()) == (eight, [eight, six, three])


def test_an_attempt_that_another_has_superseded_deletes_nothing(store: ObjectStore, shard: Path) -> None:
    checkpoints = Checkpoints(store, shard)
    checkpoints.save(3)
    AttemptStore(store).write_request(request(3))
    checkpoints.save(6)
    assert checkpoints.kept() == [3, 6]


def test_old_checkpoints_and_unfinished_ones_before_them_go(store: ObjectStore, shard: Path) -> None:
    checkpoints = Checkpoints(store, shard, keep=2)
    three = checkpoints.save(3)
    checkpoints.upload(shard, "step-00000006-w2-lost")
    assert checkpoints.find_newest() == three, "an unfinished checkpoint is ignored"
    for step in (6, 9, 12):
        checkpoints.save(step)
    assert checkpoints.kept() == [9, 12]
    checkpoints.save(12, world_size=1)
    assert checkpoints.kept() == [12, 12], "a run that died after the step has saved it again, with fewer workers"


def test_the_best_state_stays_beside_the_newest_until_another_is_better(store: ObjectStore, shard: Path) -> None:
    checkpoints = Checkpoints(store, shard)
    saved = {step: checkpoints.save(step, best_step=min(step, 3)) for step in (0, 3, 6, 9)}
    assert checkpoints.kept() == [3, 9]
    assert (checkpoints.find_by_step(3), checkpoints.find_by_step(6)) == ([saved[3]], [])
    checkpoints.save(12, best_step=12)
    assert checkpoints.kept() == [12]


@pytest.mark.parametrize(("kl", "told"), [(0.25, 0.25), (None, None), (math.inf, None)])
def test_a_checkpoint_tells_the_held_out_kl_of_its_state(
    store: ObjectStore, shard: Path, kl: float | None, told: float | None
) -> None:
    checkpoints, name = Checkpoints(store, shard), "step-00000003-w1-a"
    checkpoints.commit(name, checkpoints.upload(shard, name), TrainingProgress(3, 30, held_out_kl=kl), world_size=1)
    [stored] = AttemptStore(store).list_checkpoints("job")
    assert stored.held_out_kl == told


def test_the_model_is_made_of_the_best_state_that_was_stored(store: ObjectStore, shard: Path) -> None:
    checkpoints = Checkpoints(store, shard)
    best, last = (checkpoints.save(step, best_step=3) for step in (3, 9))
    assert (checkpoints.find_newest(), checkpoints.find_model()) == (last, best)
    assert Checkpoints(store, shard, 3, resume_from=last).find_model() == best
    assert checkpoints.save(12, best_step=10) == checkpoints.find_model(), "the best one was not stored"
    of_last = JobSpec.model_validate({"name": "n", "training": {"keep_best": False}})
    later = Checkpoints(store, shard, 3, spec=of_last)
    _, newest = (later.save(step, best_step=12) for step in (12, 15))
    assert later.find_model() == newest, "the last state is asked for"


def test_a_run_that_has_ended_early_is_trained_no_more(store: ObjectStore, shard: Path) -> None:
    checkpoints = Checkpoints(store, shard, keep=2)
    best, running = (checkpoints.save(step, best_step=3) for step in (3, 6))
    ended = checkpoints.save(8, best_step=3, ended=1)
    finished = [(running, 9, None), (running, 6, best), (ended, 9, best)]
    for key, total_steps, model in finished:
        assert find_completed_training_checkpoint(store, request(3, resume_from=key), total_steps=total_steps) == model


def test_the_manifest_says_how_far_the_run_is_and_what_was_uploaded_comes_back(
    store: ObjectStore, shard: Path, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(store, shard)
    checkpoints.save(4)
    ((key, manifest, progress),) = checkpoints.heard
    stored = read_manifest(store, key)
    assert (stored.kind, stored.lineage) == ("checkpoint", {"step": 4, "tokens": 40, "world_size": 2})
    assert (hash_manifest(stored), progress) == (hash_manifest(manifest), TrainingProgress(4, 40))
    checkpoints.fetch(key, tmp_path / "back")
    assert (tmp_path / "back" / "__0_0.distcp").read_bytes() == b"weights"
