"""Inputs that a job's store keeps for a later attempt: rows, the calibrated start and the teacher's answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.data import completions
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.errors import DataError, InvalidInputError, StorageError
from swiftkv_platform.jobs.attempt.stored import find_prepared_rows
from swiftkv_platform.jobs.driver import prepare_run, write_answers
from swiftkv_platform.jobs.worker.setup import calibrate
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from tests.support.captured_traffic import DEPLOYMENT, SOURCE, Traffic
from tests.unit.jobs.attempts import COPIED, Job, request, said


def is_discarded(job: Job) -> bool:
    """Discard the job's inputs; return whether nothing but events is left."""
    AttemptStore(job.store).discard_inputs("job")
    return all("/events/" in info.key for info in job.store.list("jobs/job"))


def test_a_later_attempt_trains_on_the_rows_of_the_first(job: Job, tmp_path: Path) -> None:
    first, later = (request(attempt, job.spec(**COPIED)) for attempt in (1, 2))
    store = job.store
    plan, stored = prepare_run(first, store.uri)
    assert stored.rows_key == AttemptId("job", 1).data_prefix == find_prepared_rows(store, later)
    job.write([{"text": "something else altogether"}])
    assert prepare_run(later, store.uri) == (plan, stored)
    stored.fetch_rows(tmp_path / "rows")
    data = stored.open(tmp_path / "rows").data
    assert isinstance(data.train.samples.tokens, np.memmap)
    assert len(data.train) == plan.statistics["train"]["rows"]
    assert data.train[0]["input_ids"].max() <= 257
    assert is_discarded(job)
    assert find_prepared_rows(store, later) is None


def test_a_later_attempt_and_a_repeated_one_start_where_the_first_did(job: Job, tmp_path: Path) -> None:
    spec, store = job.spec(), job.store
    first, again, later = (request(attempt, spec) for attempt in (1, 1, 2))
    _, stored = prepare_run(first, store.uri)
    assert stored.calibrated_start_key == AttemptId("job", 1).get_calibrated_start_prefix("tiny")
    assert stored.needs_calibration
    assert prepare_run(later, store.uri)[1].calibrated_start_key == AttemptId("job", 2).get_calibrated_start_prefix(
        "tiny"
    )
    stored.fetch_rows(tmp_path / "rows")
    (tmp_path / "found").mkdir()
    calibrate(spec, str(job.teacher), PreparedData.load(tmp_path / "rows").train, tmp_path / "found", device="cpu")
    stored.publish_calibrated_start(tmp_path / "found")
    assert not stored.needs_calibration
    assert prepare_run(again, store.uri)[1] == prepare_run(later, store.uri)[1] == stored
    stored.fetch_calibrated_start(tmp_path / "rows")
    calibrated, found = stored.open(tmp_path / "rows").calibrated, Checkpoint.from_directory(tmp_path / "found")
    assert calibrated.keys() == found.keys()
    assert all(calibrated[name].equal(tensor) for name, tensor in found.items())
    assert is_discarded(job)


def test_what_was_found_is_said_in_sentences(job: Job) -> None:
    job.write([{"text": f"number {i} of many"} for i in range(50)] + [{"text": ""}] * 10 + [{"text": "long " * 100}])
    plan, _ = prepare_run(request(1, job.spec(**COPIED)), job.store.uri)
    (source, is_warning), (training, _), (held_out, _), (steering, _) = plan.messages
    assert is_warning  # a sixth of the rows is empty
    assert all(part in source for part in ("61 rows (61 text)", "10 dropped", "1 texts split"))
    assert "% full" in training
    assert held_out.startswith("held out: ")
    assert steering.startswith("validation: ")
    assert is_discarded(job)
    job.write([{"text": "one document"}])
    with pytest.raises(DataError, match="no held-out text") as caught:
        prepare_run(request(1, job.spec(**COPIED)), job.store.uri)
    assert caught.value.field == "data.sources", "no `validation_fraction` divides one document"


