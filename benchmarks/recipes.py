"""Plans of the shipped recipes, compared with their dry runs: the tables of docs/recipes.md.

    python -m benchmarks.recipes --dry-run [--recipe llama-3.1-8b]     # one to three minutes of a core each
    python -m benchmarks.recipes --write                               # the tables, from plans and stored dry runs

A dry run uses a recipe's full depth, so its figures are stored (`benchmarks/dry_runs.json`), each as soon as it is
finished; a recipe with stored figures is skipped unless it is named. Teachers' shapes are those of `tests/recipes.py`;
no network is used.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, estimate
from swiftkv_platform.planning.phase_plans import PhasePlan
from swiftkv_platform.specs import JobSpec, load_spec
from tests.recipes import RECIPES, teacher_config

FOUND = Path(__file__).with_name("dry_runs.json")
PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- tables: python -m benchmarks.recipes --write -->", "<!-- end of tables -->"
NUM_TOKENS = 160_000_000
"""Tokens of an epoch of the published models' recipes (paper, appendix B.1); one has 10% more (appendix D)."""
KINDS = {"24gb": "L4", "80gb": "H100"}
"""GPU whose speed and memory are assumed for a recipe for one GPU."""

Found = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="dry-run the recipes and store the figures")
    parser.add_argument(
        "--recipe", action="append", help="recipe to run, even if its figures are stored; may be repeated"
    )
    parser.add_argument("--found", type=Path, default=FOUND, help="file with the stored figures")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/recipes.md")
    options = parser.parse_args()
    if options.dry_run:
        run_dry(options.recipe, options.found)
    if options.write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read_found(options.found)), encoding="utf-8")
    if not options.dry_run and not options.write:
        print(tables(read_found(options.found)))


def recipes() -> dict[str, JobSpec]:
    """Recipes that train one model, by name."""
    specs = {path.stem: load_spec(path) for path in RECIPES}
    return {name: spec for name, spec in specs.items() if spec.sweep is None}


def read_found(path: Path) -> Found:
    """Read dry runs by recipe, as `swiftkv_platform.jobs.dry_run.DryRun` values."""
    found: Found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def run_dry(names: Sequence[str] | None, path: Path) -> None:
    """Run recipes dry, those in `names` or all that are missing, and store each as soon as it is finished."""
    from swiftkv_platform.jobs.dry_run import dry_run

    found = read_found(path)
    able = {name: spec for name, spec in recipes().items() if spec.sharding.strategy == "fsdp2"}
    for name in [name for name in able if name not in found] if names is None else names:
        result = dry_run(able[name], teacher_config(able[name]))
        found[name] = result.model_dump(mode="json")
        lines = ",\n".join(f"{json.dumps(one)}: {json.dumps(run)}" for one, run in sorted(found.items()))
        partial = path.with_suffix(".partial")
        partial.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105
        print(f"{name}: {result.train.peak / 1e9:.1f} GB in training", flush=True)


def planned(name: str, spec: JobSpec) -> JobEstimate:
    """Plan a recipe, with the paper's amount of data unless it sets `max_steps`."""
    num_tokens = NUM_TOKENS if spec.training.max_steps is None else None
    if name.endswith(tuple(KINDS)):
        kind = KINDS[name.rpartition("-")[2]]
        spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"accelerator_type": kind})})
    return estimate(spec, teacher_config(spec), (), num_tokens=num_tokens)


def tables(found: Found) -> str:
    """Format the tables: memory, disk and time as planned, and memory as measured."""
    specs = recipes()
    plans = {name: planned(name, spec) for name, spec in specs.items()}
    published = {name: plan for name, plan in plans.items() if not name.startswith("builtin-")}
    shown = {name: plan for name, plan in plans.items() if name in published or name in found}
    memory = [memory_row(name, specs[name], plan, found.get(name)) for name, plan in shown.items()]
    needs = [needs_row(name, plan) for name, plan in published.items()]
    parts = [
        "GB of a worker, planned / found by a dry run:",
        markdown(("Recipe", "workers", "train", "calibrate", "evaluate", "host"), memory),
        "GB (`moved`: downloads and uploads) and minutes of the job, planned:",
        markdown(("Recipe", "nodes", "a node's disk", "store", "moved", "training", "all phases"), needs),
    ]
    return "\n\n".join(parts)


def with_tables(page: str, found: Found) -> str:
    """Replace the tables between the markers of a page."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{after}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def memory_row(name: str, spec: JobSpec, plan: JobEstimate, run: dict[str, Any] | None) -> tuple[str, ...]:
    by_name = {phase.phase: phase for phase in plan.phases}
    cells = [_beside(by_name.get(phase), (run or {}).get(phase)) for phase in ("train", "calibrate", "evaluate")]
    if spec.sharding.cpu_offload:  # a dry run's tensors are all in one place
        cells[0] += " with the host's"
    on_gpus = plan.phases[0].device_bytes is not None
    host = _gb(max(phase.host_bytes for phase in plan.phases)) if on_gpus else ""
    return f"`{name}`", f"{by_name['train'].num_workers}", *cells, host


def _beside(phase: PhasePlan | None, found: dict[str, Any] | None) -> str:
    if phase is None:
        return ""
    need = phase.host_bytes if phase.device_bytes is None else phase.device_bytes
    return _gb(need) if found is None else f"{_gb(need)} / {_gb(found['peak'])}"


def needs_row(name: str, plan: JobEstimate) -> tuple[str, ...]:
    phases = {phase.phase: phase for phase in plan.phases}
    assert plan.assumptions is not None
    return (
        f"`{name}`",
        f"{plan.assumptions.num_nodes}",
        _gb(max(phase.node_disk.total for phase in plan.phases)),
        _gb(max(phase.store.total for phase in plan.phases)),
        _gb(sum(phase.downloaded_bytes + phase.uploaded_bytes for phase in plan.phases)),
        _minutes([phases["train"]]),
        _minutes(plan.phases),
    )


def _minutes(phases: Iterable[PhasePlan]) -> str:
    return f"{sum(phase.seconds or 0.0 for phase in phases) / 60:,.0f}"


def _gb(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"


if __name__ == "__main__":
    main()
