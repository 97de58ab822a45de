"""Runs steered by their held-out KL: measurements, rollbacks, and that an interrupted run resumes as if it had not been
interrupted."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.events import SteeringReason
from swiftkv_platform.distillation.trainer import ValidationSet
from tests.numerics.distillation_worker import CHECKPOINTS, Outcome, Run, assert_equal_weights, run

RUINOUS = {"learning_rate": 0.5, "warmup_ratio": 0.0, "schedule": "constant"}
"""Optimizer settings with a rate so high that one step raises the held-out KL."""
EVERY_STEP = {"validation": {"every_steps": 1}, "max_steps": 8}
SEARCHED = {"learning_rate": 1.0, "rate_search": True, "warmup_ratio": 0.1}
STRATEGIES = ("ddp", "fsdp2")
pytestmark = pytest.mark.usefixtures("process_group")
wide = pytest.mark.soak("every strategy with every choice")


def _run(tmp_path: Path, name: str, *, training: dict[str, Any], **changes: Any) -> Outcome:
    spec = {"training": {**EVERY_STEP, **training}, **changes.pop("spec", {})}
    return run(Run(store=str(tmp_path / name), held_out=True, spec=spec, **changes))


def kls(outcome: Outcome) -> list[float]:
    return [metrics.held_out_kl for metrics in outcome.steps if metrics.held_out_kl is not None]


def _checkpoints(tmp_path: Path, name: str) -> list[Path]:
    return sorted((tmp_path / name / CHECKPOINTS).iterdir())


def actions(outcome: Outcome) -> list[tuple[str, SteeringReason]]:
    return [(note.data["action"], note.data["code"]) for note in outcome.notes]


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=wide), "fsdp2"])
def test_measuring_changes_nothing_of_a_run_that_goes_well(tmp_path: Path, strategy: str) -> None:
    spec = {"sharding": {"strategy": strategy}}
    measured = _run(tmp_path, "measured", training={"keep_best": False, "max_steps": 4}, spec=spec)
    plain = run(Run(store=str(tmp_path / "plain"), spec={"training": {"max_steps": 4}, **spec}))
    assert len(kls(measured)) == 4
    assert all(later < earlier for earlier, later in pairwise(kls(measured)))
    assert actions(measured) == [("end", SteeringReason.LAST_STEP)]
    _assert_same_rates(measured, plain)
    assert_equal_weights(measured, plain)


def _assert_same_rates(one: Outcome, other: Outcome) -> None:
    assert [metrics.lr for metrics in one.steps] == [metrics.lr for metrics in other.steps]


def test_going_back_restores_the_state_and_halves_the_rate(tmp_path: Path) -> None:
    """With no rollbacks allowed, the run ends and leaves the start, bit for bit."""
    untrained = _run(tmp_path, "none", training={"max_steps": 1}, spec={"optimizer": {"learning_rate": 1e-30}})
    outcome = _run(
        tmp_path, "s", training={"guard": {"max_rollbacks": 0}}, spec={"optimizer": {**RUINOUS, "weight_decay": 0.0}}
    )
    assert actions(outcome) == [
        ("rollback", SteeringReason.HELD_OUT_KL_ABOVE_START),
        ("end", SteeringReason.ROLLBACKS_EXHAUSTED),
    ]
    assert len(outcome.steps) == 1
    assert_equal_weights(outcome, untrained)
    assert [path.name[:13] for path in _checkpoints(tmp_path, "s")] == ["step-00000000", "step-00000001"]


@pytest.mark.parametrize(("strategy", "stop_after"), [pytest.param("ddp", 1, marks=wide), ("fsdp2", 2), ("ddp", 4)])
def test_a_run_resumed_across_a_step_back_equals_a_whole_one(tmp_path: Path, strategy: str, stop_after: int) -> None:
    spec = {"optimizer": RUINOUS, "sharding": {"strategy": strategy}, "checkpoint": {"every_steps": 3}}
    whole = _run(tmp_path, "whole", training={}, spec=spec)
    first = _run(tmp_path, "cut", training={}, spec=spec, stop_after=stop_after)
    second = _run(tmp_path, "cut", training={}, spec=spec)
    assert ("rollback", SteeringReason.HELD_OUT_KL_ABOVE_START) in actions(whole)
    assert len(first.steps) == stop_after
    assert second.notes[-1] == whole.notes[-1]
    assert_equal_weights(second, whole)


def test_a_loss_that_is_not_finite_goes_back_as_well(tmp_path: Path) -> None:
    spec = {"optimizer": {**RUINOUS, "learning_rate": 1e30}}
    outcome = _run(
        tmp_path, "s", training={"guard": {"rate_factor": 1e-33}, "validation": {"every_steps": 5}}, spec=spec
    )
    assert actions(outcome)[0] == ("rollback", SteeringReason.LOSS_NOT_FINITE)
    assert actions(outcome)[-1] == ("end", SteeringReason.LAST_STEP)
    assert outcome.notes[-1].data["best_kl"] <= outcome.notes[-1].data["start_kl"]


@pytest.mark.parametrize(
    ("checkpoint", "saved", "chosen"),
    [
        pytest.param({"every_steps": 4}, [0, 1, 2, 3, 4, 5, 6], 5, marks=wide),
        ({"every_steps": 4, "best_every_steps": 3}, [0, 3, 4, 6], 4),
        ({"every_steps": 100, "best_every_steps": 5}, [0, 5, 6], 5),
    ],
)
def test_bests_are_saved_as_often_as_the_spec_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, Any], saved: list[int], chosen: int
) -> None:
    """Held-out KL falls at every measurement but the last; an interrupted run saves the same steps as a whole one."""
    training, spec = {"max_steps": 6}, {"checkpoint": {"keep": 9, **checkpoint}}
    kls = [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.31]
    figures = iter(kls)
    monkeypatch.setattr(ValidationSet, "measure_kl", lambda _: next(figures))
    outcome = _run(tmp_path, "s", training=training, spec=spec)
    assert [int(path.name[5:13]) for path in _checkpoints(tmp_path, "s")] == saved
    assert outcome.notes[-1].data["chosen_step"] == chosen
    figures = iter(kls)
    _run(tmp_path, "cut", training=training, spec=spec, stop_after=2)  # before step 2 is saved
    figures = iter(kls[max(step for step in saved if step < 2) + 1 :])
    again = _run(tmp_path, "cut", training=training, spec=spec)
    assert [int(path.name[5:13]) for path in _checkpoints(tmp_path, "cut")] == saved
    assert again.notes[-1] == outcome.notes[-1]


@pytest.mark.parametrize(
    ("strategy", "trainable", "optimizer"),
    [
        ("fsdp2", "qkv", "adamw"),
        pytest.param("ddp", "all", "muon", marks=wide),
        pytest.param("ddp", "qkv", "adamw", marks=wide),
        pytest.param("ddp", "all", "adamw", marks=wide),
        pytest.param("fsdp2", "all", "adamw", marks=wide),
        pytest.param("fsdp2", "all", "muon", marks=wide),
    ],
)
def test_a_searched_rate_trains_as_one_given(tmp_path: Path, strategy: str, trainable: str, optimizer: str) -> None:
    def train(name: str, **options: Any) -> Outcome:
        spec = {"sharding": {"strategy": strategy}, "distillation": {"trainable": trainable}}
        spec["optimizer"] = {"name": optimizer, "warmup_ratio": 0.1, **options}
        training = {"max_steps": 160, "validation": {"every_steps": 1000}}
        return _run(tmp_path, name, training=training, spec=spec, stop_after=3)

    searched = train("s", **SEARCHED)
    (note,) = searched.notes
    rate = note.data["learning_rate"]
    given = train("g", learning_rate=rate)
    assert note.data["code"] is SteeringReason.RATE_SEARCHED
    assert 2 <= len(note.data["tried"]) <= 4
    assert rate in [tried["learning_rate"] for tried in note.data["tried"]]
    _assert_same_rates(searched, given)
    assert_equal_weights(searched, given)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=wide)])
def test_a_resumed_run_does_not_search_again(tmp_path: Path, strategy: str) -> None:
    training = {"max_steps": 160, "validation": {"every_steps": 1000}}
    spec = {"optimizer": SEARCHED, "sharding": {"strategy": strategy}}
    whole = _run(tmp_path, "whole", training=training, spec=spec, stop_after=6)
    _run(tmp_path, "cut", training=training, spec=spec, stop_after=5)
    second = _run(tmp_path, "cut", training=training, spec=spec, stop_after=6)
    assert len(whole.notes) == 1
    assert second.notes == []
    assert [metrics.step for metrics in second.steps] == [5, 6]
    assert_equal_weights(second, whole)
