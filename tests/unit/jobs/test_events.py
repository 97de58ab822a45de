"""Events of a process as the control plane reads them, and the curve that an attempt leaves for its evaluation."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
from structlog.testing import capture_logs

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.errors import ConflictError
from swiftkv_platform.jobs.attempt import tracking
from swiftkv_platform.jobs.attempt.events import EventReporter, MetricsBuffer, follow_events
from swiftkv_platform.jobs.attempt.tracking import LossCurve, read_loss_curve
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from tests.support.fakes.attempt_store import FakeWorker
from tests.unit.jobs.attempts import AWAY, HangingStore, points, request, said

FIRST, SECOND = AttemptId("job", 1), AttemptId("job", 2)


@pytest.fixture
def store() -> HangingStore:
    return HangingStore()


def point(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.0 / step}


@contextmanager
def metrics_buffer(store: ObjectStore, *, interval_s: float = 3600.0) -> Iterator[MetricsBuffer]:
    buffer = MetricsBuffer(EventReporter(store, FIRST, "rank0"), total_steps=9, interval_s=interval_s)
    try:
        yield buffer
    finally:
        buffer.close()


def test_a_restarted_process_has_a_name_of_its_own(store: HangingStore) -> None:
    for _ in range(2):
        EventReporter(store, FIRST, "rank0").send_message("hello")
    stored = AttemptStore(store).read_events(FIRST, {})
    assert [event.sequence for event in stored] == [1, 1]
    writers = {event.writer for event in stored}
    assert len(writers) == 2
    assert all(writer.startswith("rank0-") for writer in writers)


def test_threads_of_a_process_never_share_a_number(store: HangingStore) -> None:
    reporter = EventReporter(store, FIRST, "rank0")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(reporter.send_message, (str(number) for number in range(40))))
    stored = AttemptStore(store).read_events(FIRST, {})
    assert [event.sequence for event in stored] == list(range(1, 41))
    assert sorted(int(event.event.message) for event in stored) == list(range(40))


def test_points_are_told_without_a_flush_nor_another_step_once_the_store_is_back(store: HangingStore) -> None:
    with metrics_buffer(store, interval_s=0.01) as buffer:
        for step in (1, 2, 3):
            store.written.clear()
            store.error = AWAY
            buffer.add_point(point(step))
            buffer.flush()
            store.error = None
            store.written.wait()
            assert points(store) == [point(number) for number in range(1, step + 1)]


@pytest.mark.parametrize("error", [AWAY, ConflictError("came late"), RuntimeError("unheard of")])
def test_points_survive_an_outage_of_the_store(store: HangingStore, error: Exception) -> None:
    with capture_logs() as lines, metrics_buffer(store) as buffer:
        store.error = error
        for step in (1, 2):
            buffer.add_point(point(step))
            buffer.flush()
        store.error = None
        buffer.add_point(point(3))
    (event,) = said(store)
    assert event.data["points"] == [point(1), point(2), point(3)]
    assert {line["event"] for line in lines} == {"metrics_delayed"}


def test_the_end_tries_once_more_and_says_what_is_lost(store: HangingStore) -> None:
    store.error = AWAY
    with capture_logs() as lines, metrics_buffer(store) as buffer:
        buffer.add_point(point(1))
    assert lines[-1] == {"event": "metrics_lost", "num_points": 1, "log_level": "error"}
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    buffer.flush()
    buffer.close()


class Listener:
    """Records events; for a message with errors, each call raises one of them until none is left."""

    def __init__(self, **errors: list[Exception]) -> None:
        self.heard: SimpleQueue[str] = SimpleQueue()
        self._errors = errors

    def __call__(self, event: AttemptEvent) -> None:
        if self._errors.get(event.message):
            raise self._errors[event.message].pop()
        self.heard.put(event.message)

    def everything(self) -> list[str]:
        return [self.heard.get() for _ in range(self.heard.qsize())]


@contextmanager
def tailing(store: HangingStore, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Hand the first attempt's events on until the block ends; yields what is logged."""
    monkeypatch.setattr("swiftkv_platform.jobs.attempt.events._EVENT_POLL_INTERVAL_S", 0.01)
    with capture_logs() as lines, follow_events(AttemptStore(store), request(), listener):
        yield lines


def test_an_event_that_could_not_be_listed_or_passed_on_is_handed_on_again(
    store: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, listener = FakeWorker(store, "job"), Listener(two=[AWAY, AWAY])
    with tailing(store, listener, monkeypatch):
        for message, failing in (("one", 0), ("two", 1), ("three", 0)):
            store.failing_lists = failing
            worker.say("message", message)
            assert listener.heard.get() == message
    assert listener.everything() == []


@pytest.mark.parametrize(
    ("failing_lists", "errors", "heard", "logged"),
    [
        (2, {}, ["one", "two"], None),
        (10**9, {}, [], "event_forwarding_failed"),
        (0, {"one": [ValueError("no such figure")]}, ["two"], "event_handler_failed"),
    ],
)
def test_the_last_events_are_looked_for_more_than_once_and_nothing_holds_up_the_end(
    store: HangingStore,
    monkeypatch: pytest.MonkeyPatch,
    failing_lists: int,
    errors: dict[str, list[Exception]],
    heard: list[str],
    logged: str | None,
) -> None:
    worker, listener = FakeWorker(store, "job"), Listener(**errors)
    for message in ("one", "two"):
        worker.say("message", message)
    store.failing_lists = failing_lists
    with tailing(store, listener, monkeypatch) as lines:
        pass
    assert listener.everything() == heard
    assert logged is None or lines[-1]["event"] == logged
    if logged == "event_handler_failed":
        assert [(line["message"], line["exc_info"]) for line in lines] == [("one", True)]


def draw(drawn: LossCurve, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        drawn.add_point({"step": step, "tokens": 10 * step, "loss": loss, "logits_loss": loss, "lr": 0.1, "mfu": 0.4})
    drawn.save()


def test_a_long_run_keeps_losses_of_every_few_steps_and_the_last(
    store: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_MAX_LOSS_CURVE_POINTS", 8)
    draw(LossCurve(store, FIRST), *range(1, 42))
    kept = [{"step": step, "tokens": 10 * step, "loss": 1.0, "logits_loss": 1.0} for step in (8, 16, 24, 32, 40, 41)]
    assert read_loss_curve(store, [FIRST, SECOND]) == kept


def test_steps_that_are_made_again_are_the_later_ones(store: HangingStore) -> None:
    """A step repeated by restarted workers or by a later attempt has its last loss in the curve."""
    draw(LossCurve(store, FIRST), *range(1, 8), loss=1.0)
    again = LossCurve(store, FIRST)
    again.resume(4)
    draw(again, 5, 6, loss=2.0)
    draw(LossCurve(store, SECOND), 6, 7, loss=3.0)
    losses = [(each["step"], each["loss"]) for each in read_loss_curve(store, SECOND.list_attempts_so_far())]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 3.0), (7, 3.0)]


def test_training_begins_and_goes_on_while_the_store_is_away(
    store: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> Any:
        raise AWAY

    for method in ("get_bytes", "put_bytes"):
        monkeypatch.setattr(store, method, away)
    drawn = LossCurve(store, FIRST)
    drawn.resume(4)
    draw(drawn, 5)
