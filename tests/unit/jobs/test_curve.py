"""The curve that an attempt leaves for its evaluation: thinned, kept over restarts, joined over attempts."""

from __future__ import annotations

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.errors import StorageError
from swiftkv_platform.jobs.attempt import curve
from swiftkv_platform.jobs.attempt.curve import Curve, read_curve
from tests.fakes.object_store import InMemoryObjectStore

FIRST, SECOND = AttemptId("job", 1), AttemptId("job", 2)


def draw(drawn: Curve, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        drawn.add({"step": step, "tokens": 10 * step, "loss": loss, "logits_loss": loss, "lr": 0.1, "mfu": 0.4})


def test_losses_are_kept_and_nothing_else() -> None:
    store = InMemoryObjectStore()
    drawn = Curve(store, FIRST)
    drawn.begin(0)
    draw(drawn, 1, 2)
    drawn.save()
    assert read_curve(store, [FIRST, SECOND]) == [
        {"step": step, "tokens": 10 * step, "loss": 1.0, "logits_loss": 1.0} for step in (1, 2)
    ]


def test_a_long_run_keeps_every_few_steps_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_MOST_POINTS", 8)
    store = InMemoryObjectStore()
    drawn = Curve(store, FIRST)
    draw(drawn, *range(1, 42))
    drawn.save()
    assert [point["step"] for point in read_curve(store, [FIRST])] == [8, 16, 24, 32, 40, 41]


def test_workers_that_start_again_go_on_from_their_checkpoint() -> None:
    store = InMemoryObjectStore()
    lost = Curve(store, FIRST)
    draw(lost, *range(1, 8), loss=1.0)
    lost.save()
    again = Curve(store, FIRST)
    again.begin(4)
    draw(again, 5, 6, loss=2.0)
    again.save()
    assert [(point["step"], point["loss"]) for point in read_curve(store, [FIRST])] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip


def test_steps_that_a_later_attempt_repeats_are_its_own() -> None:
    store = InMemoryObjectStore()
    for attempt, steps in ((FIRST, (1, 2, 3, 4)), (SECOND, (3, 4, 5))):
        drawn = Curve(store, attempt)
        draw(drawn, *steps, loss=float(attempt.number))
        drawn.save()
    points = read_curve(store, SECOND.so_far())
    assert [(point["step"], point["loss"]) for point in points] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


class AwayStore(InMemoryObjectStore):
    def get_bytes(self, key: str) -> bytes:
        raise StorageError("away")

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        raise StorageError("away")


def test_training_begins_and_goes_on_while_the_store_is_away() -> None:
    drawn = Curve(AwayStore(), FIRST)
    drawn.begin(4)
    draw(drawn, 5)
    drawn.save()
