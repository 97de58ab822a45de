"""The attempt channel: events without gaps, complete checkpoints only, logs, requests."""

import builtins
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest, trials_prefix
from swiftkv_platform.contract.events import AttemptEvent, MessageEvent
from swiftkv_platform.errors import ConflictError, ObjectNotFoundError, StorageError
from swiftkv_platform.specs import JobSpec, load_spec
from swiftkv_platform.storage.artifacts import fetch_directory, hash_manifest, read_manifest, write_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore, EventWriter
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore, open_store
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.recipes import RECIPES

JOB = "job_1"

FIRST, SECOND = AttemptId(JOB, 1), AttemptId(JOB, 2)


@pytest.fixture
def store() -> InMemoryObjectStore:
    return InMemoryObjectStore()


@pytest.fixture
def attempts(store: InMemoryObjectStore) -> AttemptStore:
    return AttemptStore(store)


def event(time: float, message: str = "") -> AttemptEvent:
    return MessageEvent(time=time, message=message)


def read(attempts: AttemptStore, cursor: dict[str, int]) -> list[tuple[str, int]]:
    return [(stored.writer, stored.sequence) for stored in attempts.read_events(FIRST, cursor)]


def checkpoint(store: ObjectStore, attempt: int, name: str, *, complete: bool = True) -> str:
    key = f"{AttemptId(JOB, attempt).checkpoints_prefix}/{name}"
    store.put_bytes(f"{key}/shard", b"x" * attempt)
    if complete:
        write_manifest(store, key, {}, kind="checkpoint", lineage={"name": name}, metrics={})
    return key


BYPASSING = {"prefill_layers": [0, 2], "decode_key_value": "own"}


def test_a_request_leaves_out_what_stands_at_its_default(store: InMemoryObjectStore, attempts: AttemptStore) -> None:
    """A request leaves out defaults, because workers of an older version refuse fields that they do not know."""
    for recipe in RECIPES:
        asked = AttemptRequest(job_id=JOB, attempt=1, spec=load_spec(recipe), run_id="r")
        attempts.write_request(asked)
        assert attempts.read_request(FIRST) == asked
    everything = JobSpec.model_validate(JobSpec(name="x").model_dump() | {"swiftkv": {"decode_key_value": "shared"}})
    attempts.write_request(AttemptRequest(job_id=JOB, attempt=2, spec=everything, run_id="r"))
    stored = json.loads(store.get_bytes(SECOND.request_key))
    assert stored == {"job_id": JOB, "attempt": 2, "spec": {"name": "x"}, "run_id": "r"}
    assert attempts.read_request(SECOND).spec == everything, "without a form, the paper's"
    listed = AttemptRequest.model_validate(
        {"job_id": JOB, "attempt": 2, "run_id": "r", "spec": {"name": "x", "swiftkv": BYPASSING}}
    )
    assert json.loads(listed.to_json())["spec"]["swiftkv"] == BYPASSING, "older workers must refuse it"


def test_what_a_job_that_has_ended_needs_no_more_is_deleted(store: InMemoryObjectStore, attempts: AttemptStore) -> None:
    inputs = [FIRST.data_prefix + "/manifest.json", SECOND.data_prefix + "/tokens.bin", FIRST.answers_key("a")]
    inputs.append(FIRST.get_calibrated_start_prefix("lr1") + "/manifest.json")
    trial = f"{trials_prefix(JOB)}/lr1"
    of_a_trial = f"{trial}/{SECOND.checkpoints_prefix}/step-00000001/shard"
    kept = [f"{trial}/{SECOND.artifact_prefix}/evaluation.json", f"{SECOND.checkpoints_prefix}/step-00000001/shard"]
    others = [AttemptId("job_2", 1).data_prefix + "/tokens.bin"]
    for key in (*inputs, of_a_trial, *kept, *others):
        store.put_bytes(key, b"x")

    attempts.discard_inputs(JOB)
    assert {info.key for info in store.list("")} == {of_a_trial, *kept, *others}
    attempts.discard_trial_checkpoints(JOB)
    attempts.discard_inputs(JOB)
    assert {info.key for info in store.list("")} == {*kept, *others}


