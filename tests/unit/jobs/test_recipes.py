"""The specs that ship with the package: each fits the teacher it names, checked without network."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from benchmarks.common import replace_table
from benchmarks.recipe_table import MARKERS, PAGE, format_table
from swiftkv_platform.cli.app import app
from swiftkv_platform.control_plane.jobs.estimates import estimate
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.recipes import read_description, split_description
from swiftkv_platform.specs import BUILTIN_TEACHER, load_spec
from tests.support.recipes import RECIPES, TEACHERS, device_peak, teacher_config
from tests.unit.control_plane.routes.conftest import control_plane, make_parts

pytestmark = pytest.mark.slow("reads and plans every recipe")

LAYERS = {
    "builtin-python-5m": (6, 9),
    "builtin-python-5m-recovery": (6, 12),
    "builtin-python-5m-sweep": (9, 12),
    "builtin-python-5m-teacher-written": (6, 9),
    "builtin-smollm2-135m-demo": (15, 30),
    "builtin-smollm2-135m-l11": (11, 30),
    "builtin-smollm2-135m-l15": (15, 30),
    "builtin-smollm2-135m-l15-g2": (15, 23),
    "builtin-smollm2-135m-l17": (17, 30),
    "builtin-smollm2-135m-l22": (22, 30),
    "llama-3.1-8b": (16, 32),
    "llama-3.1-8b-math-code": (16, 32),
    "llama-3.1-70b": (40, 50),
    "llama-3.1-405b-fp8": (63, 126),
    "llama-3.1-8b-24gb": (16, 32),
    "llama-3.1-8b-80gb": (16, 32),
    "llama-3.2-1b-24gb": (10, 16),
    "llama-3.2-1b-80gb": (10, 16),
    "llama-3.2-3b": (17, 28),
    "llama-3.2-3b-24gb": (17, 28),
    "llama-3.2-3b-80gb": (17, 28),
    "mistral-small": (28, 42),
    "qwen2.5-7b": (21, 28),
    "deepseek-v2-lite": (15, 21),
}
"""l, and the layers of the KV cache: l + ceil((L - l) / g)."""
ON_ONE_GPU = {
    path: float(path.stem.rpartition("-")[2].removesuffix("gb")) for path in RECIPES if path.stem.endswith("gb")
}
"""Recipes for one GPU of any kind, with its GB."""
CONTEXT = 1e9
"""Bytes of GPU memory that CUDA's context takes."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError(f"asks the network for {arguments[-1]}")

    def connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:  # a parser process is started through one
            refuse(address)
        connect_anywhere(self, address)

    connect_anywhere = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def client(tmp_path: Path, empty_database: Path) -> Iterator[TestClient]:
    with control_plane(make_parts(tmp_path, empty_database), Settings(home=tmp_path, _env_file=None)) as client:
        yield client


def test_every_recipe_is_known_here() -> None:
    assert {path.stem for path in RECIPES} == LAYERS.keys()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_teacher(path: Path, client: TestClient, tmp_path: Path) -> None:
    """The command and the control plane accept each recipe, given only its teacher's `config.json`."""
    spec, arguments = load_spec(path), ["jobs", "validate", "-f", str(path), "--json"]
    body = spec.model_dump(mode="json")
    if spec.model.name_or_path != BUILTIN_TEACHER:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(TEACHERS[spec.model.name_or_path]))
        assert spec.data.max_length <= TEACHERS[spec.model.name_or_path]["max_position_embeddings"]
        arguments += ["--config", str(config)]
        body["model"]["name_or_path"] = str(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    answer = client.post("/jobs/validate", json=body)
    assert answer.status_code == 200, answer.text
    for found in (json.loads(result.stdout), answer.json()):
        assert (found["num_key_value_layers"], found["num_kv_cache_layers"]) == LAYERS[path.stem]
    planned = "prefill_flops_ratio", "kv_bytes_per_token", "trained_parameters", "flops_per_step", "memory_per_worker"
    assert all(answer.json()[name] > 0 for name in planned)


def test_recipes_of_published_models_have_the_papers_hyperparameters() -> None:
    for path in (path for path in RECIPES if not path.stem.startswith("builtin-") and path not in ON_ONE_GPU):
        spec = load_spec(path)
        optimizer, training, data = spec.optimizer, spec.training, spec.data
        assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.warmup_ratio) == (3e-4, 0.05, 0.05)
        assert (training.num_epochs, training.batch_size, training.max_steps) == (2, 32, None)
        assert (data.max_length, data.packing, spec.distillation.temperature) == (8192, True, 2.0)
        assert spec.evaluation.tasks == ("paper",)
        assert spec.evaluation.has_gate
        sources = [source.name_or_path for source in data.sources]
        assert sources[:2] == ["HuggingFaceH4/ultrachat_200k", "teknium/OpenHermes-2.5"]


