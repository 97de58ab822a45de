"""Prepared rows in the job's store: a later attempt trains on the very same, and nothing is left when they are done."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.errors import DataError
from swiftkv_platform.jobs.attempt.preparation import find_rows
from swiftkv_platform.jobs.tasks import prepare
from swiftkv_platform.jobs.worker.calibrate import calibrate
from swiftkv_platform.model.checkpoint import StoredTensors
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i} of many"}) + "\n" for i in range(50)))
    return path


def request(teacher: Path, corpus: Path, attempt: int, *, initialization: str = "copied") -> AttemptRequest:
    spec = JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(teacher), "dtype": "float32"},
            "data": {"sources": [{"name_or_path": str(corpus)}], "max_length": 64, "validation_fraction": 0.1},
            "training": {"max_steps": 2, "batch_size": 2},
            "swiftkv": {"initialization": initialization, "calibration_tokens": 1024},
        }
    )
    return AttemptRequest(job_id="job", attempt=attempt, spec=spec, run_id="run")


def test_a_later_attempt_trains_on_the_rows_of_the_first(
    tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    plan, stored = prepare(request(tiny_teacher, corpus, 1), store.uri)
    assert stored.rows == AttemptId("job", 1).data_prefix
    assert find_rows(store, request(tiny_teacher, corpus, 2)) == stored.rows
    corpus.write_text('{"text": "something else altogether"}\n')
    assert prepare(request(tiny_teacher, corpus, 2), store.uri) == (plan, stored)

    stored.fetch(tmp_path / "rows")
    data = stored.open(tmp_path / "rows").data
    assert isinstance(data.train.samples.tokens, np.memmap)
    assert len(data.train) == plan.statistics["train"]["rows"]
    assert data.train[0]["input_ids"].max() <= 257

    AttemptStore(store).discard_inputs("job")
    assert find_rows(store, request(tiny_teacher, corpus, 2)) is None
    assert not [info for info in store.list("jobs/job") if "/events/" not in info.key]


def test_a_later_attempt_and_a_repeated_one_start_where_the_first_did(
    tiny_teacher: Path, corpus: Path, store: ObjectStore, tmp_path: Path
) -> None:
    first, again, later = (request(tiny_teacher, corpus, n, initialization="calibrated") for n in (1, 1, 2))
    _, stored = prepare(first, store.uri)
    assert stored.start == AttemptId("job", 1).start_prefix("tiny")
    assert stored.lacks_start
    assert prepare(later, store.uri)[1].start == AttemptId("job", 2).start_prefix("tiny")

    stored.fetch(tmp_path / "rows")
    (tmp_path / "found").mkdir()
    rows = PreparedData.load(tmp_path / "rows").train
    calibrate(first.spec, str(tiny_teacher), rows, tmp_path / "found", device="cpu")
    stored.publish_start(tmp_path / "found")
    assert not stored.lacks_start
    assert prepare(again, store.uri)[1] == stored
    assert prepare(later, store.uri)[1] == stored

    stored.fetch_start(tmp_path / "rows")
    calibrated, found = stored.open(tmp_path / "rows").calibrated, StoredTensors(tmp_path / "found")
    assert calibrated is not None
    assert calibrated.keys() == found.keys()
    assert all(calibrated[name].equal(tensor) for name, tensor in found.items())

    AttemptStore(store).discard_inputs("job")
    assert not [info for info in store.list("jobs/job") if "/events/" not in info.key]


def test_data_that_leave_nothing_to_evaluate_on_are_refused_before_training(
    tiny_teacher: Path, corpus: Path, store: ObjectStore
) -> None:
    corpus.write_text(json.dumps({"text": "one document"}) + "\n")
    with pytest.raises(DataError, match="no held-out text") as caught:
        prepare(request(tiny_teacher, corpus, 1), store.uri)
    assert caught.value.field == "data.validation_fraction"


def test_what_was_found_is_said_in_sentences(tiny_teacher: Path, corpus: Path, store: ObjectStore) -> None:
    corpus.write_text(corpus.read_text() + '{"text": ""}\n' * 10 + json.dumps({"text": "long " * 100}) + "\n")
    plan, _ = prepare(request(tiny_teacher, corpus, 1), store.uri)
    (source, is_warning), (training, _), (held_out, _) = plan.messages
    assert is_warning  # a sixth of the rows is empty
    assert "61 rows (61 text)" in source
    assert "10 dropped" in source
    assert "1 texts split" in source
    assert "% full" in training
    assert held_out.startswith("held out: ")
