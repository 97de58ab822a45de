"""One run under every sharding strategy: the same losses, and checkpoints that any other strategy can resume from.

In the soak each strategy takes 20 steps at 1 and 2 workers with micro batches of 1 and 4; otherwise four of them take 4
with 2 workers.
"""

import os
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.distillation.partial_reads import CheckpointTensors
from tests.numerics.distillation_worker import (
    CHECKPOINTS,
    NUM_KEY_VALUE_LAYERS,
    Outcome,
    Run,
    assert_equal_weights,
    group_of_one,
    run,
    run_spawned,
    tiny_teacher,
)
from tests.numerics.test_validation_set import EVERY_STEP, RUINOUS, SEARCHED, actions, kls

SOAK = "SWIFTKV_SOAK" in os.environ
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow("every strategy is trained once, before the first test")]
in_soak = pytest.mark.soak("the whole matrix of strategies")

SHARDINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    **{f"zero{stage}": {"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
    **{f"zero{n}-offload": {"strategy": "deepspeed", "zero_stage": n, "cpu_offload": True} for n in (2, 3)},
}
STRATEGIES = ("ddp", "fsdp2", "zero3")
"""One strategy of each library; the ZeRO stages that hold weights whole restore as DDP does."""
TRAINED = tuple(SHARDINGS) if SOAK else (*STRATEGIES, "zero2")
CUTS = tuple(product((1, 2), (1, 4))) if SOAK else ((2, 2),)
"""Number of workers and micro-batch size; the last combination is resumed."""
WORKERS, MICRO_BATCH = CUTS[-1]
HANDOVERS = (("zero3", "fsdp2", 1), ("zero1", "ddp", 1), ("fsdp2", "zero3", 2), ("ddp", "zero2-offload", 2))
"""First sharding, the sharding that resumes its checkpoint, and the latter's number of workers."""
ALL_LAYERS = (("ddp", "zero3"), ("zero3", "ddp"), ("zero3", "fsdp2"))
"""First sharding when all layers are trained, and the sharding that resumes its checkpoint."""
NUM_STEPS = 20 if SOAK else 4
MIDDLE = NUM_STEPS // 2
IN_THE_MIDDLE = f"{CHECKPOINTS}/step-{MIDDLE:08d}*"


def some(first: Any, others: Any) -> list[Any]:
    """Parametrize over `others`; all but those in `first` run only in the soak."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=[] if one in first else in_soak)
        for one in others
    ]


def _scenarios(path: Path) -> dict[tuple[int, str], Run]:
    """Return the runs by number of workers and name; a run's checkpoints are in a directory of that name."""
    runs: dict[tuple[int, str], Run] = {}

    def add(name: str, sharding: str, sections: Any = (), *, after: str | None = None, **changes: Any) -> None:
        workers, size = changes.pop("cut", CUTS[-1])
        spec: dict[str, dict[str, Any]] = {
            "sharding": SHARDINGS[sharding],
            "resources": {"num_workers": workers},
            "training": {"batch_size": 8, "micro_batch_size": size, "max_steps": NUM_STEPS},
            "checkpoint": {"every_steps": MIDDLE},
        }
        spec |= {key: spec.get(key, {}) | values for key, values in dict(sections).items()}
        if after is not None:  # repeats the second half
            changes |= {"attempt": 2 + len(runs), "resume_from": IN_THE_MIDDLE}
        options = {"early_exit": True, "spec": spec, **changes}
        runs[workers, name] = Run(store=str(path / (after or name)), **options)

    tiny_teacher().save_pretrained(path / "teacher")
    add("reference", "ddp", cut=(1, 1))
    odd = {"training": {"batch_size": 7, "micro_batch_size": 1}, "resources": {"num_workers": 1}}
    for workers in (1, 2):
        add("uneven" if workers == 2 else "uneven-alone", "ddp", odd, cut=(workers, 1))
    for sharding, cut in product(TRAINED, CUTS):
        lazily = {"teacher": str(path / "teacher")} if sharding in ("fsdp2", "zero3") else {}
        add(f"{sharding}-{cut[0]}-{cut[1]}", sharding, cut=cut, **lazily)
    whole = f"-{WORKERS}-{MICRO_BATCH}"
    for sharding in SHARDINGS if SOAK else STRATEGIES:
        add(f"{sharding}-resumed", sharding, after=sharding + whole)
    for began, then, workers in HANDOVERS if SOAK else HANDOVERS[:1]:
        add(f"{began}-to-{then}", then, after=began + whole, cut=(workers, MICRO_BATCH))
    for sharding in list(SHARDINGS)[:5] if SOAK else ("ddp", "fsdp2"):
        sections = {"model": {"dtype": "bfloat16"}, "distillation": {"hidden_loss_weight": 1.0}}
        add(f"{sharding}-bfloat16", sharding, {**sections, "training": {"gradient_checkpointing": sharding != "ddp"}})
        muon = {"optimizer": {"name": "muon", "learning_rate": 1e-2, "warmup_ratio": 0.25}}
        if sharding in ("ddp", "fsdp2"):
            add(f"{sharding}-muon", sharding, muon)
            if SOAK:
                add(f"{sharding}-muon-resumed", sharding, muon, after=f"{sharding}-muon")
    for family, trainable, sharding in LAYERS if SOAK else LAYERS[:1]:
        for each in {sharding, "ddp"}:
            sections = {"distillation": {"trainable": trainable}}
            add(f"{family}-{trainable}-{each}", each, sections, family=None if family == "llama" else family)
    for sharding in STRATEGIES if SOAK else STRATEGIES[:2]:
        own = {"decode_key_value": "own", "prefill_layers": [NUM_KEY_VALUE_LAYERS - 1], "early_exit": False}
        add(f"{sharding}-own", sharding, **own)
        if sharding == "fsdp2" or SOAK:
            add(f"{sharding}-own-resumed", sharding, after=f"{sharding}-own", **own)
    for began, then in ALL_LAYERS if SOAK else ():
        sections = {"distillation": {"trainable": "all"}}
        add(f"llama-all-{began}-to-{then}", then, sections, after=f"llama-all-{began}")
    for sharding in SHARDINGS if SOAK else STRATEGIES[:2]:
        training = {"batch_size": 4, "micro_batch_size": 1, "seed": 1, "from": "job_a:2"}
        constant = {"warmup_ratio": 0.0, "schedule": "constant"}
        for kept, steps in ((False, 1), (True, 1), (False, 0)):
            continued = {"training": {**training, "load_optimizer_state": kept, "max_steps": steps}}
            parent = str(path / f"ddp{whole}" / IN_THE_MIDDLE)
            name = f"{sharding}-{'kept' if kept else 'fresh'}-{steps}"
            add(name, sharding, {**continued, "optimizer": constant}, parent=parent)
    small = {"training": {"batch_size": 4, "micro_batch_size": 1}, "distillation": {"trainable": "all"}}
    ruined = {"optimizer": {**RUINOUS, "weight_decay": 0.0}}
    ruined["training"] = small["training"] | EVERY_STEP | {"guard": {"max_rollbacks": 0}}
    searched: dict[str, Any] = {"optimizer": SEARCHED}
    searched["training"] = small["training"] | {"max_steps": 160, "validation": {"every_steps": 2}}
    steered = {"early_exit": False, "held_out": True}
    for sharding in list(SHARDINGS)[:5] if SOAK else STRATEGIES[:2]:
        add(f"{sharding}-ruined", sharding, small | ruined, **steered)
        if SOAK:
            add(f"{sharding}-searched", sharding, small | searched, **steered, stop_after=4)
    return runs


LAYERS = [("qwen3", "all", "fsdp2"), ("qwen3", "qkv", "fsdp2")]
LAYERS += [one for one in product(("llama", "qwen3"), ("tail", "all"), ("fsdp2", "zero3")) if one not in LAYERS]
"""Family, trained layers, and sharding. Qwen3's key norm runs apart from its layer, and in the teacher's too."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def outcomes(path: Path) -> dict[str, Outcome]:
    """Outcomes of all runs, with one process group per number of workers: starting one costs more than a run."""
    runs = _scenarios(path)
    together, alone = ([one for (workers, _), one in runs.items() if workers == number] for number in (2, 1))
    found = {2: run_spawned(together, 2, path)}
    with group_of_one(path) if not SOAK else nullcontext():  # DeepSpeed would not let go of this process
        found[1] = run_spawned(alone, 1, path) if SOAK else [run(scenario) for scenario in alone]
    return {name: found[workers].pop(0) for workers, name in runs}


def _assert_same_losses(actual: Outcome, expected: Outcome, *, since: int = 0) -> None:
    assert [m.step for m in actual.steps] == [m.step for m in expected.steps[since:]]
    for mine, other in zip(actual.steps, expected.steps[since:], strict=True):
        assert mine.tokens == other.tokens
        assert mine.losses == pytest.approx(other.losses, rel=1e-4, abs=1e-4)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


def _assert_resumed(resumed: Outcome, whole: Outcome) -> None:
    assert [m.step for m in resumed.steps] == list(range(MIDDLE + 1, NUM_STEPS + 1))
    assert_equal_weights(resumed, whole)


@pytest.mark.parametrize("sharding", some(["fsdp2"], STRATEGIES[1:]))
def test_students_that_keep_their_own_are_sharded_alike(outcomes: dict[str, Outcome], sharding: str) -> None:
    _assert_same_losses(outcomes[f"{sharding}-own"], outcomes["ddp-own"])
    if sharding == "fsdp2" or SOAK:
        _assert_resumed(outcomes[f"{sharding}-own-resumed"], outcomes[f"{sharding}-own"])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("sharding", some(TRAINED, SHARDINGS))
def test_losses_agree(outcomes: dict[str, Outcome], sharding: str, cut: tuple[int, int]) -> None:
    outcome, reference = outcomes[f"{sharding}-{cut[0]}-{cut[1]}"], outcomes["reference"]
    assert len(outcome.steps) == NUM_STEPS
    _assert_same_losses(outcome, reference)
    assert outcome.frozen_changed == []
    assert reference.steps[-1].losses["loss"] < 0.9 * reference.steps[0].losses["loss"]
    if sharding in ("fsdp2", "zero3") and cut[0] == 2:
        # Half of the model, and the module that is being read: here the vocabulary's weights are the largest.
        assert outcome.largest_share < 0.7


@pytest.mark.parametrize("sharding", some(STRATEGIES, SHARDINGS))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(outcomes: dict[str, Outcome], sharding: str) -> None:
    _assert_resumed(outcomes[f"{sharding}-resumed"], outcomes[f"{sharding}-{WORKERS}-{MICRO_BATCH}"])


@pytest.mark.parametrize(("began", "after", "workers"), some(HANDOVERS[:1], HANDOVERS))
def test_another_strategy_takes_over(outcomes: dict[str, Outcome], began: str, after: str, workers: int) -> None:
    second, whole = outcomes[f"{began}-to-{after}"], outcomes[f"{began}-{WORKERS}-{MICRO_BATCH}"]
    _assert_same_losses(second, whole, since=MIDDLE)
    for name, tensor in whole.trained.items():
        assert (second.trained[name] - tensor).norm() < 1e-3 * tensor.norm(), name


@pytest.mark.parametrize("sharding", some(["fsdp2"], ("fsdp2", "zero1", "zero2", "zero3")))
def test_bfloat16_is_steered_alike(outcomes: dict[str, Outcome], sharding: str) -> None:
    """Compare a run with gradient checkpointing to DDP without it."""
    outcome, reference = outcomes[f"{sharding}-bfloat16"], outcomes["ddp-bfloat16"]
    for mine, other in zip(outcome.steps, reference.steps, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=0.05)
    assert outcome.steps[-1].losses["loss"] < outcome.steps[0].losses["loss"]


def test_a_batch_that_workers_cannot_share_equally_is_trained_whole(outcomes: dict[str, Outcome]) -> None:
    """Seven rows, as in an elastic run: four for one worker and three for the other."""
    _assert_same_losses(outcomes["uneven"], outcomes["uneven-alone"])


@pytest.mark.parametrize(("family", "trainable", "sharding"), some(LAYERS[:1], LAYERS))
def test_whole_layers_train_sharded(outcomes: dict[str, Outcome], family: str, trainable: str, sharding: str) -> None:
    sharded, replicated = (outcomes[f"{family}-{trainable}-{each}"] for each in (sharding, "ddp"))
    _assert_same_losses(sharded, replicated)
    assert any("mlp" in name for name in sharded.trained) == (trainable != "qkv")
    assert any(name.startswith("model.layers.0.") for name in sharded.trained) == (trainable == "all")
    assert sharded.frozen_changed == []


@pytest.mark.parametrize(("began", "after"), some((), ALL_LAYERS))
def test_another_strategy_takes_over_all_layers(outcomes: dict[str, Outcome], began: str, after: str) -> None:
    _assert_same_losses(outcomes[f"llama-all-{began}-to-{after}"], outcomes[f"llama-all-{began}"], since=MIDDLE)


def test_muon_trains_sharded_matrices(outcomes: dict[str, Outcome]) -> None:
    """Muon's iterations run in bfloat16, which rounds differently when a matrix is split in two."""
    sharded, replicated = outcomes["fsdp2-muon"], outcomes["ddp-muon"]
    for mine, other in zip(sharded.steps, replicated.steps, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=2e-2)
    assert sharded.steps[-1].losses["loss"] < 0.9 * sharded.steps[0].losses["loss"]


@pytest.mark.parametrize("sharding", some((), ("ddp", "fsdp2")))
def test_a_resumed_muon_run_equals_an_uninterrupted_one(outcomes: dict[str, Outcome], sharding: str) -> None:
    _assert_resumed(outcomes[f"{sharding}-muon-resumed"], outcomes[f"{sharding}-muon"])


# Runs that continue from another run's checkpoint: its weights, and its optimizer where requested.


@pytest.mark.parametrize("sharding", some(STRATEGIES[:2], SHARDINGS))
def test_a_run_starts_from_the_weights_of_its_parent(outcomes: dict[str, Outcome], path: Path, sharding: str) -> None:
    (directory,) = path.glob(f"ddp-{WORKERS}-{MICRO_BATCH}/{IN_THE_MIDDLE}")
    expected, started = CheckpointTensors(directory), outcomes[f"{sharding}-fresh-0"]
    assert started.steps == []
    assert started.trained.keys() == expected.keys()
    for name, tensor in started.trained.items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("sharding", some(STRATEGIES[:2], SHARDINGS))
def test_a_fresh_optimizer_takes_another_step_than_the_parents(outcomes: dict[str, Outcome], sharding: str) -> None:
    """Every strategy takes the same step."""
    fresh, kept = (outcomes[f"{sharding}-{optimizer}-1"] for optimizer in ("fresh", "kept"))
    assert fresh.steps[0].losses == kept.steps[0].losses
    assert [metrics.step for metrics in kept.steps] == [1]
    before = outcomes[f"{sharding}-fresh-0"].trained
    # Adam's first step is as long as the learning rate, whatever the gradient.
    longest = max(float((fresh.trained[name] - before[name]).abs().max()) for name in before)
    assert longest == pytest.approx(1e-2, rel=0.2)
    assert any(not torch.allclose(fresh.trained[n], kept.trained[n], atol=1e-4) for n in before)
    for optimizer, outcome in (("fresh", fresh), ("kept", kept)):
        first = outcomes[f"ddp-{optimizer}-1"]
        assert outcome.steps[0].losses == pytest.approx(first.steps[0].losses, rel=1e-4, abs=1e-4)
        for name, tensor in first.trained.items():
            torch.testing.assert_close(outcome.trained[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", some(["ruined"], ("ruined", "searched")))
@pytest.mark.parametrize("sharding", some(["fsdp2"], list(SHARDINGS)[1:5]))
def test_every_strategy_is_steered_alike(outcomes: dict[str, Outcome], sharding: str, kind: str) -> None:
    """By held-out KL: the same measurements, searched rates, and rollback to the start."""
    outcome, expected = outcomes[f"{sharding}-{kind}"], outcomes[f"ddp-{kind}"]
    assert actions(outcome) == actions(expected)
    assert kls(outcome) == pytest.approx(kls(expected), rel=1e-3)
    for note, other in zip(outcome.notes, expected.notes, strict=True):
        assert note.data["learning_rate"] == pytest.approx(other.data["learning_rate"], rel=1e-3)
    if kind == "ruined":
        for name, tensor in expected.trained.items():
            torch.testing.assert_close(outcome.trained[name], tensor, msg=name)
