"""Results of single rows in the object store: kept beyond the evaluation, also by an attempt that resumed it."""

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.errors import StorageError
from swiftkv_platform.jobs.attempt.stored import StoredResults
from swiftkv_platform.storage.attempt_store import AttemptStore
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.unit.jobs.attempts import request


def test_a_later_attempt_publishes_what_an_earlier_one_measured() -> None:
    store = InMemoryObjectStore()
    StoredResults(store, request(1), "checkpoints/a").store_rows("task-000-own", b"first\n")
    StoredResults(store, request(1), "checkpoints/b").store_rows("task-000-own", b"of another checkpoint\n")
    later = StoredResults(store, request(2), "checkpoints/a")
    later.store_rows("task-001-own", b"second\n")
    later.publish_rows(["task-000-own", "task-001-own"])
    AttemptStore(store).discard_inputs("job")
    attempt = AttemptId("job", 2)
    assert {info.key: store.get_bytes(info.key) for info in store.list(attempt.row_results_prefix)} == {
        attempt.row_results_key("task-000-own"): b"first\n",
        attempt.row_results_key("task-001-own"): b"second\n",
    }
    assert not list(store.list(attempt.evaluation_prefix))


def test_missing_rows_are_measured_again() -> None:
    with pytest.raises(StorageError, match="the results of the rows task-000-own are missing"):
        StoredResults(InMemoryObjectStore(), request(1), "a").publish_rows(["task-000-own"])
