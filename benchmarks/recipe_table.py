"""Write the table "Which GPU, how long, how much" of docs/training.md, as the planner estimates each recipe for GPUs.

python -m benchmarks.recipe_table                          # into the page, with GPU hours
python -m benchmarks.recipe_table --gpu-hour-price 2.50    # print it with the cost at your price instead

Recipes for one GPU of 24 or 80 GB are estimated for an L4 and an H100, epochs with 160 million tokens. Time is that of
training, at an assumed share of the GPU's peak. The column "dry run" is that of `benchmarks/dry_runs.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.common import format_markdown_table, replace_table
from swiftkv_platform.control_plane.jobs.estimates import Prices, add_time_and_cost, estimate, find_speed
from swiftkv_platform.specs import JobSpec, load_spec
from tests.support.recipes import RECIPES, teacher_config

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
DRY_RUNS = Path(__file__).with_name("dry_runs.json")
MARKERS = ("<!-- recipes: python -m benchmarks.recipe_table -->", "<!-- end of recipes -->")
TOKENS_PER_EPOCH = 160_000_000
_ACCELERATOR_OF_SUFFIX = {"24gb": "L4", "80gb": "H100"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpu-hour-price", type=float, help="price of a GPU hour; prints the table, and writes no page"
    )
    price: float | None = parser.parse_args().gpu_hour_price
    table = format_table(price)
    if price is None:
        PAGE.write_text(replace_table(PAGE, MARKERS, table), encoding="utf-8")
    print(table)


def format_table(gpu_hour_price: float | None = None) -> str:
    """Format a row per recipe that has GPUs, the cheapest first; the last column is the cost at a price, if given."""
    dry_runs = json.loads(DRY_RUNS.read_text(encoding="utf-8"))
    rows = []
    for path in RECIPES:
        spec = _set_accelerator(load_spec(path), path.stem)
        if not spec.resources.gpus_per_worker:
            continue
        planned = estimate(spec, teacher_config(spec), (), num_tokens=TOKENS_PER_EPOCH)
        prices = Prices(gpu_hour=1.0 if gpu_hour_price is None else gpu_hour_price)
        planned = add_time_and_cost(planned, spec, find_speed(spec, (), None), prices)
        assert planned.seconds is not None, f"the planner does not know the GPU of {path.stem}"
        assert planned.cost is not None
        assert planned.memory_per_worker is not None
        cells = (
            f"`{path.stem}`",
            f"{planned.num_key_value_layers} of {planned.num_hidden_layers}",
            str(spec.swiftkv.key_value_group_size),
            f"{spec.resources.max_workers} x {spec.resources.accelerator_type}",
            f"{planned.memory_per_worker / 1e9:.1f}",
            f"{dry_runs[path.stem]['train']['peak'] / 1e9:.1f}",
            f"{planned.seconds / 60:,.0f}",
            f"{planned.cost:,.1f}",
        )
        rows.append((planned.cost, cells))
    last = "GPU hours" if gpu_hour_price is None else "cost"
    columns = ("recipe", "l", "g", "GPUs", "GB per GPU, planned", "dry run", "minutes", last)
    return format_markdown_table(columns, [cells for _, cells in sorted(rows)])


def _set_accelerator(spec: JobSpec, name: str) -> JobSpec:
    """Return the spec of a recipe for one GPU of any kind with the kind that the table shows."""
    accelerator = _ACCELERATOR_OF_SUFFIX.get(name.rpartition("-")[2])
    if accelerator is None:
        return spec
    resources = spec.resources.model_copy(update={"accelerator_type": accelerator})
    return spec.model_copy(update={"resources": resources})


if __name__ == "__main__":
    main()
