"""Objects that retention removes: in batches, wherever they lie below a job, and nothing beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv_platform.orchestration.retention import Kind
from swiftkv_platform.storage.artifacts import is_complete
from swiftkv_platform.storage.local_store import LocalObjectStore
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.storage.sweeping import StoredObjects
from tests.fakes.object_store import InMemoryObjectStore

ATTEMPT = "jobs/job_1/attempts/1"
TRIAL = "jobs/job_1/trials/l2/jobs/job_1/attempts/1"


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return InMemoryObjectStore() if request.param == "memory" else LocalObjectStore(tmp_path / "store")


def put(store: ObjectStore, *keys: str) -> None:
    for key in keys:
        store.put_bytes(key, b"abc")


def keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("")]


def test_a_kind_has_its_places_in_every_attempt_and_trial(store: ObjectStore) -> None:
    put(
        store,
        f"{ATTEMPT}/logs.txt",
        f"{TRIAL}/logs.txt",
        "jobs/job_1/attempts/2/attempt.json",
        "jobs/job_2/attempts/1/a",
    )
    assert StoredObjects(store).places("job_1", Kind.CHECKPOINTS) == [
        f"{ATTEMPT}/checkpoints",
        "jobs/job_1/attempts/2/checkpoints",
        f"{TRIAL}/checkpoints",
    ]
    assert StoredObjects(store).places("job_1", Kind.LOGS)[:2] == [f"{ATTEMPT}/logs.txt", f"{ATTEMPT}/logs.json"]
    assert StoredObjects(store).places("job_9", Kind.LOGS) == []


def test_a_place_is_emptied_in_batches_that_can_be_repeated(store: ObjectStore) -> None:
    place = f"{ATTEMPT}/events"
    put(store, *(f"{place}/driver/{number}" for number in range(5)), f"{ATTEMPT}/events-not", f"{ATTEMPT}/attempt.json")
    objects = StoredObjects(store)
    sizes = []
    after: str | None = "begin"
    while after is not None:
        batch = objects.remove(place, limit=2)
        after = batch.next
        sizes.append((batch.objects, batch.bytes))
    assert sizes == [(2, 6), (2, 6), (1, 3)]
    assert objects.remove(place, limit=2).objects == 0
    assert keys(store) == [f"{ATTEMPT}/attempt.json", f"{ATTEMPT}/events-not"]


def test_one_object_is_a_place_too(store: ObjectStore) -> None:
    put(store, f"{ATTEMPT}/logs.txt", f"{ATTEMPT}/logs.json")
    objects = StoredObjects(store)
    assert objects.measure(f"{ATTEMPT}/logs.txt", limit=9, after=None).bytes == 3
    assert objects.remove(f"{ATTEMPT}/logs.txt", limit=9).objects == 1
    assert objects.remove(f"{ATTEMPT}/logs.txt", limit=9).objects == 0
    assert keys(store) == [f"{ATTEMPT}/logs.json"]


def test_no_checkpoint_looks_complete_while_its_files_go(store: ObjectStore) -> None:
    place = f"{ATTEMPT}/checkpoints"
    names = [f"{place}/step-{step}" for step in (1, 2)]
    for name in names:
        put(store, f"{name}/a", f"{name}/b", f"{name}/manifest.json")
    StoredObjects(store).remove(place, limit=1)
    assert not any(is_complete(store, name) for name in names)
    assert len(keys(store)) == 3


def test_measuring_counts_what_removing_would_remove(store: ObjectStore) -> None:
    place = f"{ATTEMPT}/tracking"
    put(store, *(f"{place}/run/{number}" for number in range(5)))
    objects, seen, after = StoredObjects(store), 0, None
    for _ in range(3):
        batch = objects.measure(place, limit=2, after=after)
        seen, after = seen + batch.objects, batch.next
    assert (seen, after) == (5, None)
    assert len(keys(store)) == 5


def test_objects_are_counted_by_kind_part_by_part(store: ObjectStore) -> None:
    put(
        store,
        f"{ATTEMPT}/events/driver/1",
        f"{ATTEMPT}/artifact/a",
        f"{TRIAL}/checkpoints/s/a",
        f"{TRIAL}/checkpoints/s/b",
    )
    put(store, f"{ATTEMPT}/attempt.json", "files/f")
    objects = StoredObjects(store)
    counted: dict[str, int] = {}
    after: str | None = None
    for _ in range(3):
        found, after = objects.count(limit=2, after=after)
        for kind, (number, size) in found.items():
            counted[kind] = counted.get(kind, 0) + number
            assert size == 3 * number
    assert after is None
    assert counted == {"event_objects": 1, "artifacts": 1, "checkpoints": 2, "other": 2}
