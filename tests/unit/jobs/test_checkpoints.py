"""The newest checkpoint, and the ones that stay, on a real directory store."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.distillation.checkpoint import Progress
from swiftkv_platform.distillation.course import Course
from swiftkv_platform.jobs.attempt.checkpoints import AttemptCheckpoints
from swiftkv_platform.jobs.attempt.chosen import finished_before
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import manifest_digest, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore

PREFIX = AttemptId("job", 2).checkpoints_prefix


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    directory = tmp_path / "shard"
    directory.mkdir()
    (directory / "__0_0.distcp").write_bytes(b"weights")
    return directory


def _checkpoints(store: ObjectStore, *, resume_from: str | None = None, keep: int = 2) -> AttemptCheckpoints:
    request = AttemptRequest(job_id="job", attempt=2, spec=JobSpec(name="n"), resume_from=resume_from, run_id="run")
    return AttemptCheckpoints(store, request, keep=keep)


def _save(checkpoints: AttemptCheckpoints, shard: Path, name: str, step: int) -> None:
    checkpoints.commit(name, checkpoints.upload(shard, name), Progress(step, 10 * step), world_size=2)


def test_an_attempt_begins_with_what_it_is_told(store: ObjectStore, shard: Path) -> None:
    assert _checkpoints(store).newest() is None
    checkpoints = _checkpoints(store, resume_from="jobs/job/attempts/1/checkpoints/step-00000007-w1-a")
    assert checkpoints.newest() == "jobs/job/attempts/1/checkpoints/step-00000007-w1-a"

    _save(checkpoints, shard, "step-00000009-w2-b", 9)

    assert checkpoints.newest() == f"{PREFIX}/step-00000009-w2-b"


def _earlier(store: ObjectStore, shard: Path, *steps: int) -> list[str]:
    """Checkpoints of the attempt before: their keys."""
    request = AttemptRequest(job_id="job", attempt=1, spec=JobSpec(name="n"), run_id="run")
    first, names = AttemptCheckpoints(store, request, keep=9), [f"step-{step:08d}-w2-e" for step in steps]
    for name, step in zip(names, steps, strict=True):
        _save(first, shard, name, step)
    return [f"{AttemptId('job', 1).checkpoints_prefix}/{name}" for name in names]


def test_what_to_go_on_from_is_newest_first_and_never_newer_than_told(store: ObjectStore, shard: Path) -> None:
    three, six, _nine = _earlier(store, shard, 3, 6, 9)
    checkpoints = _checkpoints(store, resume_from=six)
    assert checkpoints.candidates() == [six, three]
    _save(checkpoints, shard, "step-00000008-w2-b", 8)
    assert checkpoints.candidates() == [f"{PREFIX}/step-00000008-w2-b", six, three]


def test_an_attempt_that_another_has_superseded_deletes_nothing(store: ObjectStore, shard: Path) -> None:
    checkpoints = _checkpoints(store, keep=1)
    _save(checkpoints, shard, "step-00000003-w2-a", 3)
    later = AttemptRequest(job_id="job", attempt=3, spec=JobSpec(name="n"), run_id="run")
    AttemptStore(store).write_request(later)
    _save(checkpoints, shard, "step-00000006-w2-a", 6)
    assert store.list_directories(PREFIX) == ["step-00000003-w2-a", "step-00000006-w2-a"]


def test_an_unfinished_checkpoint_is_not_seen(store: ObjectStore, shard: Path) -> None:
    checkpoints = _checkpoints(store)
    _save(checkpoints, shard, "step-00000003-w2-a", 3)
    checkpoints.upload(shard, "step-00000006-w2-b")

    assert checkpoints.newest() == f"{PREFIX}/step-00000003-w2-a"


def test_old_checkpoints_and_unfinished_ones_before_them_go(store: ObjectStore, shard: Path) -> None:
    checkpoints = _checkpoints(store)
    _save(checkpoints, shard, "step-00000003-w2-a", 3)
    checkpoints.upload(shard, "step-00000006-w2-lost")
    for step in (6, 9, 12):
        _save(checkpoints, shard, f"step-{step:08d}-w2-z", step)

    assert store.list_directories(PREFIX) == ["step-00000009-w2-z", "step-00000012-w2-z"]


def _steered(store: ObjectStore, **training: object) -> AttemptCheckpoints:
    spec = JobSpec.model_validate({"name": "n", "training": training})
    request = AttemptRequest(job_id="job", attempt=2, spec=spec, run_id="run")
    return AttemptCheckpoints(store, request, keep=1)


def _save_steered(checkpoints: AttemptCheckpoints, shard: Path, step: int, *, best_step: int, ended: int = 0) -> str:
    name = f"step-{step:08d}-w2-z"
    course = Course(start_kl=0.5, best_kl=0.1, best_step=best_step, ended=ended)
    checkpoints.commit(name, checkpoints.upload(shard, name), Progress(step, 10 * step, course), world_size=2)
    return f"{PREFIX}/{name}"


def test_the_best_state_stays_beside_the_newest_until_another_is_better(store: ObjectStore, shard: Path) -> None:
    checkpoints = _steered(store)
    for step, best_step in ((0, 0), (3, 3), (6, 3), (9, 3)):
        _save_steered(checkpoints, shard, step, best_step=best_step)
    assert store.list_directories(PREFIX) == ["step-00000003-w2-z", "step-00000009-w2-z"]
    assert checkpoints.of_step(3) == [f"{PREFIX}/step-00000003-w2-z"]
    assert checkpoints.of_step(6) == []

    _save_steered(checkpoints, shard, 12, best_step=12)
    assert store.list_directories(PREFIX) == ["step-00000012-w2-z"]


def test_the_model_is_made_of_the_best_state_that_was_stored(store: ObjectStore, shard: Path) -> None:
    checkpoints = _steered(store)
    best = _save_steered(checkpoints, shard, 3, best_step=3)
    last = _save_steered(checkpoints, shard, 9, best_step=3)
    assert (checkpoints.newest(), checkpoints.model()) == (last, best)
    later = AttemptRequest(job_id="job", attempt=3, spec=JobSpec(name="n"), run_id="run", resume_from=last)
    assert AttemptCheckpoints(store, later, keep=1).model() == best

    lost = _save_steered(checkpoints, shard, 12, best_step=10)
    assert checkpoints.model() == lost


def test_the_model_is_made_of_the_last_state_where_that_is_asked_for(store: ObjectStore, shard: Path) -> None:
    checkpoints = _steered(store, keep_best=False)
    _save_steered(checkpoints, shard, 3, best_step=3)
    last = _save_steered(checkpoints, shard, 9, best_step=3)
    assert checkpoints.model() == last


def test_a_run_that_has_ended_early_is_trained_no_more(store: ObjectStore, shard: Path) -> None:
    checkpoints = _steered(store)
    best = _save_steered(checkpoints, shard, 3, best_step=3)
    running = _save_steered(checkpoints, shard, 6, best_step=3)
    request = AttemptRequest(job_id="job", attempt=3, spec=JobSpec(name="n"), run_id="run", resume_from=running)
    assert finished_before(store, request, total_steps=9) is None
    assert finished_before(store, request, total_steps=6) == best
    ended = _save_steered(checkpoints, shard, 8, best_step=3, ended=1)
    request = request.model_copy(update={"resume_from": ended})
    assert finished_before(store, request, total_steps=9) == best


def test_a_step_that_is_saved_again_takes_no_others_place(store: ObjectStore, shard: Path) -> None:
    """A run that died after completing step 6 replays it under another name, with another number of workers."""
    checkpoints = _checkpoints(store, keep=1)
    _save(checkpoints, shard, "step-00000006-w2-b", 6)
    _save(checkpoints, shard, "step-00000006-w1-a", 6)

    assert checkpoints.newest() is not None
    assert store.list_directories(PREFIX)


def test_the_manifest_says_how_far_the_run_is(store: ObjectStore, shard: Path) -> None:
    heard: list[tuple[str, Manifest, Progress]] = []
    request = AttemptRequest(job_id="job", attempt=2, spec=JobSpec(name="n"), run_id="run")
    checkpoints = AttemptCheckpoints(
        store, request, keep=1, on_commit=lambda key, manifest, progress: heard.append((key, manifest, progress))
    )

    _save(checkpoints, shard, "step-00000004-w2-a", 4)

    ((key, manifest, progress),) = heard
    stored = read_manifest(store, key)
    assert (stored.kind, stored.lineage) == ("checkpoint", {"step": 4, "tokens": 40, "world_size": 2})
    assert manifest_digest(stored) == manifest_digest(manifest)
    assert progress == Progress(4, 40)


def test_what_was_uploaded_comes_back(store: ObjectStore, shard: Path, tmp_path: Path) -> None:
    checkpoints = _checkpoints(store)
    _save(checkpoints, shard, "step-00000004-w2-a", 4)

    checkpoints.fetch(f"{PREFIX}/step-00000004-w2-a", tmp_path / "back")

    assert (tmp_path / "back" / "__0_0.distcp").read_bytes() == b"weights"
