"""Events of a process, as the control plane reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.errors import ConflictError, StorageError
from swiftkv_platform.jobs.attempt.events import MetricsBuffer, Reporter
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore
from swiftkv_platform.storage.object_store import ObjectStore
from tests.fakes.object_store import InMemoryObjectStore

REQUEST = AttemptRequest(job_id="job", attempt=1, spec=JobSpec(name="n"), run_id="run")


def _said(store: ObjectStore) -> list[AttemptEvent]:
    return [stored.event for stored in AttemptStore(store).read_events(REQUEST.attempt_id, {})]


def _point(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.0 / step}


def _steps(store: ObjectStore) -> list[int]:
    return [point["step"] for event in _said(store) for point in event.data["points"]]


class HangingStore(InMemoryObjectStore):
    """Takes objects while `open`, or raises `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached, self.written = threading.Event(), threading.Event(), threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.reached.set()
        self.open.wait()
        if self.error is not None:
            raise self.error
        super().put_bytes(key, data, if_absent=if_absent)
        self.written.set()


@contextmanager
def metrics_buffer(store: ObjectStore, *, interval_s: float) -> Iterator[MetricsBuffer]:
    buffer = MetricsBuffer(Reporter(store, REQUEST.attempt_id, "rank0"), total_steps=9, interval_s=interval_s)
    try:
        yield buffer
    finally:
        buffer.close()


def test_a_restarted_process_has_a_name_of_its_own(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    for _ in range(2):
        Reporter(store, REQUEST.attempt_id, "rank0").message("hello")

    stored = AttemptStore(store).read_events(REQUEST.attempt_id, {})
    assert [event.sequence for event in stored] == [1, 1]
    assert len({event.writer for event in stored}) == 2
    assert all(event.writer.startswith("rank0-") for event in stored)


def test_an_error_carries_what_the_control_plane_decides_by(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    Reporter(store, REQUEST.attempt_id, "driver").error(
        "no rows", code="data_error", field="data.sources", value="x", retryable=False
    )

    (event,) = _said(store)
    assert (event.type, event.level, event.message) == ("error", "error", "no rows")
    assert event.data == {"code": "data_error", "field": "data.sources", "value": "x", "retryable": False}


def test_threads_of_a_process_never_share_a_number(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    reporter = Reporter(store, REQUEST.attempt_id, "rank0")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(reporter.message, (str(number) for number in range(40))))

    stored = AttemptStore(store).read_events(REQUEST.attempt_id, {})
    assert [event.sequence for event in stored] == list(range(1, 41))
    assert sorted(int(event.event.message) for event in stored) == list(range(40))


def test_several_steps_share_an_event(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    with metrics_buffer(store, interval_s=3600.0) as buffer:
        buffer.add(_point(1))
        buffer.flush()
        for step in (2, 3):
            buffer.add(_point(step))
        buffer.flush()
        buffer.flush()

        first, second = _said(store)
    assert first.data == {"points": [_point(1)], "total_steps": 9}
    assert second.data == {"points": [_point(2), _point(3)], "total_steps": 9}


def test_points_are_told_without_a_flush() -> None:
    store = HangingStore()
    with metrics_buffer(store, interval_s=0.01) as buffer:
        for step in (1, 2, 3):
            store.written.clear()
            buffer.add(_point(step))
            store.written.wait()
            assert _steps(store) == list(range(1, step + 1))


def test_no_step_waits_for_a_store_that_hangs() -> None:
    store = HangingStore()
    store.open.clear()
    with metrics_buffer(store, interval_s=3600.0) as buffer:
        buffer.add(_point(1))
        store.reached.wait()
        for step in range(2, 100):
            buffer.add(_point(step))
        assert _said(store) == []  # `add` came back all the same
        store.open.set()

    first, second = _said(store)
    assert first.data["points"] == [_point(1)]
    assert second.data["points"] == [_point(step) for step in range(2, 100)]


@pytest.mark.parametrize("error", [StorageError("away"), ConflictError("came late"), RuntimeError("unheard of")])
def test_points_survive_an_outage_of_the_store(error: Exception) -> None:
    store = HangingStore()
    with capture_logs() as lines, metrics_buffer(store, interval_s=3600.0) as buffer:
        store.error = error
        buffer.add(_point(1))
        buffer.flush()
        buffer.add(_point(2))
        buffer.flush()
        store.error = None
        buffer.add(_point(3))

    (event,) = _said(store)
    assert event.data["points"] == [_point(1), _point(2), _point(3)]
    assert {line["event"] for line in lines} == {"metrics_delayed"}


def test_a_store_that_is_back_gets_the_points_without_another_step() -> None:
    store = HangingStore()
    with metrics_buffer(store, interval_s=0.01) as buffer:
        store.error = StorageError("away")
        for step in (1, 2):
            buffer.add(_point(step))
        buffer.flush()
        store.error = None
        store.written.wait()
        assert _steps(store) == [1, 2]


def test_the_end_tries_once_more_and_says_what_is_lost() -> None:
    store = HangingStore()
    store.error = StorageError("away")
    buffer = MetricsBuffer(Reporter(store, REQUEST.attempt_id, "rank0"), total_steps=9, interval_s=3600.0)
    with capture_logs() as lines:
        buffer.add(_point(1))
        buffer.close()

    assert lines[-1] == {"event": "metrics_lost", "num_points": 1, "log_level": "error"}
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    buffer.flush()
    buffer.close()
