"""Events handed on while the store, or their receiver, fails."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from structlog.testing import capture_logs

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.errors import StorageError
from swiftkv_platform.jobs.attempt.tailing import following
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectInfo
from tests.fakes.attempt_store import FakeWorker
from tests.fakes.object_store import InMemoryObjectStore

REQUEST = AttemptRequest(job_id="job", attempt=1, spec=JobSpec(name="n"), run_id="run")


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkv_platform.jobs.attempt.tailing._INTERVAL_S", 0.01)


class FlakyStore(InMemoryObjectStore):
    """Fails as many listings as it is told to."""

    failures = 0

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        if self.failures > 0:
            self.failures -= 1
            raise StorageError("the store is away")
        return super().list(prefix, start_after=start_after)


class Listener:
    """Hears events, and fails at a message as often as there are errors for it."""

    def __init__(self, **errors: list[Exception]) -> None:
        self.heard: SimpleQueue[str] = SimpleQueue()
        self._errors = errors

    def __call__(self, event: AttemptEvent) -> None:
        if self._errors.get(event.message):
            raise self._errors[event.message].pop()
        self.heard.put(event.message)

    def everything(self) -> list[str]:
        return [self.heard.get() for _ in range(self.heard.qsize())]


def test_a_follower_outlives_a_listing_that_fails() -> None:
    store, listener = FlakyStore(), Listener()
    worker = FakeWorker(store, "job")
    with following(AttemptStore(store), REQUEST, listener):
        worker.say("message", "one")
        assert listener.heard.get() == "one"
        store.failures = 1
        for message in ("two", "three"):
            worker.say("message", message)
            assert listener.heard.get() == message


def test_an_event_that_could_not_be_passed_on_is_handed_on_again() -> None:
    store, listener = FlakyStore(), Listener(two=[StorageError("away"), StorageError("away")])
    worker = FakeWorker(store, "job")
    with following(AttemptStore(store), REQUEST, listener):
        for message in ("one", "two", "three"):
            worker.say("message", message)
        assert [listener.heard.get() for _ in range(3)] == ["one", "two", "three"]
    assert listener.everything() == []


def test_the_last_events_are_looked_for_more_than_once() -> None:
    store, listener = FlakyStore(), Listener()
    FakeWorker(store, "job").say("message", "one")
    store.failures = 2
    with following(AttemptStore(store), REQUEST, listener):
        pass
    assert listener.everything() == ["one"]


def test_a_store_that_stays_away_does_not_hold_up_the_end() -> None:
    store, listener = FlakyStore(), Listener()
    FakeWorker(store, "job").say("message", "one")
    store.failures = 10**9
    with capture_logs() as lines, following(AttemptStore(store), REQUEST, listener):
        pass
    assert listener.everything() == []
    assert lines[-1]["event"] == "events_not_followed"


def test_an_event_that_the_listener_cannot_handle_is_logged_and_passed_over() -> None:
    store, listener = FlakyStore(), Listener(one=[ValueError("no such figure")])
    worker = FakeWorker(store, "job")
    for message in ("one", "two"):
        worker.say("message", message)
    with capture_logs() as lines, following(AttemptStore(store), REQUEST, listener):
        pass
    assert listener.everything() == ["two"]
    (line,) = lines
    assert (line["event"], line["message"], line["exc_info"]) == ("event_not_handled", "one", True)
