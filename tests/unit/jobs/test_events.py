"""What a process says, as the control plane reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.events import MetricsBuffer, Reporter
from swiftkv_platform.attempts import AttemptEvent, AttemptRequest
from swiftkv_platform.errors import StorageError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore
from swiftkv_platform.storage.object_store import ObjectStore

REQUEST = AttemptRequest(job_id="job", attempt=1, spec=JobSpec(name="n"), run_id="run")


def _said(store: ObjectStore) -> list[AttemptEvent]:
    return [stored.event for stored in AttemptStore(store).read_events("job", 1, {})]


def _point(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.0 / step}


class OutageStore(LocalObjectStore):
    """A directory that takes no objects while `away`."""

    away = False

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if self.away:
            raise StorageError("the store is away")
        super().put_bytes(key, data, if_absent=if_absent)


def test_a_restarted_process_has_a_name_of_its_own(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    for _ in range(2):
        Reporter(store, REQUEST, "rank0").message("hello")

    stored = AttemptStore(store).read_events("job", 1, {})
    assert [event.sequence for event in stored] == [1, 1]
    assert len({event.writer for event in stored}) == 2
    assert all(event.writer.startswith("rank0-") for event in stored)


def test_an_error_carries_what_the_control_plane_decides_by(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    Reporter(store, REQUEST, "driver").error(
        "no rows", code="data_error", field="data.sources", value="x", retryable=False
    )

    (event,) = _said(store)
    assert (event.type, event.level, event.message) == ("error", "error", "no rows")
    assert event.data == {"code": "data_error", "field": "data.sources", "value": "x", "retryable": False}


def test_several_steps_share_an_event(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    buffer = MetricsBuffer(Reporter(store, REQUEST, "rank0"), total_steps=9, interval_s=3600.0)
    for step in (1, 2, 3):
        buffer.add(_point(step))
    buffer.flush()
    buffer.flush()

    first, second = _said(store)
    assert first.data == {"points": [_point(1)], "total_steps": 9}
    assert second.data == {"points": [_point(2), _point(3)], "total_steps": 9}


def test_without_an_interval_every_step_is_told_at_once(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    buffer = MetricsBuffer(Reporter(store, REQUEST, "rank0"), total_steps=9, interval_s=0.0)
    for step in (1, 2):
        buffer.add(_point(step))
        assert len(_said(store)) == step


def test_points_survive_an_outage_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = OutageStore(tmp_path)
    buffer = MetricsBuffer(Reporter(store, REQUEST, "rank0"), total_steps=9, interval_s=0.0)
    store.away = True
    buffer.add(_point(1))
    store.away = False
    buffer.add(_point(2))

    (event,) = _said(store)
    assert event.data["points"] == [_point(1), _point(2)]
