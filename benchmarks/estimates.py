"""Estimates of `POST /jobs/validate` for the demo's job, beside what the job then takes. Real Ray, two FSDP2 workers.

    python -m benchmarks.estimates [--first 20] [--steps 100] [--recipe builtin-python-5m.yaml]

Brings up a stack of its own. A short job of the same spec (`--first` steps) comes first: a control plane that has
measured nothing foresees memory, but no time. Memory is that of a worker's process at its most, as the job reports it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from swiftkv_platform.client import Client, Job
from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.settings import Settings

MEBIBYTE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=20, help="steps of the job from which speed is known")
    parser.add_argument("--steps", type=int, default=100, help="steps of the job that is foreseen")
    parser.add_argument("--recipe", default="builtin-python-5m.yaml", help="file in jobs/recipes")
    options = parser.parse_args()
    recipe = yaml.safe_load((files("swiftkv_platform.jobs") / "recipes" / options.recipe).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Settings(home=Path(directory), database_url=None, storage_uri=None, _env_file=None))
        try:
            state = stack.up(StackOptions(port=0), print)
            with Client(state.url) as client:
                for steps in (options.first, options.steps):
                    compare(client, {**recipe, "training": {**recipe["training"], "max_steps": steps}})
        finally:
            stack.down()


def compare(client: Client, spec: dict[str, Any]) -> None:
    """Print a JSON line of estimate, measurement and their ratios."""
    foreseen = client.jobs.validate(spec).model_dump()
    job = client.jobs.wait(client.jobs.create(spec).id)
    if job.status != "succeeded":
        raise SystemExit(f"the job has {job.status}: {job.error}\n" + "\n".join(client.jobs.logs(job.id)))
    memory = foreseen["memory_per_worker"] + foreseen["process_memory"]
    figures = {
        "steps": spec["training"]["max_steps"],
        "memory_mib": beside(memory / MEBIBYTE, peak_memory(client, job) / MEBIBYTE),
        "of_which_foreseen_for_the_model_mib": round(foreseen["memory_per_worker"] / MEBIBYTE, 1),
        "seconds": beside(foreseen["seconds"], seconds(job)),
        "speed_source": foreseen["speed_source"],
    }
    print(json.dumps(figures), flush=True)


def beside(foreseen: float | None, measured: float) -> dict[str, float]:
    figures = {"measured": round(measured, 1)}
    return figures if foreseen is None else {"foreseen": round(foreseen, 1), **figures, "ratio": foreseen / measured}


def peak_memory(client: Client, job: Job) -> float:
    return max(float(point.model_dump()["memory_bytes"]) for point in client.jobs.metrics(job.id))


def seconds(job: Job) -> float:
    """Seconds from submission, nothing being in the queue, to the model."""
    assert job.finished_at is not None
    return job.finished_at - job.created_at


if __name__ == "__main__":
    main()
