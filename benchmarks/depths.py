"""Students of one teacher at several depths and group sizes, at equal tokens over the same rows.

    python -m benchmarks.depths DIRECTORY [--spec benchmarks/configs/smollm2-depths.yaml]
                                [--points 22:1 15:1 15:2 11:1] [--steps 150] [--seeds 0]
                                [--needle-lengths 512 1024] [--needle-samples 20] [--early-exit] [--output depths.json]
    python -m benchmarks.depths DIRECTORY --spec benchmarks/configs/python-5m-depths.yaml --needle-lengths \\
                                --points 6:1 6:2:teacher-output 6:2 6:4 --steps 250 --seeds 0 1 2

The spec names the teacher, the data and the loss. A point `l:g[:START][:teacher-output][:own]` replaces its `swiftkv`
section, except `decode_key_value`, which `own` or `shared` overrides. Instead of l, a point may list the layers that
prompts run through, as 0-2,4,6-16. Students whose layers share a KV cache layer have their own output projections
unless the point says `teacher-output`; `--early-exit` also trains an exit head. Runs use a job's trainer in this
process, with rate search, guard and best state; `--steps 0` only measures starts. A seed sets the order of the rows and
the choice of calibration rows.

A point has KL, agreement and perplexity ratio on the held-out rows, before and after training, with intervals of 95% by
text, and by position in the answer and by prompt length; the share of numbers found in prompts of each length by
student and teacher; and with an exit head its agreement by confidence (the paper's figure D.1). DIRECTORY keeps the
teacher's answers and finished points, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import benchmark_parser, conditions, write_report
from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.data.completions import CompletionStore
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.model import load_trained_tensors
from swiftkv_platform.distillation.partial_reads import CheckpointTensors
from swiftkv_platform.distillation.steering import Progress, SteeringNote
from swiftkv_platform.distillation.strategy import EvaluationModel
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.evaluation.analysis import Needles
from swiftkv_platform.evaluation.paired import HeldOutIntervals
from swiftkv_platform.evaluation.quality import Totals
from swiftkv_platform.evaluation.report import exit_bins, quality_bins
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.prepare import AttemptAnswers, prepare, write
from swiftkv_platform.jobs.worker.setup import (
    calibrate,
    load_student,
    load_tokenizer,
    open_lazy,
    spread_fork,
    task_device,
    teacher_path,
)
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.specs import JobSpec, load_spec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.student_shape import parse_layers

SPEC = Path(__file__).parent / "configs" / "smollm2-depths.yaml"
POINTS = ("22:1", "15:1", "15:2", "11:1")
TEACHER_OUTPUT = "teacher-output"
FORMS = ("own", "shared")
"""Values of `decode_key_value`."""
Row = dict[str, Any]


@contextmanager
def one_worker(directory: Path) -> Iterator[None]:
    """Set up a process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Notes:
    """Collects the trainer's notes of the run."""

    notes: list[SteeringNote] = field(default_factory=list)
    tokens: int = 0

    def on_start(self, progress: Progress) -> None:
        """Do nothing: runs begin at step 0."""

    def on_steering(self, note: SteeringNote) -> None:
        self.notes.append(note)
        print(f"  {note.message}", flush=True)

    def on_step(self, metrics: StepMetrics) -> None:
        self.tokens = metrics.tokens
        if metrics.held_out_kl is not None:
            print(f"  step {metrics.step}: held-out KL {metrics.held_out_kl:.4f}, lr {metrics.lr:.2e}", flush=True)

    def poll_stop_request(self) -> StopRequest:
        return StopRequest.NONE


@dataclass(frozen=True)
class TrainedRun:
    """A finished run that has not been measured yet."""

    spec: JobSpec
    """With its defaults resolved."""
    start: Mapping[str, Tensor]
    """Trained tensors at the start, by name, as `end`."""
    end: Mapping[str, Tensor]
    """Trained tensors of the model that a job would publish."""
    tokens: int
    """Positions counted by the loss."""
    notes: tuple[SteeringNote, ...]


