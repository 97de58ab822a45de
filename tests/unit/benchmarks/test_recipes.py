"""Tables of docs/recipes.md hold what the planner says now and the stored dry runs."""

import json
from pathlib import Path

import pytest

from benchmarks.recipes import BEGIN, END, FOUND, PAGE, read_found, recipes, run_dry, with_tables
from swiftkv_platform.control_plane.jobs.estimates import estimate
from tests.recipes import teacher_config

SMALLEST = "builtin-python-5m"
RUN = {
    "train": {"peak": 111_000_000_000},
    "calibrate": {"peak": 112_000_000_000},
    "evaluate": {"peak": 113_000_000_000},
}


def test_the_page_shows_what_is_planned_and_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, read_found(FOUND)) == page, "python -m benchmarks.recipes --write"


@pytest.mark.parametrize("name", read_found(FOUND))
def test_a_stored_dry_run_is_near_its_plan(name: str) -> None:
    from swiftkv_platform.jobs.dry_run import DryRun

    found, spec = DryRun.model_validate(read_found(FOUND)[name]), recipes()[name]
    planned = estimate(spec, teacher_config(spec), ())
    assert (found.num_parameters, found.num_trained_parameters) == (planned.parameters, planned.trained_parameters)
    if spec.sharding.cpu_offload:  # a dry run's tensors are all in one place
        host = next(each.host_bytes for each in planned.phases if each.phase == "train")
        assert planned.memory_per_worker < found.train.peak < planned.memory_per_worker + host
    else:
        assert planned.memory_per_worker == pytest.approx(found.train.peak, rel=0.1)
    on_gpus = {each.phase: each.device_bytes for each in planned.phases if each.device_bytes is not None}
    if on_gpus:
        assert found.calibrate is not None
        assert on_gpus["calibrate"] == pytest.approx(found.calibrate.peak, rel=0.1)
        assert on_gpus["evaluate"] == pytest.approx(found.evaluate.peak, rel=0.1)


def test_figures_stand_behind_the_plans() -> None:
    shown = with_tables(f"before\n{BEGIN}\nold\n{END}\nafter", {"builtin-python-5m": RUN})
    row = next(line for line in shown.splitlines() if line.startswith("| `builtin-python-5m` | 2 | "))
    cells = row.split(" | ")
    assert [cell.split(" / ")[1] for cell in cells[2:5]] == ["111", "112", "113"]
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter")
    assert "old" not in shown


@pytest.mark.soak("a dry run of the smallest recipe")
def test_a_dry_run_is_stored_and_not_repeated(tmp_path: Path) -> None:
    from swiftkv_platform.jobs.dry_run import DryRun

    able = {name for name, spec in recipes().items() if spec.sharding.strategy == "fsdp2"}
    path = tmp_path / "found.json"
    path.write_text(json.dumps({name: {"old": 1} for name in able - {SMALLEST}}))
    run_dry(None, path)
    first = read_found(path)
    assert first.keys() == able
    assert DryRun.model_validate(first[SMALLEST]).num_workers == 2
    changed = first | {SMALLEST: {"old": 2}}
    path.write_text(json.dumps(changed))
    run_dry(None, path)
    assert read_found(path) == changed