def put_event(store: InMemoryObjectStore, writer: str, sequence: int, time: float | None = None) -> None:
    data = event(float(sequence) if time is None else time).model_dump_json().encode()
    store.put_bytes(FIRST.event_key(writer, sequence), data)


def test_a_request_and_logs_come_back(attempts: AttemptStore) -> None:
    request = AttemptRequest(job_id=JOB, attempt=2, spec=JobSpec(name="x"), run_id="r", resume_from="jobs/a")
    attempts.write_request(request)
    attempts.write_request(request)
    assert attempts.read_request(SECOND) == request
    with pytest.raises(ObjectNotFoundError):
        attempts.read_request(AttemptId(JOB, 3))
    assert attempts.open_saved_logs(FIRST) is None
    attempts.save_logs(FIRST, iter([b"line 1\nl", "äine 2\n".encode()]))
    saved = attempts.open_saved_logs(FIRST)
    assert saved is not None
    assert b"".join(saved.stream()).decode() == "line 1\nläine 2\n"


def test_events_come_after_the_cursor_in_order_of_time(store: InMemoryObjectStore, attempts: AttemptStore) -> None:
    assert read(attempts, {}) == []
    driver, worker = EventWriter(store, FIRST, "driver"), EventWriter(store, FIRST, "rank-0")
    assert [driver.write(event(1.0)), driver.write(event(4.0))] == [1, 2]
    assert [worker.write(event(2.0)), worker.write(event(3.0, "hello"))] == [1, 2]
    assert read(attempts, {}) == [("driver", 1), ("rank-0", 1), ("rank-0", 2), ("driver", 2)]
    assert [len(attempts.read_events(FIRST, {}, most)) for most in (1, 3, 4, 9)] == [1, 3, 4, 4]
    assert read(attempts, {"rank-0": 1, "driver": 2}) == [("rank-0", 2)]
    assert attempts.read_events(FIRST, {"rank-0": 1, "driver": 2})[0].event == event(3.0, "hello")
    assert read(attempts, {"rank-0": 2, "driver": 2}) == []