DRY_RUNS = json.loads(Path("benchmarks/dry_runs.json").read_text())
"""Dry run of each recipe, as printed by `swiftkv plan --dry-run RECIPE --json`; the soak runs them again."""


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem in DRY_RUNS], ids=lambda path: path.stem)
def test_a_recipe_is_planned_as_it_was_run_dry(path: Path) -> None:
    spec = load_spec(path)
    peak = device_peak(spec, DRY_RUNS[path.stem]["train"])
    assert 0.9 * peak < estimate(spec, teacher_config(spec), ()).memory_per_worker < 1.1 * peak


def test_the_page_shows_what_is_planned_and_was_run_dry() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = format_table()
    assert replace_table(PAGE, MARKERS, table) == page, "write it again: python -m benchmarks.recipe_table"
    for path in (path for path in RECIPES if path.stem in DRY_RUNS and load_spec(path).resources.gpus_per_worker):
        [*_, minutes, _] = next(row for row in table.splitlines() if f"`{path.stem}`" in row).split(" | ")
        _, time = split_description(read_description(path.read_text(encoding="utf-8")))
        assert f"about {minutes} minutes on " in time


def test_the_cost_is_gpu_hours_times_the_price() -> None:
    hours, costs = (
        {
            row.split(" | ")[0]: float(row.rpartition(" | ")[2].strip(" |").replace(",", ""))
            for row in table.splitlines()[2:]
        }
        for table in (format_table(), format_table(100.0))
    )
    assert hours.keys() == costs.keys()
    assert all(abs(costs[name] - 100 * hours[name]) <= 5.05 for name in hours)  # hours are rounded to 0.1


@pytest.mark.parametrize("path", ON_ONE_GPU, ids=lambda path: path.stem)
def test_a_recipe_for_one_gpu_fits_it_as_planned_and_as_run_dry(path: Path) -> None:
    spec, room = load_spec(path), 1e9 * ON_ONE_GPU[path] - CONTEXT
    assert (spec.resources.num_workers, spec.resources.gpus_per_worker) == (1, 1)
    found = DRY_RUNS[path.stem]
    planned = estimate(spec, teacher_config(spec), ()).memory_per_worker
    peaks = [found[phase]["peak"] for phase in ("calibrate", "evaluate")]
    assert max(planned, device_peak(spec, found["train"]), *peaks) < room


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if load_spec(path).resources.accelerator_type], ids=lambda path: path.stem
)
def test_a_recipe_fits_its_gpus_and_on_fewer_workers_fits_or_is_refused(path: Path) -> None:
    spec = load_spec(path)
    room = DEVICE_MEMORY[spec.resources.accelerator_type]
    memory = estimate(spec, teacher_config(spec), ()).memory_per_worker
    assert memory < room
    num_workers = spec.resources.num_workers
    while (num_workers := num_workers // 2) >= spec.sharding.sequence_parallel_size:
        fewer = spec.model_copy(update={"resources": spec.resources.model_copy(update={"num_workers": num_workers})})
        try:
            planned = estimate(fewer, teacher_config(fewer), ()).memory_per_worker
        except InvalidInputError as error:
            refused = error
        else:
            assert planned <= room
            continue
        assert (refused.field, refused.value) == ("resources.num_workers", num_workers)
        needed = re.search(r"needs (\d+) GB .* has 80 GB; use .*", refused.message)
        assert needed is not None
        assert int(needed[1]) * 1e9 > room


def test_validating_loads_no_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from swiftkv_platform.cli.app import app;"
        f"result = CliRunner().invoke(app, ['jobs', 'validate', '-f', {str(RECIPES[0])!r}]);"
        "print(result.output); sys.exit(result.exit_code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
