"""The teacher's answers in the job's store: shared by workers, kept for the next attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data import completions
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.tasks import prepare, write
from swiftkv_platform.jobs.worker import generate_data
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def _two_prompts_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PROMPTS_PER_SHARD", 2)


@pytest.fixture
def spec(tiny_teacher: Path, tmp_path: Path) -> JobSpec:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(6)))
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(tiny_teacher), "dtype": "float32"},
            "data": {
                "sources": [{"name_or_path": str(path), "complete": {"max_tokens": 5}}],
                "max_length": 64,
                "validation_fraction": 0.2,
            },
            "training": {"max_steps": 2, "batch_size": 2},
            "swiftkv": {"initialization": "copied"},
        }
    )


def request(spec: JobSpec, attempt: int = 1) -> AttemptRequest:
    return AttemptRequest(job_id="job", attempt=attempt, spec=spec, run_id="run")


def shards(store: ObjectStore, attempt: int) -> dict[str, list[Any]]:
    keys = [info.key for info in store.list(f"jobs/job/attempts/{attempt}/answers")]
    return {Path(key).stem: [json.loads(line) for line in store.get_bytes(key).splitlines()] for key in keys}


def num_tokens(store: ObjectStore, attempt: int) -> int:
    return sum(len(answer["token_ids"]) for answers in shards(store, attempt).values() for answer in answers)


def test_workers_write_their_shares_and_training_sees_them(spec: JobSpec, store: ObjectStore) -> None:
    first = write(request(spec), store.uri, 0)
    assert (len(shards(store, 1)), num_tokens(store, 1)) == (2, first)
    second = write(request(spec), store.uri, 1)
    assert (len(shards(store, 1)), num_tokens(store, 1)) == (3, first + second)
    assert 0 < second < first + second <= 30
    told = [stored.event for stored in AttemptStore(store).read_events(request(spec).attempt_id, {})]
    shares = [
        (event.data["part"], event.data["done"], event.data["total"]) for event in told if event.type == "progress"
    ]
    assert shares == [
        ("data.sources[0], worker 0", 1, 2),
        ("data.sources[0], worker 0", 2, 2),
        ("data.sources[0], worker 1", 1, 1),
    ]
    plan, _ = prepare(request(spec), store.uri)
    assert plan.statistics["sources"][0]["written_tokens"] == first + second
    assert plan.statistics["sources"][0]["formats"] == {"prompt_completion": 6}
    assert any(f"{first + second} tokens written by the teacher" in message for message, _ in plan.messages)


def test_another_attempt_writes_only_what_is_missing(spec: JobSpec, store: ObjectStore) -> None:
    write(request(spec), store.uri, 0)
    assert write(request(spec, 2), store.uri, 0) == 0
    assert write(request(spec, 2), store.uri, 1) == num_tokens(store, 2) > 0
    assert len(shards(store, 2)) == 1
    prepare(request(spec, 2), store.uri)
    assert write(request(spec, 3), store.uri, 1) == 0, "the rows are prepared"


def test_other_settings_are_other_answers(spec: JobSpec, store: ObjectStore) -> None:
    write(request(spec), store.uri, 0)
    document = spec.model_dump(mode="json")
    document["data"]["sources"][0]["complete"]["temperature"] = 0.5
    assert write(request(JobSpec.model_validate(document), 2), store.uri, 0) > 0
    assert shards(store, 2).keys().isdisjoint(shards(store, 1))


def test_a_worker_without_room_for_the_teacher_refuses(
    spec: JobSpec, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_data, "free_bytes", lambda *_, **__: 1e5)
    with pytest.raises(InvalidInputError, match=r"a worker has 0\.0 GB free") as refused:
        write(request(spec), store.uri, 0)
    assert refused.value.field == "data.sources.0.complete"
    assert not shards(store, 1)