class Counted(InMemoryObjectStore):
    """A store that counts requests for lists; one returns up to 1,000 keys."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = 0

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        self.lists += 1
        for number, info in enumerate(super().list(prefix, start_after=start_after), start=1):
            yield info
            if number % 1000 == 0:
                self.lists += 1

    def list_directories(self, prefix: str) -> builtins.list[str]:
        raise AssertionError(f"a second list, of {prefix}")


def test_looks_at_a_growing_attempt_list_once_each_and_miss_nothing() -> None:
    """Writers come and go, with names before and after those of others; each event is read once."""
    store, rng = Counted(), random.Random(3)
    attempts, cursor, written = AttemptStore(store), dict[str, int](), list[tuple[str, int]]()
    counts = Counter[str]()

    def write(writer: str, number: int) -> None:
        for _ in range(number):
            counts[writer] += 1
            data = event(float(len(written))).model_dump_json().encode()
            store.put_bytes(FIRST.event_key(writer, counts[writer]), data)
            written.append((writer, counts[writer]))

    found: list[tuple[str, int]] = []
    for turn in range(30):
        write(rng.choice(["driver", "evaluation", "rank0-a", "rank0-b", f"z{turn}"][: 2 + turn // 5]), 100)
        before = store.lists
        for stored in attempts.read_events(FIRST, cursor, 256, turn):
            cursor[stored.writer] = stored.sequence
            found.append((stored.writer, stored.sequence))
        assert store.lists == before + 1
    while more := attempts.read_events(FIRST, cursor, 256):
        found += [(stored.writer, stored.sequence) for stored in more]
        cursor |= {stored.writer: stored.sequence for stored in more}
    assert sorted(found) == sorted(written)
    assert len(set(found)) == len(found)


def test_an_event_of_the_writer_that_says_most_waits_for_one_look_at_most() -> None:
    store = Counted()
    attempts, cursor = AttemptStore(store), {"driver": 20, "rank0": 30_000}
    for turn in range(0, 20, 2):
        number = cursor["rank0"] + 1
        put_event(store, "rank0", number, 1.0)
        [stored] = attempts.read_events(FIRST, cursor, 256, turn)
        assert (stored.writer, stored.sequence) == ("rank0", number)
        cursor["rank0"] = number
    put_event(store, "driver", 21, 1.0)
    assert attempts.read_events(FIRST, cursor, 256, 20) == []
    assert len(attempts.read_events(FIRST, cursor, 256, 21)) == 1


def test_a_clock_that_jumps_back_does_not_reorder_a_writer(store: InMemoryObjectStore, attempts: AttemptStore) -> None:
    writer = EventWriter(store, FIRST, "driver")
    for time in (5.0, 1.0, 9.0):
        writer.write(event(time))
    EventWriter(store, FIRST, "rank-0").write(event(6.0))
    assert read(attempts, {}) == [("driver", 1), ("driver", 2), ("rank-0", 1), ("driver", 3)]


def test_reading_stops_at_a_gap_until_it_is_filled(store: InMemoryObjectStore, attempts: AttemptStore) -> None:
    for sequence in (1, 3):
        put_event(store, "driver", sequence)
    store.put_bytes("jobs/job_1/attempts/1/events/driver/notes.txt", b"not an event")
    assert read(attempts, {}) == [("driver", 1)]
    assert read(attempts, {"driver": 1}) == []
    put_event(store, "driver", 2)
    assert read(attempts, {"driver": 1}) == [("driver", 2), ("driver", 3)]


def test_a_restarted_writer_goes_on_and_a_second_one_is_noticed(store: InMemoryObjectStore) -> None:
    first = EventWriter(store, FIRST, "driver")
    assert first.write(event(1.0)) == 1
    second = EventWriter(store, FIRST, "driver")
    assert second.write(event(2.0)) == 2
    with pytest.raises(ConflictError):
        first.write(event(3.0))
    assert EventWriter(store, SECOND, "driver").write(event(1.0)) == 1


def test_a_write_whose_answer_was_lost_does_not_block_the_writer(attempts: AttemptStore) -> None:
    class LosesOneAnswer(InMemoryObjectStore):
        lose = False

        def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            super().put_bytes(key, data, if_absent=if_absent)
            if self.lose:
                self.lose = False
                raise StorageError("connection lost")

    store = LosesOneAnswer()
    writer = EventWriter(store, FIRST, "driver")
    writer.write(event(1.0))
    store.lose = True
    with pytest.raises(StorageError, match="connection lost"):
        writer.write(event(2.0))
    assert writer.write(event(3.0)) == 3


def test_only_complete_checkpoints_and_artifacts_count(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    attempts = AttemptStore(store)
    assert attempts.find_newest_checkpoint(JOB) is None
    first = checkpoint(store, 1, "step-00000100-w2")
    newest = checkpoint(store, 2, "step-00000200-w2")
    older = checkpoint(store, 10, "step-00000100-w1")
    checkpoint(store, 10, "step-00000300-w1", complete=False)
    checkpoint(store, 10, "notes")
    found = attempts.list_checkpoints(JOB)
    expected = [(1, 100, first), (10, 100, older), (2, 200, newest)]
    assert [(each.attempt, each.step, each.key) for each in found] == expected
    assert found[0].sha256 == hash_manifest(read_manifest(store, first))
    assert attempts.find_newest_checkpoint(JOB) == newest
    assert attempts.find_newest_checkpoint(JOB, before_attempt=2) == first
    assert attempts.find_newest_checkpoint(JOB, before_attempt=1) is None
    assert attempts.find_newest_checkpoint("job_2") is None
    assert checkpoint(store, 11, "step-00000200-w2") == attempts.find_newest_checkpoint(JOB), "the newest of one step"
    store.put_bytes(f"{FIRST.artifact_prefix}/stray", b"")
    assert attempts.read_artifact_manifest(FIRST) is None
    manifest = write_manifest(store, FIRST.artifact_prefix, {}, kind="artifact", lineage={}, metrics={"kl": 0.1})
    assert attempts.read_artifact_manifest(FIRST) == manifest
    assert fetch_directory(open_store(attempts.get_artifact_uri(FIRST)), "", tmp_path / "out") == manifest
