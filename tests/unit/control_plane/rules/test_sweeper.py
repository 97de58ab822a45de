"""The sweeper: bounded steps, crashes between them, two sweepers at once, and weeks without growth."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import PageQuery, new_id
from swiftkv_platform.control_plane.deployments.repository import Deployment
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, start_attempt, transition
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.control_plane.retention import (
    DAY_S,
    JobDataKind,
    RemovedAmount,
    RetentionRepository,
    RetentionStore,
    RetentionSweeper,
    StoredAmounts,
)
from swiftkv_platform.errors import StorageError
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.unit.control_plane.rules.conftest import TENANT, Plane

NOTHING = dict.fromkeys((name for name in Settings.model_fields if re.fullmatch("retention_.*_days", name)), 0.0)
ALL_JOBS_FILTER = NOTHING | {f"retention_{kind}_days": 1.0 for kind in (*JobDataKind, "deliveries", "idempotency_keys")}
ALL_JOBS_FILTER |= {f"retention_{kind}_days": 2.0 for kind in ("promotions", "models")} | {"retention_jobs_days": 4.0}


def kept(days: dict[str, float]) -> Settings:
    return Settings(**days, retention_metric_points=3, retention_rollbacks=2, _env_file=None)


def sweeper(plane: Plane, days: dict[str, float] = ALL_JOBS_FILTER, **options: object) -> RetentionSweeper:
    rows, objects = RetentionRepository(plane.database), RetentionStore(plane.objects)
    return RetentionSweeper(rows, objects, kept(days), plane.clock, **options)  # type: ignore[arg-type]


def summed(round_: Iterator[RemovedAmount]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, RemovedAmount] = {}
    for swept in round_:
        found[swept.kind] = found.get(swept.kind, RemovedAmount(swept.kind)) + swept
    return {kind: (each.rows, each.objects, each.bytes) for kind, each in found.items() if each != RemovedAmount(kind)}


def keys(plane: Plane) -> list[str]:
    return [info.key for info in plane.objects.list("")]


def run(plane: Plane, reconciler: Reconciler, *, well: bool = True, name: str = "test", steps: int = 10) -> Job:
    """Run a job from its submission to its end, with everything that a job leaves behind."""
    job = plane.submit(name=name)
    reconciler.tick()
    worker, prefix = plane.worker(job), plane.get(job).attempt_id.prefix
    worker.say("status", status="running")
    worker.step(*range(1, steps + 1), time=plane.clock())
    worker.checkpoint(steps)
    for left in ("data/rows.bin", "answers/key.jsonl", "tracking/run/wandb.db"):
        plane.objects.put_bytes(f"{prefix}/{left}", b"abc")
    if well:
        worker.artifact()
    plane.cluster.submissions[f"{job.id}-1"].log = "trained\n"
    worker.say("message", "over")
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.SUCCEEDED if well else SubmissionStatus.FAILED)
    if not well:
        worker.say("error", code="internal", retryable=False)
    reconciler.tick()
    return plane.get(job)


def state(plane: Plane) -> tuple[list[str], dict[str, int]]:
    """All keys of the store, and the number of rows of each table."""
    return keys(plane), RetentionRepository(plane.database).count_rows()


def test_a_dry_run_tells_what_a_round_removes_and_removes_nothing(plane: Plane) -> None:
    reconciler = plane.reconciler()
    for well in (True, False, True):
        run(plane, reconciler, well=well)
    deleted = run(plane, reconciler, name="deleted")
    RetentionRepository(plane.database).delete_job(deleted.id, by="ann", now=plane.clock())
    plane.clock.now += 1.5 * DAY_S
    before = state(plane)
    told = summed(sweeper(plane).run_round(dry_run=True))
    assert state(plane) == before
    assert {"events", "metrics", "event_objects", "checkpoints", "logs", "tracking", "deleted"} <= told.keys()
    assert set(summed(sweeper(plane, NOTHING).run_round())) == {"deleted"}, "without retention only deleted jobs go"
    rest = summed(sweeper(plane).run_round())
    assert rest == {kind: counts for kind, counts in told.items() if kind != "deleted"}
    assert len(before[0]) - len(keys(plane)) == sum(objects for _, objects, _ in told.values())
    assert summed(sweeper(plane).run_round()) == {}


def test_an_ended_job_keeps_its_record_its_history_and_its_model(plane: Plane) -> None:
    job = run(plane, plane.reconciler())
    plane.clock.now += 1.5 * DAY_S
    summed(sweeper(plane).run_round())
    assert plane.get(job) == job
    assert plane.statuses(job) == ["queued", "starting", "running", "succeeded"]
    assert {event.type for event in plane.events(job)} == {"status"}
    assert [point.step for point in plane.jobs.list_points(job.id, PageQuery(order="asc")).items] == [1, 6, 10]
    assert keys(plane) == [
        f"{job.attempt_id.prefix}/artifact/data.bin",
        f"{job.attempt_id.prefix}/artifact/manifest.json",
        f"{job.attempt_id.prefix}/attempt.json",
    ]


class Dying(InMemoryObjectStore):
    """A store that lets `left` changes pass; at the next one the process dies."""

    def __init__(self, objects: InMemoryObjectStore) -> None:
        super().__init__()
        self._client = objects._client
        self.left = 10**9

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def delete(self, key: str) -> None:
        self._change()
        super().delete(key)

    def delete_many(self, keys: list[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_prefix(self, prefix: str) -> None:
        self._change()
        super().delete_prefix(prefix)


def test_a_kill_between_any_two_changes_leaves_a_state_that_the_next_round_ends(plane: Plane) -> None:
    reconciler = plane.reconciler()
    old, new = run(plane, reconciler), run(plane, reconciler)
    failed = run(plane, reconciler, well=False)
    plane.clock.now += 5 * DAY_S
    deaths = 0
    for changes in itertools.count(1):
        store = Dying(plane.objects)
        store.left = changes
        rows, objects = RetentionRepository(plane.database), RetentionStore(store)
        try:
            summed(RetentionSweeper(rows, objects, kept(ALL_JOBS_FILTER), plane.clock).run_round())
        except KeyboardInterrupt:
            deaths += 1
            # Rows go before objects: each model that has a row is whole.
            for model in plane.catalog.list_models(PageQuery(limit=9), tenant=TENANT).items:
                job = plane.jobs.get(model.job_id, tenant=TENANT)
                assert plane.store.read_artifact_manifest(job.attempt_id) is not None
                assert f"{job.attempt_id.prefix}/artifact/data.bin" in keys(plane)
        else:
            break
    assert deaths > 3
    assert [model.job_id for model in plane.catalog.list_models(PageQuery(limit=9), tenant=TENANT).items] == [new.id]
    assert {key.split("/")[1] for key in keys(plane)} == {new.id}
    assert RetentionRepository(plane.database).list_due_deletions(now=plane.clock(), limit=9, after=None) == []
    assert [job.id for job in plane.jobs.list(PageQuery(), tenant=TENANT).items] == [new.id], (old.id, failed.id)


def test_two_at_a_time_remove_each_thing_once(plane: Plane) -> None:
    reconciler = plane.reconciler()
    jobs = [run(plane, reconciler) for _ in range(4)]
    plane.clock.now += 5 * DAY_S
    rounds = [sweeper(plane).run_round(), sweeper(plane).run_round()]
    while rounds:  # a step of one sweeper, a step of the other
        for each in list(rounds):
            if next(each, None) is None:
                rounds.remove(each)
    assert {key.split("/")[1] for key in keys(plane)} == {jobs[-1].id}
    assert [job.id for job in plane.jobs.list(PageQuery(), tenant=TENANT).items] == [jobs[-1].id]


class Refusing(InMemoryObjectStore):
    """A store that refuses to remove objects of some jobs."""

    def __init__(self, objects: InMemoryObjectStore, *refused: str) -> None:
        super().__init__()
        self._client, self._refused = objects._client, refused

    def delete_prefix(self, prefix: str) -> None:
        if any(name in prefix for name in self._refused):
            raise StorageError("AccessDenied")
        super().delete_prefix(prefix)


def test_a_tick_is_short_and_the_next_goes_on(plane: Plane) -> None:
    reconciler = plane.reconciler()
    for _ in range(3):
        run(plane, reconciler)
    plane.clock.now += 1.5 * DAY_S
    seconds = itertools.count()
    slow = sweeper(plane, monotonic=lambda: float(next(seconds)))  # every step takes a second
    before = len(keys(plane))
    slow.tick()
    assert len(keys(plane)) == before, "the first step removes rows"
    ticks = 1
    while slow.stored == StoredAmounts():
        slow.tick()
        ticks += 1
    assert ticks > 10
    assert len(keys(plane)) == 9
    assert slow.removed["checkpoints"].objects == 6
    assert slow.stored.rows["jobs"] == 3
    assert slow.stored.objects == {"artifacts": 6, "other": 3}
    assert slow.stored.bytes["artifacts"] > 0
    again = run(plane, reconciler)
    plane.clock.now += 3599
    slow.tick()
    assert slow.stored.rows["jobs"] == 3, "it pauses between rounds"
    plane.clock.now += 2 * DAY_S
    while slow.stored.rows["jobs"] == 3:
        slow.tick()
    assert not [key for key in keys(plane) if "checkpoints" in key and again.id in key]


@pytest.mark.slow("two jobs and a sweep a day, each transaction on a disk")
def test_fifteen_days_of_traffic_end_at_a_steady_size(plane: Plane, tmp_path: Path) -> None:
    """Each day has jobs that succeed and fail, promotions and at times a rollback; each night has a sweep."""
    store = LocalObjectStore(tmp_path / "store")
    plane.objects = store  # type: ignore[assignment]
    plane.__post_init__()
    reconciler = plane.reconciler(max_running_jobs=9)
    registry = RegistryService(plane.catalog, plane.clock, TenantPolicies())
    pinned = run(plane, reconciler, name="pinned")
    assert pinned.distilled_model is not None
    spec = ResolvedDeployment(
        id=new_id("dep"), model=pinned.distilled_model, artifact_uri="s3://x", route_prefix="/pinned"
    )
    plane.catalog.create_deployment(Deployment(spec, TENANT, 1000))
    resumable = plane.submit(name="resumable")
    started, event = start_attempt(plane.get(resumable), now=1000)
    started = replace(started, attempt=replace(started.attempt, submitted_at=1000.0))
    pausing, later = transition(plane.jobs.update(started, events=[event]), JobStatus.PAUSING, now=1000)
    paused, last = transition(pausing, JobStatus.PAUSED, now=1000)
    plane.jobs.update(paused, events=[later, last])
    checkpoint = plane.worker(resumable).checkpoint(3)
    sizes: list[dict[str, int]] = []
    promoted: list[str] = []
    for day in range(15):
        model = run(plane, reconciler, name="chat", steps=20).distilled_model
        run(plane, reconciler, name="chat", well=False)
        assert model is not None
        if day % 5 == 4:
            registry.roll_back("production", tenant=TENANT, by="ann", reason="worse")
            promoted.pop()
        else:
            registry.promote(model, "production", tenant=TENANT, by="ann", reason="better")
            promoted.append(model)
        plane.clock.now += DAY_S
        nightly = sweeper(plane, monotonic=lambda: 0.0)
        nightly.tick()
        objects = {f"objects of {kind}": number for kind, number in nightly.stored.objects.items()}
        sizes.append({**nightly.stored.rows, **objects})
        # One of the models kept for rollbacks was rolled back, and none is kept in its place.
        in_use = promoted[-1:] if day % 5 == 4 else promoted[-kept(ALL_JOBS_FILTER).retention_rollbacks :]
        for held in (pinned.distilled_model, *in_use):
            found = plane.catalog.get_model(held, tenant=TENANT)
            assert (
                plane.store.read_artifact_manifest(plane.jobs.get(found.job_id, tenant=TENANT).attempt_id) is not None
            )
    for what in sizes[-1]:
        of_last, of_before = (max(size.get(what, 0) for size in sizes[days]) for days in (slice(10, 15), slice(5, 10)))
        assert of_last <= of_before, (what, [size.get(what, 0) for size in sizes])
    assert sizes[-1]["jobs"] < 20
    assert plane.store.find_newest_checkpoint(resumable.id) == checkpoint
    assert plane.get(resumable).status is JobStatus.PAUSED
    assert registry.resolve_model("production", TENANT)[0].id == promoted[-1]
    empty = [path for path in (tmp_path / "store").rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert len(empty) < 100, "a directory store keeps no empty directories"


def test_one_job_that_cannot_be_swept_keeps_no_other_from_it_and_a_store_that_is_away_ends_the_round(
    plane: Plane,
) -> None:
    reconciler, rows = plane.reconciler(), RetentionRepository(plane.database)
    jobs = [run(plane, reconciler) for _ in range(4)]
    plane.clock.now += 1.5 * DAY_S
    away = RetentionStore(Refusing(plane.objects, *(job.id for job in jobs)))
    with pytest.raises(StorageError):
        summed(RetentionSweeper(rows, away, kept(ALL_JOBS_FILTER), plane.clock).run_round())
    assert rows.list_ended_jobs(JobDataKind.EVENT_OBJECTS, before=plane.clock(), limit=9, after=None)
    refusing = RetentionStore(Refusing(plane.objects, jobs[0].id))
    summed(RetentionSweeper(rows, refusing, kept(ALL_JOBS_FILTER), plane.clock).run_round())
    assert {key.split("/")[1] for key in keys(plane) if "checkpoints" in key} == {jobs[0].id}
    summed(sweeper(plane).run_round())
    assert [key for key in keys(plane) if "checkpoints" in key] == [], "the next round tries it again"


def test_what_is_deleted_between_rounds_goes_within_a_minute(plane: Plane) -> None:
    """A tenant's quota counts deleted objects until they are gone."""
    job, regular = run(plane, plane.reconciler()), sweeper(plane, NOTHING)
    regular.tick()
    kept = keys(plane)
    RetentionRepository(plane.database).delete_job(job.id, by="ann", now=plane.clock(), tenant=TENANT)
    plane.clock.now += 1.0
    regular.tick()
    assert keys(plane) == [], kept
    store_again = run(plane, plane.reconciler(), name="another")
    RetentionRepository(plane.database).delete_job(store_again.id, by="ann", now=plane.clock(), tenant=TENANT)
    regular.tick()
    assert keys(plane), "a minute has not passed"
    plane.clock.now += 60.0
    regular.tick()
    assert keys(plane) == []
