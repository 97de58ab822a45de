"""Options against each other at equal tokens, several seeds each: what a student loses with and without them.

    python -m benchmarks.ablations [--model builtin:python-5m] [--steps 250] [--seeds 0 1 2] [--arms g=2 ...]
                                   [--output ablations.json]
    python -m benchmarks.ablations --short      # a few small steps, one seed: does it run?

Arms: AcrossKV groups of 1, 2 and 4 layers, with the teacher's output projections and with the student's own; these
with a refitted start; and one key-value head, or one for each query head, where the built-in teacher's cache is no
larger than with g = 2 (the paper's table C.1). A run is the trainer's own in this process, with default rates: rate
search, guard and best state as in a job, 8 rows of 256 tokens of the standard library's sources a step. A seed draws
the order of the rows, and the calibration's.

The report has a row a run, and by arm the mean, lowest and highest KL before and after, and their ratio to g = 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports import benchmark_parser, conditions, write_report
from benchmarks.training_runs import TrainingRuns, one_worker, python_spec
from swiftkv_platform.specs import BUILTIN_TEACHER, JobSpec

Row = dict[str, Any]

BASELINE = "g=1"
ARMS: dict[str, dict[str, Any]] = (
    {
        f"g={g}{', own output' if own else ''}": {"key_value_group_size": g, "own_output_projection": own}
        for g in (1, 2, 4)
        for own in (False, True)
    }
    | {
        f"g={g}, own output, refitted": {
            "key_value_group_size": g,
            "own_output_projection": True,
            "initialization": "refitted",
        }
        for g in (1, 2)
    }
    | {
        "g=1, one head": {"sharing": "mqa"},
        "g=6, every head": {"key_value_group_size": 6, "sharing": "mha"},
    }
)
"""`swiftkv` section of each arm."""


def summaries(rows: Sequence[Row]) -> list[Row]:
    """By arm the KL over its seeds, and the mean one's ratio to the baseline's."""
    found: list[Row] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        line: Row = {"arm": arm}
        for when in ("start_kl", "end_kl"):
            values = [row[when] for row in rows if row["arm"] == arm]
            baseline = statistics.mean(row[when] for row in rows if row["arm"] == BASELINE)
            mean = statistics.mean(values)
            line[when] = {"mean": mean, "lowest": min(values), "highest": max(values), "ratio": mean / baseline}
        found.append(line)
    return found


def _spec(args: argparse.Namespace, seed: int, swiftkv: dict[str, Any]) -> JobSpec:
    model = {"name_or_path": args.model}
    return JobSpec.model_validate(python_spec("ablations", args, seed, short_length=128, model=model, swiftkv=swiftkv))


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="few, small steps and one seed")
    parser.add_argument("--model", default=BUILTIN_TEACHER, help="the teacher, as a job names it")
    parser.add_argument("--steps", type=int, help="of 8 rows of 256 tokens; default: 250, with --short 8")
    parser.add_argument("--evaluation-tokens", type=int, help="held-out; default: 32768, with --short 1024")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, with --short 0")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all; g=1 is always run")
    args = parser.parse_args()
    args.steps = args.steps or (8 if args.short else 250)
    args.evaluation_tokens = args.evaluation_tokens or (1024 if args.short else 32768)
    args.seeds = args.seeds or ([0] if args.short else [0, 1, 2])
    arms = [arm for arm in ARMS if args.arms is None or arm in (BASELINE, *args.arms)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-ablations-") as name, one_worker(Path(name)):
        runs = TrainingRuns(_spec(args, args.seeds[0], ARMS[BASELINE]), Path(name) / "runs")
        for seed in args.seeds:
            for arm in arms:
                found = runs.run(_spec(args, seed, ARMS[arm]))
                row = {"arm": arm, "seed": seed, "start_kl": found.start_kl, "end_kl": found.end_kl}
                rows.append(row | {"tokens": found.tokens, "rate": found.spec.optimizer.learning_rate})
                print(json.dumps(rows[-1]), flush=True)
    found_lines = summaries(rows)
    for line in found_lines:
        print(json.dumps(line), flush=True)
    write_report({"conditions": conditions(args), "runs": rows, "summaries": found_lines}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
