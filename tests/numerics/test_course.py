"""Runs that are steered by their held-out KL: measurements, steps back, and that a run cut anywhere goes on as if it
had not been.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.reasons import CourseCode
from swiftkv_platform.distillation.checkpoint import TrainedTensors
from swiftkv_platform.distillation.micro_batches import HeldOut
from swiftkv_platform.planning.steering import RunSchedule
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import publish_directory, read_manifest
from tests.numerics.distillation_worker import Outcome, Run, group_of_one, run, run_spawned

RUINOUS = {"learning_rate": 0.5, "warmup_ratio": 0.0, "schedule": "constant"}
"""A rate that raises the held-out KL within a step."""
EVERY_STEP = {"validation": {"every_steps": 1}, "max_steps": 8}
STRATEGIES = ("ddp", "fsdp2")


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


def _run(tmp_path: Path, name: str, *, training: dict[str, Any], **changes: Any) -> Outcome:
    spec = {"training": {**EVERY_STEP, **training}, **changes.pop("spec", {})}
    return run(Run(store=str(tmp_path / name), held_out=True, spec=spec, **changes))


def _kls(outcome: Outcome) -> list[float]:
    return [metrics.held_out_kl for metrics in outcome.steps if metrics.held_out_kl is not None]


def _checkpoints(tmp_path: Path, name: str) -> list[Path]:
    return sorted((tmp_path / name / AttemptId("j", 1).checkpoints_prefix).iterdir())


def _actions(outcome: Outcome) -> list[tuple[str, CourseCode]]:
    return [(note.data["action"], note.data["code"]) for note in outcome.notes]


def _assert_equal(actual: Outcome, expected: Outcome) -> None:
    for name, tensor in expected.trained.items():
        assert actual.trained[name].equal(tensor), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_measuring_changes_nothing_of_a_run_that_goes_well(tmp_path: Path, strategy: str) -> None:
    spec = {"sharding": {"strategy": strategy}}
    measured = _run(tmp_path, "measured", training={"keep_best": False}, spec=spec)
    plain = run(Run(store=str(tmp_path / "plain"), spec={"training": {"max_steps": 8}, **spec}))

    assert len(_kls(measured)) == 8
    assert all(later < earlier for earlier, later in pairwise(_kls(measured)))
    assert _actions(measured) == [("end", CourseCode.LAST_STEP)]
    _assert_same_rates(measured, plain)
    _assert_equal(measured, plain)


def _assert_same_rates(one: Outcome, other: Outcome) -> None:
    assert [metrics.lr for metrics in one.steps] == [metrics.lr for metrics in other.steps]


@pytest.mark.parametrize("trainable", ["qkv", "tail", "all"])
def test_every_strategy_measures_the_same(tmp_path: Path, trainable: str) -> None:
    spec = {"distillation": {"trainable": trainable}}
    ddp, fsdp2 = (
        _kls(_run(tmp_path, strategy, training={}, spec={**spec, "sharding": {"strategy": strategy}}))
        for strategy in STRATEGIES
    )
    assert fsdp2 == pytest.approx(ddp, rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_ruinous_rate_ends_no_worse_than_the_start(tmp_path: Path, strategy: str, optimizer: str) -> None:
    spec = {"optimizer": {**RUINOUS, "name": optimizer}, "sharding": {"strategy": strategy}}
    outcome = _run(tmp_path, "s", training={"guard": {"max_rollbacks": 2}}, spec=spec)

    *rollbacks, end = outcome.notes
    assert [note.data["action"] for note in rollbacks] == ["rollback"] * len(rollbacks)
    assert rollbacks[0].data["code"] is CourseCode.HELD_OUT_KL_ABOVE_START
    assert rollbacks[0].data["learning_rate"] == pytest.approx(0.25)
    assert end.data["action"] == "end"
    assert end.data["chosen_step"] == end.data["best_step"]
    assert end.data["best_kl"] <= end.data["start_kl"]


def test_going_back_restores_the_state_and_halves_the_rate(tmp_path: Path) -> None:
    """With no step left to go on with, what remains is the start, to the bit."""
    untrained = _run(tmp_path, "none", training={"max_steps": 1}, spec={"optimizer": {"learning_rate": 1e-30}})
    outcome = _run(
        tmp_path, "s", training={"guard": {"max_rollbacks": 0}}, spec={"optimizer": {**RUINOUS, "weight_decay": 0.0}}
    )

    assert _actions(outcome) == [
        ("rollback", CourseCode.HELD_OUT_KL_ABOVE_START),
        ("end", CourseCode.ROLLBACKS_EXHAUSTED),
    ]
    assert len(outcome.steps) == 1
    _assert_equal(outcome, untrained)
    assert [path.name[:13] for path in _checkpoints(tmp_path, "s")] == ["step-00000000", "step-00000001"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_a_run_resumed_across_a_step_back_equals_an_uninterrupted_one(
    tmp_path: Path, strategy: str, stop_after: int
) -> None:
    spec = {"optimizer": RUINOUS, "sharding": {"strategy": strategy}, "checkpoint": {"every_steps": 3}}
    whole = _run(tmp_path, "whole", training={}, spec=spec)
    first = _run(tmp_path, "cut", training={}, spec=spec, stop_after=stop_after)
    second = _run(tmp_path, "cut", training={}, spec=spec)

    assert ("rollback", CourseCode.HELD_OUT_KL_ABOVE_START) in _actions(whole)
    assert len(first.steps) == stop_after
    assert second.notes[-1] == whole.notes[-1]
    _assert_equal(second, whole)


def test_a_loss_that_is_not_finite_goes_back_as_well(tmp_path: Path) -> None:
    spec = {"optimizer": {**RUINOUS, "learning_rate": 1e30}}
    outcome = _run(
        tmp_path, "s", training={"guard": {"rate_factor": 1e-33}, "validation": {"every_steps": 5}}, spec=spec
    )

    assert _actions(outcome)[0] == ("rollback", CourseCode.LOSS_NOT_FINITE)
    assert _actions(outcome)[-1] == ("end", CourseCode.LAST_STEP)
    assert outcome.notes[-1].data["best_kl"] <= outcome.notes[-1].data["start_kl"]


def test_training_stops_early_and_keeps_the_best(tmp_path: Path) -> None:
    training = {"early_stopping": {"patience": 2, "min_delta": 10.0}, "max_steps": 8}
    outcome = _run(tmp_path, "s", training=training)
    again = _run(tmp_path, "s", training=training)

    assert [metrics.step for metrics in outcome.steps] == [1, 2]
    assert _actions(outcome) == [("end", CourseCode.EARLY_STOPPING)]
    assert outcome.notes[-1].data["chosen_step"] == 2
    assert again.steps == []


def test_the_best_state_outlives_newer_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([0.5, 0.4, 0.3, 0.35, 0.32, 0.31])
    spec = {
        "optimizer": {"schedule": "constant", "warmup_ratio": 0.0},
        "checkpoint": {"every_steps": 1, "keep": 1},
    }
    with monkeypatch.context() as scripted:
        scripted.setattr(HeldOut, "measure", lambda _: next(figures))
        outcome = _run(tmp_path, "s", training={"max_steps": 5}, spec=spec)
    until_best = _run(tmp_path, "b", training={"max_steps": 2}, spec=spec)

    assert outcome.notes[-1].data["chosen_step"] == 2
    assert [path.name[:13] for path in _checkpoints(tmp_path, "s")] == ["step-00000002", "step-00000005"]
    kept = TrainedTensors(_checkpoints(tmp_path, "s")[0])
    for name, tensor in until_best.trained.items():
        assert kept[name].equal(tensor), name


@pytest.mark.parametrize(
    ("checkpoint", "saved", "chosen"),
    [
        ({"every_steps": 4}, [0, 1, 2, 3, 4, 5, 6], 5),
        ({"every_steps": 4, "best_every_steps": 3}, [0, 3, 4, 6], 4),
        ({"every_steps": 100, "best_every_steps": 5}, [0, 5, 6], 5),
    ],
)
def test_bests_are_saved_as_often_as_the_spec_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, Any], saved: list[int], chosen: int
) -> None:
    """Held-out KL falls with every measurement but the last; a run that is cut saves what an uninterrupted one does."""
    training, spec = {"max_steps": 6}, {"checkpoint": {"keep": 9, **checkpoint}}
    kls = [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.31]
    figures = iter(kls)
    monkeypatch.setattr(HeldOut, "measure", lambda _: next(figures))
    outcome = _run(tmp_path, "s", training=training, spec=spec)
    assert [int(path.name[5:13]) for path in _checkpoints(tmp_path, "s")] == saved
    assert outcome.notes[-1].data["chosen_step"] == chosen
    job = JobSpec.model_validate({"name": "j", **spec, "training": {**EVERY_STEP, **training, "batch_size": 8}})
    assert RunSchedule.of(job, 6).num_saves >= len(saved)

    figures = iter(kls)
    _run(tmp_path, "cut", training=training, spec=spec, stop_after=2)  # before step 2 is saved
    figures = iter(kls[max(step for step in saved if step < 2) + 1 :])
    again = _run(tmp_path, "cut", training=training, spec=spec)
    assert [int(path.name[5:13]) for path in _checkpoints(tmp_path, "cut")] == saved
    assert again.notes[-1] == outcome.notes[-1]


SEARCHED = {"learning_rate": 1.0, "rate_search": True, "warmup_ratio": 0.1}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("trainable", "optimizer"), [("qkv", "adamw"), ("all", "adamw"), ("all", "muon")])
def test_a_searched_rate_trains_as_if_it_had_been_given(
    tmp_path: Path, strategy: str, trainable: str, optimizer: str
) -> None:
    training = {"max_steps": 160, "validation": {"every_steps": 1000}}
    shared: dict[str, Any] = {"sharding": {"strategy": strategy}, "distillation": {"trainable": trainable}}
    searched = _run(
        tmp_path, "s", training=training, spec={**shared, "optimizer": {**SEARCHED, "name": optimizer}}, stop_after=3
    )
    (note,) = searched.notes
    rate = note.data["learning_rate"]
    optimizer_given = {"learning_rate": rate, "warmup_ratio": 0.1, "name": optimizer}
    given = _run(tmp_path, "g", training=training, spec={**shared, "optimizer": optimizer_given}, stop_after=3)

    assert note.data["code"] is CourseCode.RATE_SEARCHED
    assert 2 <= len(note.data["tried"]) <= 4
    assert rate in [tried["learning_rate"] for tried in note.data["tried"]]
    _assert_same_rates(searched, given)
    _assert_equal(searched, given)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_does_not_search_again(tmp_path: Path, strategy: str) -> None:
    training = {"max_steps": 160, "validation": {"every_steps": 1000}}
    spec = {"optimizer": SEARCHED, "sharding": {"strategy": strategy}}
    whole = _run(tmp_path, "whole", training=training, spec=spec, stop_after=6)
    _run(tmp_path, "cut", training=training, spec=spec, stop_after=5)
    second = _run(tmp_path, "cut", training=training, spec=spec, stop_after=6)

    assert len(whole.notes) == 1
    assert second.notes == []
    assert [metrics.step for metrics in second.steps] == [5, 6]
    _assert_equal(second, whole)


TWO_WORKERS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp2"},
    *({"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)),
]


@pytest.mark.slow  # two processes, which load DeepSpeed
def test_every_strategy_steers_two_workers_alike(tmp_path: Path) -> None:
    """Measurements, searched rates, and the start that training comes back to."""
    shared: dict[str, Any] = {"resources": {"num_workers": 2}, "distillation": {"trainable": "all"}}
    ruined = {"optimizer": {**RUINOUS, "weight_decay": 0.0}, "training": {**EVERY_STEP, "guard": {"max_rollbacks": 0}}}
    searched = {"optimizer": SEARCHED, "training": {"max_steps": 160, "validation": {"every_steps": 2}}}
    scenarios = [
        Run(
            store=str(tmp_path / f"{number}-{name}"),
            held_out=True,
            stop_after=4 if name == "searched" else None,
            spec={**shared, **sections, "sharding": sharding},
        )
        for number, sharding in enumerate(TWO_WORKERS)
        for name, sections in (("ruined", ruined), ("searched", searched))
    ]
    outcomes = run_spawned(scenarios, 2, tmp_path)
    for number, outcome in enumerate(outcomes):
        expected = outcomes[number % 2]
        assert _actions(outcome) == _actions(expected)
        assert _kls(outcome) == pytest.approx(_kls(expected), rel=1e-3)
        for note, other in zip(outcome.notes, expected.notes, strict=True):
            assert note.data["learning_rate"] == pytest.approx(other.data["learning_rate"], rel=1e-3)
    for ruined_outcome in outcomes[2::2]:
        _assert_close(ruined_outcome, outcomes[0])


def _assert_close(actual: Outcome, expected: Outcome) -> None:
    for name, tensor in expected.trained.items():
        torch.testing.assert_close(actual.trained[name], tensor, msg=name)


def test_a_checkpoint_of_a_version_before_goes_on_as_it_did(tmp_path: Path) -> None:
    """It has no course: the spec's rate and its warm-up hold, and held-out KL is measured from there."""
    whole = run(Run(store=str(tmp_path / "whole"), spec={"training": {"max_steps": 6}}))
    run(Run(store=str(tmp_path / "cut"), spec={"training": {"max_steps": 6}}, stop_after=3))
    for directory in _checkpoints(tmp_path, "cut"):
        _remove_course(directory, tmp_path / directory.name)
    second = _run(tmp_path, "cut", training={"max_steps": 6, "keep_best": False})

    assert [metrics.step for metrics in second.steps] == [3, 4, 5, 6]
    assert len(_kls(second)) == 4
    _assert_equal(second, whole)


def _remove_course(directory: Path, scratch: Path) -> None:
    """Write a checkpoint again without its course, as it was before there was one."""
    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    kept: dict[str, torch.Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("progress.course.")
    }
    load(kept, storage_reader=FileSystemReader(directory))
    save(kept, storage_writer=FileSystemWriter(scratch))
    store = open_store(str(directory.parent))
    lineage = read_manifest(store, directory.name).lineage
    shutil.rmtree(directory)
    publish_directory(store, scratch, directory.name, kind="checkpoint", lineage=lineage, metrics={})
