"""Reports of rank 0 about its steps and checkpoints, and what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.contract.events import AttemptEvent, CourseCode
from swiftkv_platform.distillation.course import CourseNote
from swiftkv_platform.distillation.trainer import StepMetrics
from swiftkv_platform.distillation.uploads import Progress
from swiftkv_platform.jobs.values import WorkerConfig
from swiftkv_platform.jobs.worker.train import _RankZero
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from tests.fakes.object_store import InMemoryObjectStore

SPEC = JobSpec.model_validate({"name": "n", "tracking": {"wandb": {"mode": "disabled"}}})
MANIFEST = Manifest(kind="checkpoint", files={}, created_at=0.0)


class HangingStore(InMemoryObjectStore):
    """Takes objects while `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.reached.set()
        self.open.wait()
        super().put_bytes(key, data, if_absent=if_absent)


@contextmanager
def rank_zero(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[_RankZero]:
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    request = AttemptRequest(job_id="job", attempt=1, spec=SPEC, run_id="run")
    listener = _RankZero(store, WorkerConfig(request, store.uri, total_steps=9, prepared=cast("Any", None)))
    try:
        yield listener
    finally:
        listener.close()


def step(number: int) -> StepMetrics:
    return StepMetrics(number, number, {"loss": 1.0}, lr=0.1, grad_norm=1.0, tokens_per_second=1.0, world_size=1)


def said(store: ObjectStore) -> list[AttemptEvent]:
    return [stored.event for stored in AttemptStore(store).read_events(AttemptId("job", 1), {})]


def steps(events: list[AttemptEvent]) -> list[int]:
    return [point["step"] for event in events if event.type == "metrics" for point in event.data["points"]]


def test_no_step_waits_for_a_store_that_hangs_nor_for_a_checkpoint_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HangingStore()
    with rank_zero(store, monkeypatch) as listener:
        store.open.clear()
        listener.on_step(step(1))
        store.reached.wait()
        upload = threading.Thread(target=listener.on_commit, args=("key", MANIFEST, Progress(1)))
        upload.start()
        for number in range(2, 50):
            listener.on_step(step(number))
        assert said(store) == []  # `on_step` came back all the same
        store.open.set()
        upload.join()

    assert steps(said(store)) == list(range(1, 50))


def test_a_checkpoint_comes_after_the_metrics_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryObjectStore()
    with rank_zero(store, monkeypatch) as listener:
        for number in range(1, 6):
            listener.on_step(step(number))
        listener.on_commit("key", MANIFEST, Progress(5))
        listener.on_step(step(6))

    events = said(store)
    (place,) = (place for place, event in enumerate(events) if event.type == "checkpoint")
    assert steps(events[:place]) == [1, 2, 3, 4, 5]
    assert steps(events[place:]) == [6]


def test_a_step_back_is_a_warning_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryObjectStore()
    note = CourseNote("back to step 3", {"action": "rollback", "code": CourseCode.HELD_OUT_KL_ABOVE_START, "step": 5})
    with rank_zero(store, monkeypatch) as listener:
        listener.on_course(note)

    (event,) = (event for event in said(store) if event.type == "course")
    assert (event.level, event.message) == ("warn", "back to step 3")
    assert event.data == {"action": "rollback", "code": "held_out_kl_above_start", "step": 5}


def test_a_measurement_is_a_metric_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryObjectStore()
    with rank_zero(store, monkeypatch) as listener:
        listener.on_step(step(1))
        listener.on_step(replace(step(2), held_out_kl=0.25))

    points = [point for event in said(store) if event.type == "metrics" for point in event.data["points"]]
    assert [point.get("held_out_kl") for point in points] == [None, 0.25]
