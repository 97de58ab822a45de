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
    put(store, f"{ATTEMPT}/logs.txt", f"{TRIAL}/logs.txt", "jobs/job_1/attempts/2/attempt.json")
    put(store, "jobs/job_2/attempts/1/a")
    places = [f"{place}/checkpoints" for place in (ATTEMPT, "jobs/job_1/attempts/2", TRIAL)]
    assert StoredObjects(store).places("job_1", Kind.CHECKPOINTS) == places
    assert StoredObjects(store).places("job_1", Kind.LOGS)[:2] == [f"{ATTEMPT}/logs.txt", f"{ATTEMPT}/logs.json"]
    assert StoredObjects(store).places("job_9", Kind.LOGS) == []


def test_no_checkpoint_looks_complete_while_its_files_go(store: ObjectStore) -> None:
    place = f"{ATTEMPT}/checkpoints"
    names = [f"{place}/step-{step}" for step in (1, 2)]
    for name in names:
        put(store, f"{name}/a", f"{name}/b", f"{name}/manifest.json")
    StoredObjects(store).remove(place, limit=1)
    assert not any(is_complete(store, name) for name in names)
    assert len(keys(store)) == 3


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


def test_a_place_is_measured_and_emptied_in_batches_that_can_be_repeated(store: ObjectStore) -> None:
    place, log = f"{ATTEMPT}/events", f"{ATTEMPT}/logs.txt"
    others = [f"{ATTEMPT}/attempt.json", f"{ATTEMPT}/events-not", f"{ATTEMPT}/logs.json"]
    put(store, *(f"{place}/driver/{number}" for number in range(5)), log, *others)
    objects, before, after = StoredObjects(store), keys(store), None
    batches, sizes = [], [(2, 6), (2, 6), (1, 3)]
    for _ in range(3):
        batches.append(objects.measure(place, limit=2, after=after))
        after = batches[-1].next
    assert ([(batch.objects, batch.bytes) for batch in batches], after) == (sizes, None)
    assert keys(store) == before
    batches = [objects.remove(place, limit=2) for _ in range(4)]
    assert [(batch.objects, batch.bytes) for batch in batches] == [*sizes, (0, 0)]
    assert batches[2].next is None
    assert objects.measure(log, limit=9, after=None).bytes == 3, "one object is a place too"
    assert [objects.remove(log, limit=9).objects for _ in range(2)] == [1, 0]
    assert keys(store) == others