@pytest.fixture
def asking(job: Job, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes attempts of the job; its teacher answers six prompts, two a shard."""
    monkeypatch.setattr(completions, "_PROMPTS_PER_SHARD", 2)
    job.write({"prompt": f"question {i}"} for i in range(6))

    def attempt(number: int = 1, **settings: Any) -> AttemptRequest:
        sources = [{"name_or_path": str(job.corpus), "complete": {"max_tokens": 5, **settings}}]
        return request(number, job.spec(**COPIED, data={"sources": sources, "max_length": 64}))

    return attempt


@pytest.fixture
def store(job: Job) -> ObjectStore:
    return job.store


def shards(store: ObjectStore, attempt: int = 1) -> dict[str, int]:
    """Tokens of each shard of answers, by its name."""
    found = {
        Path(info.key).stem: store.get_bytes(info.key) for info in store.list(f"jobs/job/attempts/{attempt}/answers")
    }
    return {name: sum(len(json.loads(line)["token_ids"]) for line in data.splitlines()) for name, data in found.items()}


def test_workers_write_their_shares_and_training_sees_them(asking: Any, store: ObjectStore) -> None:
    first, second = write_answers(asking(), store.uri, 0), write_answers(asking(), store.uri, 1)
    assert 0 < second < first + second == sum(shards(store).values()) <= 30
    shares = [(event.data["part"], event.data["done"], event.data["total"]) for event in said(store, "progress")]
    parts = [f"data.sources[0], worker {worker}" for worker in (0, 0, 1, 1)]
    assert shares == list(zip(parts, (0, 4, 0, 2), (4, 4, 2, 2), strict=True)), "progress is counted in prompts"
    plan, _ = prepare_run(asking(), store.uri)
    told = said(store, "progress")[-1].data
    assert [told[name] for name in ("phase", "part", "done", "total")] == ["prepare", "sources", 1, 1]
    source = plan.statistics["sources"][0]
    assert (source["written_tokens"], source["formats"]) == (first + second, {"prompt_completion": 6})
    assert any(f"{first + second} tokens written by the teacher" in message for message, _ in plan.messages)


@pytest.fixture
def reading(job: Job) -> Any:
    """Return a function that makes attempts of a job on captured traffic of three users."""
    traffic = Traffic(job.store)
    for number in range(30):
        traffic.chat(f"question {number}", "say", user=f"user {number % 3}")

    def attempt(number: int = 1, **source: Any) -> AttemptRequest:
        sources = [{"name_or_path": SOURCE, "until": "2024-10-05", **source}]
        spec = job.spec(**COPIED, data={"sources": sources, "max_length": 64})
        return request(number, spec, traffic={DEPLOYMENT: f"{job.store.uri}/{traffic.prefix}"})

    return attempt


def count_rows(attempt: AttemptRequest, store: ObjectStore) -> int:
    plan, _ = prepare_run(attempt, store.uri)
    return int(plan.statistics["sources"][0]["rows"])


def test_a_deletion_holds_for_attempts_that_have_not_read_yet(reading: Any, store: ObjectStore) -> None:
    assert count_rows(reading(), store) == 30
    Traffic(store).delete(user="user 1")
    assert count_rows(reading(2), store) == 30, "a resumed run needs the rows that the first attempt has prepared"
    store.delete_prefix("jobs")
    assert count_rows(reading(), store) == 20


def test_answers_to_prompts_that_are_deleted_before_training_are_not_used(reading: Any, store: ObjectStore) -> None:
    asking = {"complete": {"max_tokens": 5}}
    write_answers(reading(**asking), store.uri, 0)
    write_answers(reading(**asking), store.uri, 1)
    Traffic(store).delete(user="user 1")
    with pytest.raises(StorageError, match=r"completions .* are missing; the next attempt writes them again"):
        prepare_run(reading(**asking), store.uri)
    write_answers(reading(2, **asking), store.uri, 0)
    write_answers(reading(2, **asking), store.uri, 1)
    assert count_rows(reading(2, **asking), store) == 20


def test_another_attempt_writes_only_what_is_missing(asking: Any, store: ObjectStore) -> None:
    write_answers(asking(), store.uri, 0)
    assert len(shards(store)) == 2
    assert write_answers(asking(2), store.uri, 0) == 0
    assert write_answers(asking(2), store.uri, 1) == sum(shards(store, 2).values()) > 0
    assert len(shards(store, 2)) == 1
    assert write_answers(asking(3, temperature=0.5), store.uri, 0) > 0, "other settings are other answers"
    assert shards(store, 3).keys().isdisjoint(shards(store))
    prepare_run(asking(2), store.uri)
    assert write_answers(asking(4), store.uri, 1) == 0, "the rows are prepared: nothing is left to write"


def test_a_worker_without_room_for_the_teacher_refuses(
    asking: Any, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.jobs.worker.prepare.get_free_bytes", lambda *_, **__: 1e5)
    with pytest.raises(InvalidInputError, match=r"a worker has 0\.0 GB free") as refused:
        write_answers(asking(), store.uri, 0)
    assert refused.value.field == "data.sources.0.complete"
    assert not shards(store)
