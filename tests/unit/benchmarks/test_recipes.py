"""Tables of docs/recipes.md: what the planner says now, beside the dry runs that are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recipes import BEGIN, END, FOUND, PAGE, collectives_row, read_found, recipes, run_dry, with_tables
from swiftkv_platform.orchestration.estimates import estimate
from tests.recipes import teacher_config

SMALLEST = "builtin-python-5m"
RUN = {
    "train": {"peak": 111_000_000_000},
    "calibrate": {"peak": 112_000_000_000},
    "evaluate": {"peak": 113_000_000_000},
    "num_micro_batches": 2,
    "collectives": [
        {"name": "allgather_base", "calls": 1200, "num_bytes": 3_000_000_000},
        {"name": "allreduce", "calls": 3, "num_bytes": 10},
        {"name": "broadcast", "calls": 4, "num_bytes": 200_000_000},
        {"name": "reduce_scatter_base", "calls": 5, "num_bytes": 150_000_000_000},
    ],
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
    assert planned.memory_per_worker == pytest.approx(found.train.peak, rel=0.1)
    on_gpus = {each.phase: each.device_bytes for each in planned.phases if each.device_bytes is not None}
    if on_gpus:
        assert found.calibrate is not None
        assert on_gpus["calibrate"] == pytest.approx(found.calibrate.peak, rel=0.1)
        assert on_gpus["evaluate"] == pytest.approx(found.evaluate.peak, rel=0.1)


def test_collectives_are_told_apart() -> None:
    assert collectives_row("a", RUN) == ("`a`", "2", "1,200, 3.0", "5, 150", "7, 0.2")


def test_figures_stand_behind_the_plans() -> None:
    shown = with_tables(f"before\n{BEGIN}\nold\n{END}\nafter", {"builtin-python-5m": RUN})
    row = next(line for line in shown.splitlines() if line.startswith("| `builtin-python-5m` | 2 | "))
    cells = row.split(" | ")
    assert [cell.split(" / ")[1] for cell in cells[2:5]] == ["111", "112", "113"]
    assert "| `builtin-python-5m` | 2 | 1,200, 3.0 | 5, 150 | 7, 0.2 |" in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter")
    assert "old" not in shown


@pytest.mark.slow  # a dry run of the smallest recipe
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