class TrainingRuns:
    """Training runs that share teacher and rows, and the start if their `swiftkv` sections are equal.

    Args:
        spec: teacher and data; the rest comes from each run's spec.
        directory: a new directory.
        answers: the teacher's answers, for data that asks for them.
    """

    def __init__(self, spec: JobSpec, directory: Path, answers: CompletionStore | None = None) -> None:
        directory.mkdir()
        self._directory = directory
        self.path = teacher_path(spec.model, directory)
        """Path of the teacher."""
        _, self.data = prepare(spec, directory / "rows", answers=answers)
        self._starts: dict[str, Checkpoint] = {}

    def train(self, spec: JobSpec, directory: Path | None) -> TrainedRun:
        """Calibrate and train. The model's tensors are stored in `directory`, which must be empty; None: the run ends
        at its start."""
        plan, _ = prepare(spec, self._directory / "rows")
        start, notes = self._start(plan.spec), _Notes()
        end = start if directory is None else self._train(plan.spec, plan.total_steps, start, directory, notes)
        return TrainedRun(plan.spec, start, end, notes.tokens, tuple(notes.notes))

    def load(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> Any:
        """Load a student with these tensors; it can also run as its teacher."""
        student = load_student(prepare(spec, self._directory / "rows")[0].spec, self.path)
        load_trained_tensors(student, tensors)
        return student.to(task_device(spec)).eval()

    def totals(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> Totals:
        """Compare a student with these tensors with its teacher, on the held-out rows."""
        device = task_device(spec)
        lazy = open_lazy(spec, self.path, device=device)
        measured = EvaluationModel(lazy, spec.distillation, sharded=False, device=device)
        measured.load_tensors(tensors)
        totals: Totals = measured(lambda student: Evaluation(student, self.data.held_out, spec.evaluation).compare(""))
        return totals

    def _start(self, spec: JobSpec) -> Checkpoint:
        key = json.dumps([spec.swiftkv.model_dump(), spec.training.seed], sort_keys=True)
        if key not in self._starts:
            directory = self._directory / f"start-{len(self._starts)}"
            directory.mkdir()
            calibrate(spec, self.path, self.data.train, directory, device=task_device(spec))
            self._starts[key] = Checkpoint.from_directory(directory)
        return self._starts[key]

    def _train(
        self,
        spec: JobSpec,
        total_steps: int,
        start: Checkpoint,
        directory: Path,
        notes: _Notes,
    ) -> Mapping[str, Tensor]:
        strategy = spread_fork(spec, self.path, start, device=task_device(spec))
        request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
        checkpoints = AttemptCheckpoints(open_store(str(directory)), request, keep=1)
        Trainer(
            strategy,
            self.data.train,
            Checkpointer(strategy, checkpoints, local_rank=0),
            spec,
            total_steps=total_steps,
            listener=notes,
            validation_rows=self.data.steering if len(self.data.steering) else None,
        ).run()
        key = checkpoints.model()
        assert key is not None, "a run that ends has saved its last step"
        return CheckpointTensors(directory / key)


class RunsByForm(dict[str, TrainingRuns]):
    """Runs by `decode_key_value`, on which the rows depend: with `own` a text is divided into a prompt and an answer.

    Args:
        spec, answers: as of `TrainingRuns`.
        directory: of all runs' files.
    """

    def __init__(self, spec: JobSpec, directory: Path, answers: CompletionStore) -> None:
        self._spec, self._directory, self._answers = spec, directory, answers

    def __missing__(self, form: str) -> TrainingRuns:
        document = self._spec.model_dump(mode="json", exclude_unset=True)
        swiftkv = document.get("swiftkv", {}) | {"decode_key_value": form}
        spec = JobSpec.model_validate(document | {"swiftkv": swiftkv})
        self[form] = TrainingRuns(spec, self._directory / form, self._answers)
        return self[form]


def point_spec(spec: JobSpec, point: str, args: argparse.Namespace, seed: int) -> JobSpec:
    """The spec of one point."""
    layers, group_size, *options = point.split(":")
    depth = {"num_key_value_layers": int(layers)} if layers.isdecimal() else {"prefill_layers": parse_layers(layers)}
    [start] = [option for option in options if option not in (TEACHER_OUTPUT, *FORMS)] or ["calibrated"]
    form = next((option for option in options if option in FORMS), spec.swiftkv.decode_key_value)
    own = TEACHER_OUTPUT not in options and int(group_size) > 1
    swiftkv = depth | {
        "key_value_group_size": int(group_size),
        "own_output_projection": own,
        "early_exit": args.early_exit,
        "initialization": start,
        "decode_key_value": form,
        "calibration_tokens": args.calibration_tokens or spec.swiftkv.calibration_tokens,
    }
    document = spec.model_dump(mode="json", exclude_unset=True)
    training = document["training"] | {"max_steps": max(args.steps, 1), "seed": seed}
    return JobSpec.model_validate(document | {"swiftkv": swiftkv, "training": training})


def name_of(point: str, args: argparse.Namespace, seed: int) -> str:
    """Return the file name of a point's results, made of all settings outside the spec that affect them."""
    tokens = f"-{args.calibration_tokens}" if args.calibration_tokens else ""
    return f"{point.replace(':', '-')}{'-exit' if args.early_exit else ''}{tokens}-{args.steps}-steps-{seed}"


def figures(totals: Totals) -> Row:
    """A student on held-out text, against its teacher."""
    ratio = totals.student.perplexity / totals.teacher.perplexity
    bins = {
        name: [one.model_dump() for one in quality_bins(sums)]
        for name, sums in (("by_position", totals.by_position), ("by_prompt_length", totals.by_prompt_length))
    }
    intervals = HeldOutIntervals.of(totals.samples)
    return (
        totals.student.model_dump()
        | {"perplexity_ratio": ratio, "positions": totals.num_positions}
        | {"intervals": None if intervals is None else intervals.model_dump()}
        | bins
    )


def needles_found(runs: TrainingRuns, run: TrainedRun, needles: list[Needles], *, swiftkv: bool) -> dict[int, float]:
    """Share of the numbers that the student, or its teacher, finds, by prompt length."""
    model = runs.load(run.spec, run.end).swiftkv(swiftkv)
    return {one.length: one.share_found(model) for one in needles}


def measure(runs: TrainingRuns, run: TrainedRun, needles: list[Needles]) -> Row:
    """Measure all figures of a point."""
    start, end = runs.totals(run.spec, run.start), runs.totals(run.spec, run.end)
    exits = exit_bins(end.exit_head)
    return {
        "swiftkv": run.spec.swiftkv.model_dump(mode="json"),
        "learning_rate": run.spec.optimizer.learning_rate,
        "tokens": run.tokens,
        "notes": [note.message for note in run.notes],
        "start": figures(start),
        "end": figures(end),
        "needles": needles_found(runs, run, needles, swiftkv=True),
        "exit_head": None if exits is None else [one.model_dump() for one in exits],
    }


def spread(rows: Sequence[Row]) -> Row:
    """KL of a point over its seeds."""
    values = {when: [row[when]["kl"] for row in rows] for when in ("start", "end")}
    return {
        when: {"mean": statistics.mean(some), "lowest": min(some), "highest": max(some)}
        for when, some in values.items()
    }


def main() -> int:
    args = parse_arguments()
    spec = load_spec(args.spec)
    if args.device == "cuda":
        spec = spec.model_copy(update={"resources": spec.resources.model_copy(update={"gpus_per_worker": 1})})
    args.directory.mkdir(parents=True, exist_ok=True)
    store_uri = str(args.directory.resolve())
    request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
    rows: dict[str, list[Row]] = {}
    teacher = args.directory / "teacher-needles.json"
    with tempfile.TemporaryDirectory(dir=args.directory) as name, one_worker(Path(name)):
        if any(source.complete is not None for source in spec.data.sources):
            write(request, store_uri, worker=0)
        by_form = RunsByForm(spec, Path(name), AttemptAnswers(open_store(store_uri), request))
        tokenizer = load_tokenizer(spec, by_form[spec.swiftkv.decode_key_value].path)
        needles = [Needles.create(tokenizer, length, args.needle_samples) for length in args.needle_lengths]
        for seed, point in ((seed, point) for seed in args.seeds for point in args.points):
            done = args.directory / f"{name_of(point, args, seed)}.json"
            if not done.is_file():
                with tempfile.TemporaryDirectory(dir=name) as trained:
                    settled = point_spec(spec, point, args, seed)
                    runs = by_form[settled.swiftkv.decode_key_value]
                    run = runs.train(settled, Path(trained) if args.steps else None)
                    write_report(measure(runs, run, needles), done)
                    if needles and not teacher.is_file():
                        write_report(needles_found(runs, run, needles, swiftkv=False), teacher)
            rows.setdefault(point, []).append(json.loads(done.read_text(encoding="utf-8")))
            print_row(point, rows[point][-1])
    found = json.loads(teacher.read_text(encoding="utf-8")) if needles else {}
    print(f"needles that the teacher finds: {found}", flush=True)
    over_seeds = {point: spread(some) for point, some in rows.items()}
    print(json.dumps(over_seeds), flush=True)
    report = {"points": rows, "over_seeds": over_seeds, "teacher_needles": found}
    write_report(conditions(args) | report, args.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("directory", type=Path, help="where answers and finished points are kept")
    parser.add_argument("--spec", type=Path, default=SPEC, help="job spec of the teacher, the data and the loss")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="l:g[:START][:teacher-output][:own]")
    parser.add_argument("--steps", type=int, default=150, help="training steps; 0: measure only the starts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--calibration-tokens", type=int, help="tokens that calibrate the start; default: as in the spec"
    )
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--needle-samples", type=int, default=20)
    parser.add_argument("--early-exit", action="store_true", help="also train an exit head at layer l")
    return parser.parse_args()


def print_row(point: str, row: Row) -> None:
    start, end = row["start"], row["end"]
    found = ", ".join(f"{share:.0%} of {length}" for length, share in row["needles"].items())
    print(
        f"{point:>6}  KL {start['kl']:.3f} -> {end['kl']:.3f}, {end['perplexity_ratio']:.3f}x, agreement "
        f"{end['top1_agreement']:.1%}, {row['tokens']:,} tokens; needles {found}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
