"""Dry runs of the shipped recipes, and the plans that they are compared with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, estimate
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.dry_run import DryRun, dry_run
from swiftkv_platform.specs import JobSpec, load_spec
from tests.support.recipes import RECIPES, device_peak, teacher_config

pytestmark = pytest.mark.slow("thousands of operators")
in_soak = pytest.mark.soak("minutes of a core")

BY_NAME = {path.stem: path for path in RECIPES if load_spec(path).sharding.strategy == "fsdp2"}
NUM_LAYERS = 6
SMALLEST, LARGEST, EXPERTS = "builtin-python-5m", "llama-3.1-405b-fp8", "deepseek-v2-lite"
SLIM = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 16, "num_key_value_heads": 2,
    "vocab_size": 1024,
}  # fmt: skip
"""Sizes of a narrow teacher, which make a dry run of a deep one take seconds."""


def run(spec: JobSpec, **changes: Any) -> tuple[DryRun, JobEstimate]:
    config = {**teacher_config(spec), **changes}
    return dry_run(spec, config), estimate(spec, config, ())


def check(spec: JobSpec, found: DryRun, planned: JobEstimate) -> None:
    assert (found.num_parameters, found.num_trained_parameters) == (planned.parameters, planned.trained_parameters)
    peak = device_peak(spec, found.train.model_dump())
    assert 0.9 * peak < planned.memory_per_worker < 1.1 * peak


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest recipe with shorter rows and half of its teacher's layers."""
    path, spec = tmp_path_factory.mktemp("recipe"), load_spec(BY_NAME[SMALLEST])
    config = {**teacher_config(spec), "num_hidden_layers": NUM_LAYERS}
    (path / "config.json").write_text(json.dumps(config))
    sections = spec.model_dump(mode="json", exclude_unset=True)
    sections["model"]["name_or_path"] = str(path)
    sections["data"]["max_length"] = 128
    sections["training"] |= {"batch_size": 8, "micro_batch_size": 2}
    (path / "job.yaml").write_text(json.dumps(sections))
    return path / "job.yaml"


@pytest.fixture(scope="module")
def smallest(recipe: Path) -> tuple[DryRun, JobEstimate]:
    """Dry run of the recipe by the command, and its plan."""
    printed = CliRunner().invoke(app, ["plan", "--dry-run", str(recipe), "--json"])
    assert printed.exit_code == 0, printed.output
    config = json.loads((recipe.parent / "config.json").read_text())
    return DryRun.model_validate(json.loads(printed.stdout)), estimate(load_spec(recipe), config, ())


def test_the_smallest_takes_what_is_planned(
    smallest: tuple[DryRun, JobEstimate], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(load_spec(BY_NAME[SMALLEST]), *smallest)
    found = smallest[0]
    monkeypatch.setattr("swiftkv_platform.jobs.dry_run.dry_run", lambda *_: found)  # what the command has just found
    table = CliRunner().invoke(app, ["plan", "--dry-run", str(recipe)])
    assert "collectives per step" in table.stdout
    assert "Excludes kernel workspaces" in table.stdout


def test_shards_of_two_workers(smallest: tuple[DryRun, JobEstimate]) -> None:
    """Each worker holds half of the weights, in the dtypes that they are kept in, and of gradients and moments."""
    found, _ = smallest
    trained = found.num_trained_parameters
    assert found.train.gradients == 4 * trained // 2
    assert found.train.optimizer == pytest.approx(2 * 4 * trained / 2, rel=0.001)
    frozen = 2 * (found.num_parameters - trained)
    assert found.train.parameters == pytest.approx((frozen + 4 * trained) / 2, rel=0.01)


def test_collectives_of_a_step(smallest: tuple[DryRun, JobEstimate]) -> None:
    """Gradients are reduced in the last micro batch only; weights are gathered in every one."""
    calls = {each.name: each.calls for each in smallest[0].collectives}
    assert calls["allgather_base"] > 2 * NUM_LAYERS, "every layer of teacher and student, twice"
    assert 0 < calls["reduce_scatter_base"] <= NUM_LAYERS
    bytes_of = {each.name: each.num_bytes for each in smallest[0].collectives}
    assert bytes_of["reduce_scatter_base"] == 4 * smallest[0].num_trained_parameters


def test_no_worker_calibrates_or_evaluates_with_all_weights(smallest: tuple[DryRun, JobEstimate]) -> None:
    found, _ = smallest
    assert found.calibrate.parameters == 0, "layers are read when they run"
    assert found.evaluate.parameters == pytest.approx(2 * found.num_parameters / found.num_workers, rel=0.01)


@in_soak
def test_a_copied_start_is_not_calibrated() -> None:
    spec = load_spec(BY_NAME[SMALLEST])
    copied = spec.model_copy(update={"swiftkv": spec.swiftkv.model_copy(update={"initialization": "copied"})})
    assert run(copied, num_hidden_layers=4)[0].calibrate is None


@in_soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "num_layers"), [(LARGEST, 8), (EXPERTS, 4), *((name, None) for name in BY_NAME)])
def test_a_recipe_takes_what_is_planned(name: str, num_layers: int | None) -> None:
    """Large teachers run with a few of their layers, which are alike; the others with all."""
    spec, changes = load_spec(BY_NAME[name]), {} if num_layers is None else {"num_hidden_layers": num_layers}
    check(spec, *run(spec, **changes))


@in_soak
def test_depth_costs_what_it_keeps() -> None:
    """Depth costs training the shards and checkpoints of the layers, and calibration nothing: it frees each layer."""
    spec = load_spec(BY_NAME[LARGEST])
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"max_length": 256})})
    (shallow, less), (deep, more) = (run(spec, **SLIM, num_hidden_layers=depth) for depth in (8, 48))
    planned = more.memory_per_worker - less.memory_per_worker
    assert deep.train.peak - shallow.train.peak == pytest.approx(planned, rel=0.1)
    assert shallow.calibrate is not None
    assert deep.calibrate == shallow.calibrate


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_other_strategies_are_planned_by_formula_alone(strategy: str) -> None:
    spec = load_spec(BY_NAME[SMALLEST])
    sharding = spec.sharding.model_copy(update={"strategy": strategy})
    with pytest.raises(InvalidInputError, match=rf"sharding\.strategy is '{strategy}'"):
        run(spec.model_copy(update={"sharding": sharding}))
    assert not dist.is_initialized()
