"""Students of one teacher at several depths and group sizes, at equal tokens over the same rows.

    python -m benchmarks.depths DIRECTORY [--spec benchmarks/configs/smollm2-depths.yaml]
                                [--points 22:1 15:1 15:2 11:1] [--steps 150] [--seeds 0]
                                [--needle-lengths 512 1024] [--needle-samples 20] [--early-exit] [--output depths.json]
                                [--tasks builtin:ifeval --task-data DIRECTORY]
    python -m benchmarks.depths DIRECTORY --spec benchmarks/configs/python-5m-depths.yaml --needle-lengths \\
                                --points 6:1 6:2:teacher-output 6:2 6:4 --steps 250 --seeds 0 1 2

The spec names the teacher, the data and the loss. A point `l:g[:START][:teacher-output][:own]` replaces its `swiftkv`
section, except `decode_key_value`, which `own` or `shared` overrides. `:SECTION.FIELD=VALUE` sets another field of the
point's spec, such as `swiftkv.deep_tail=64` or `distillation.trainable=all`; `:steps=0` trains a point for another
number of steps. Instead of l, a point may list the layers that
prompts run through, as 0-2,4,6-16. Students whose layers share a KV cache layer have their own output projections
unless the point says `teacher-output`; `--early-exit` also trains an exit head. Runs use a job's trainer in this
process, with rate search, guard and best state; `--steps 0` only measures starts. A seed sets the order of the rows and
the choice of calibration rows.

A point has KL, agreement and perplexity ratio on the held-out rows, before and after training, with intervals of 95% by
text, and by position in the answer and by prompt length; the share of numbers found in prompts of each length by
student and teacher; and with an exit head its agreement by confidence (the paper's figure D.1). With `--tasks` it has
the scores of both on lm-evaluation-harness tasks. DIRECTORY keeps the teacher's answers, finished points, and the
newest checkpoint and the measurements of a point that is not finished, with which the next run continues.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from benchmarks.common import describe_conditions, make_benchmark_parser, write_report
from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.data.completions import CompletionStore
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.model import load_trained_tensors
from swiftkv_platform.distillation.partial_reads import CheckpointTensors
from swiftkv_platform.distillation.steering import SteeringNote, TrainingProgress
from swiftkv_platform.distillation.strategy import EvaluationModel
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.evaluation.analysis import Needles
from swiftkv_platform.evaluation.harness.run import run_tasks
from swiftkv_platform.evaluation.harness.tasks import resolve_tasks
from swiftkv_platform.evaluation.paired import HeldOutIntervals
from swiftkv_platform.evaluation.parts import NoResultStore, load_or_measure
from swiftkv_platform.evaluation.quality import DEFAULT_WORKERS, HeldOutTotals
from swiftkv_platform.evaluation.report import build_exit_bins, build_quality_bins
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints
from swiftkv_platform.jobs.worker.measure import StudentEvaluator
from swiftkv_platform.jobs.worker.prepare import AttemptAnswers, prepare_run, write_worker_answers
from swiftkv_platform.jobs.worker.setup import (
    calibrate,
    distribute_model,
    get_task_device,
    load_student,
    load_tokenizer,
    open_lazy_student,
    resolve_teacher,
)
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.sources import UNRESTRICTED
from swiftkv_platform.specs import JobSpec, load_spec
from swiftkv_platform.specs.evaluation import TaskSpec
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.student_shape import parse_layers

SPEC_FILE = Path(__file__).parent / "configs" / "smollm2-depths.yaml"
POINTS = ("22:1", "15:1", "15:2", "11:1")
TEACHER_OUTPUT = "teacher-output"
DECODE_MODES = ("own", "shared")
"""Values of `swiftkv.decode_key_value` that a point may name."""
PointResult = dict[str, Any]


@contextmanager
def init_single_process_group(directory: Path) -> Iterator[None]:
    """Open a process group with this process only."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _TrainingListener:
    """Collects and prints the trainer's notes."""

    notes: list[SteeringNote] = field(default_factory=list)
    tokens: int = 0

    def on_start(self, progress: TrainingProgress) -> None:
        self.tokens = progress.tokens

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
    """A finished run, not yet measured."""

    spec: JobSpec
    """Spec of the run, with resolved defaults."""
    initial_tensors: Mapping[str, Tensor]
    """Trained tensors by name, before training."""
    final_tensors: Mapping[str, Tensor]
    """Trained tensors by name, of the model that a job would publish."""
    tokens: int
    """Number of loss targets."""
    notes: tuple[SteeringNote, ...]


class TrainingRuns:
    """Training runs that share the teacher and the rows, and the start of equal `swiftkv` sections.

    Args:
        spec: teacher and data; the rest comes from each run's spec.
        directory: a new directory.
        answers: the teacher's completions, for sources with `complete`.
    """

    def __init__(self, spec: JobSpec, directory: Path, answers: CompletionStore | None = None) -> None:
        directory.mkdir()
        self._directory = directory
        self.path = resolve_teacher(spec.model, directory)
        """Path of the teacher."""
        _, self.data = prepare_run(spec, directory / "rows", answers=answers)
        self._starts: dict[str, Checkpoint] = {}

    def train(self, spec: JobSpec, directory: Path | None) -> TrainedRun:
        """Calibrate and train, from the newest checkpoint in `directory` if it has one. The model's tensors are stored
        there; None: do not train."""
        plan, _ = prepare_run(spec, self._directory / "rows")
        start, notes = self._calibrate_start(plan.spec), _TrainingListener()
        end = start if directory is None else self._train(plan.spec, plan.total_steps, start, directory, notes)
        return TrainedRun(plan.spec, start, end, notes.tokens, tuple(notes.notes))

    def load(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> Any:
        """Load a student with these tensors and its teacher's projections."""
        student = load_student(prepare_run(spec, self._directory / "rows")[0].spec, self.path)
        load_trained_tensors(student, tensors)
        return student.to(get_task_device(spec)).eval()

    def compare_on_held_out(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> HeldOutTotals:
        """Compare a student with these tensors to its teacher, on the held-out rows."""
        device = get_task_device(spec)
        lazy = open_lazy_student(spec, self.path, device=device)
        measured = EvaluationModel(lazy, spec.distillation, sharded=False, device=device)
        measured.load_tensors(tensors)
        totals: HeldOutTotals = measured(
            lambda student: StudentEvaluator(student, self.data.held_out, spec.evaluation).compare_teacher_and_student(
                ""
            )
        )
        return totals

    def _calibrate_start(self, spec: JobSpec) -> Checkpoint:
        key = json.dumps([spec.swiftkv.model_dump(), spec.training.seed], sort_keys=True)
        if key not in self._starts:
            directory = self._directory / f"start-{len(self._starts)}"
            directory.mkdir()
            calibrate(spec, self.path, self.data.train, directory, device=get_task_device(spec))
            self._starts[key] = Checkpoint.from_directory(directory)
        return self._starts[key]

    def _train(
        self, spec: JobSpec, total_steps: int, start: Checkpoint, directory: Path, notes: _TrainingListener
    ) -> Mapping[str, Tensor]:
        strategy = distribute_model(spec, self.path, start, device=get_task_device(spec))
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
        key = checkpoints.find_model()
        assert key is not None, "a run that ends has saved its last step"
        return CheckpointTensors(directory / key)


@dataclass(frozen=True)
class StoredParts(NoResultStore):
    """Stores a point's results one by one, so that an interrupted point repeats none, and the teacher's answers to
    tasks, which all points share."""

    of_point: Path
    of_teacher: Path

    def load_result(self, name: str, /) -> bytes | None:
        file = self._get_file(name)
        return file.read_bytes() if file.is_file() else None

    def store_result(self, name: str, data: bytes) -> None:
        file = self._get_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def report_progress(self, name: str, done: int, total: int) -> None:
        if done == total:
            print(f"  {name} is measured", flush=True)

    def _get_file(self, name: str) -> Path:
        return (self.of_teacher if "-teacher-" in name else self.of_point) / name.replace("/", "_")


class RunsByDecodeKeyValue(dict[str, TrainingRuns]):
    """Runs by `decode_key_value`. With `own`, the rows differ: the loss excludes a leading prompt of each text.

    Args:
        spec, answers: as for `TrainingRuns`.
        directory: for the files of all runs.
    """

    def __init__(self, spec: JobSpec, directory: Path, answers: CompletionStore) -> None:
        self._spec, self._directory, self._answers = spec, directory, answers

    def __missing__(self, decode_key_value: str) -> TrainingRuns:
        document = self._spec.model_dump(mode="json", exclude_unset=True)
        swiftkv = document.get("swiftkv", {}) | {"decode_key_value": decode_key_value}
        spec = JobSpec.model_validate(document | {"swiftkv": swiftkv})
        self[decode_key_value] = TrainingRuns(spec, self._directory / decode_key_value, self._answers)
        return self[decode_key_value]


def make_point_spec(spec: JobSpec, point: str, args: argparse.Namespace, seed: int) -> JobSpec:
    layers, group_size, *options = point.split(":")
    changes = dict(option.split("=", 1) for option in options if "=" in option)
    options = [option for option in options if "=" not in option]
    depth = {"num_key_value_layers": int(layers)} if layers.isdecimal() else {"prefill_layers": parse_layers(layers)}
    [start] = [option for option in options if option not in (TEACHER_OUTPUT, *DECODE_MODES)] or ["calibrated"]
    decode_key_value = next((option for option in options if option in DECODE_MODES), spec.swiftkv.decode_key_value)
    own = TEACHER_OUTPUT not in options and int(group_size) > 1
    swiftkv = depth | {
        "key_value_group_size": int(group_size),
        "own_output_projection": own,
        "early_exit": args.early_exit,
        "initialization": start,
        "decode_key_value": decode_key_value,
        "calibration_tokens": args.calibration_tokens or spec.swiftkv.calibration_tokens,
    }
    document = spec.model_dump(mode="json", exclude_unset=True)
    changes.pop("steps", None)
    steps = count_steps(point, args)
    training = document["training"] | {"max_steps": max(steps, 1), "seed": seed}
    document |= {"swiftkv": swiftkv, "training": training}
    for name, value in changes.items():
        section, field = name.split(".")
        document[section] = document.get(section, {}) | {field: yaml.safe_load(value)}
    return JobSpec.model_validate(document)


def count_steps(point: str, args: argparse.Namespace) -> int:
    found = [int(option.removeprefix("steps=")) for option in point.split(":") if option.startswith("steps=")]
    return found[0] if found else args.steps


def make_result_name(point: str, args: argparse.Namespace, seed: int) -> str:
    """Return the file name of a point's results: all settings that are not in the spec."""
    tokens = f"-{args.calibration_tokens}" if args.calibration_tokens else ""
    return f"{point.replace(':', '-')}{'-exit' if args.early_exit else ''}{tokens}-{args.steps}-steps-{seed}"


def summarize_totals(totals: HeldOutTotals) -> PointResult:
    """Summarize a student's comparison with its teacher on held-out text."""
    ratio = totals.student.perplexity / totals.teacher.perplexity
    bins = {
        name: [one.model_dump() for one in build_quality_bins(sums)]
        for name, sums in (("by_position", totals.by_position), ("by_prompt_length", totals.by_prompt_length))
    }
    intervals = HeldOutIntervals.from_samples(totals.samples)
    return (
        totals.student.model_dump()
        | {"perplexity_ratio": ratio, "positions": totals.num_positions}
        | {"intervals": None if intervals is None else intervals.model_dump()}
        | bins
    )


def measure_needles(runs: TrainingRuns, run: TrainedRun, needles: list[Needles], *, swiftkv: bool) -> dict[int, float]:
    model = runs.load(run.spec, run.final_tensors).swiftkv(swiftkv)
    return {one.length: one.measure_share_found(model) for one in needles}


def measure_tasks(
    runs: TrainingRuns, run: TrainedRun, parts: StoredParts, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return teacher's and student's scores of each task, with the interval of their difference."""
    if not args.tasks:
        return []
    named = [{"name": name, "data_dir": args.task_data} for name in args.tasks]
    evaluation = run.spec.evaluation.model_copy(update={"task_limit": args.task_limit})
    student, tokenizer = runs.load(run.spec, run.final_tensors), load_tokenizer(run.spec, runs.path)
    access = replace(UNRESTRICTED, code_tasks=args.allow_code_tasks)
    tasks = resolve_tasks([TaskSpec.model_validate(task) for task in named], access=access)
    results = run_tasks(student, tokenizer, tasks, evaluation, parts=parts)
    return [score.model_dump(mode="json") for score in results.scores]


def measure_point(
    runs: TrainingRuns, run: TrainedRun, needles: list[Needles], parts: StoredParts, args: argparse.Namespace
) -> PointResult:
    start, end = (
        load_or_measure(
            parts, DEFAULT_WORKERS, name, HeldOutTotals, partial(runs.compare_on_held_out, run.spec, tensors)
        )
        for name, tensors in (("start", run.initial_tensors), ("end", run.final_tensors))
    )
    found = load_or_measure(
        parts, DEFAULT_WORKERS, "needles", dict[int, float], partial(measure_needles, runs, run, needles, swiftkv=True)
    )
    exits = build_exit_bins(end.exit_head)
    return {
        "swiftkv": run.spec.swiftkv.model_dump(mode="json"),
        "learning_rate": run.spec.optimizer.learning_rate,
        "tokens": run.tokens,
        "notes": [note.message for note in run.notes],
        "start": summarize_totals(start),
        "end": summarize_totals(end),
        "needles": found,
        "tasks": measure_tasks(runs, run, parts, args),
        "exit_head": None if exits is None else [one.model_dump() for one in exits],
    }


def summarize_seeds(rows: Sequence[PointResult]) -> PointResult:
    """Return the mean and range of a point's KL over its seeds."""
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
    rows: dict[str, list[PointResult]] = {}
    teacher = args.directory / "teacher-needles.json"
    with tempfile.TemporaryDirectory(dir=args.directory) as name, init_single_process_group(Path(name)):
        if any(source.complete is not None for source in spec.data.sources):
            write_worker_answers(request, store_uri, worker=0)
        runs_by_value = RunsByDecodeKeyValue(spec, Path(name), AttemptAnswers(open_store(store_uri), request))
        tokenizer = load_tokenizer(spec, runs_by_value[spec.swiftkv.decode_key_value].path)
        needles = [Needles.create(tokenizer, length, args.needle_samples) for length in args.needle_lengths]
        # train and measure each point that has no stored result
        for seed, point in ((seed, point) for seed in args.seeds for point in args.points):
            done = args.directory / f"{make_result_name(point, args, seed)}.json"
            if not done.is_file():
                point_spec, training = make_point_spec(spec, point, args, seed), done.with_suffix(".training")
                runs = runs_by_value[point_spec.swiftkv.decode_key_value]
                is_trained = count_steps(point, args) > 0
                run = runs.train(point_spec, training if is_trained else None)
                if needles and not teacher.is_file():
                    write_report(measure_needles(runs, run, needles, swiftkv=False), teacher)
                parts = StoredParts(training / "measured", args.directory / "teacher-answers")
                write_report(measure_point(runs, run, needles, parts, args), done)
                shutil.rmtree(training)
            rows.setdefault(point, []).append(json.loads(done.read_text(encoding="utf-8")))
            print_row(point, rows[point][-1])
    found = json.loads(teacher.read_text(encoding="utf-8")) if needles else {}
    print(f"needles that the teacher finds: {found}", flush=True)
    over_seeds = {point: summarize_seeds(some) for point, some in rows.items()}
    print(json.dumps(over_seeds), flush=True)
    report = {"points": rows, "over_seeds": over_seeds, "teacher_needles": found}
    write_report(describe_conditions(args) | report, args.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for completions and finished points")
    parser.add_argument("--spec", type=Path, default=SPEC_FILE, help="job spec of the teacher, the data and the loss")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--points", nargs="+", default=POINTS, metavar="l:g[:START][:teacher-output][:own][:FIELD=VALUE]"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps; 0: measure only the starts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--calibration-tokens", type=int, help="calibration tokens; default: the spec's")
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--needle-samples", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=[], help="lm-evaluation-harness tasks, such as builtin:ifeval")
    parser.add_argument("--task-data", help="directory with the tasks' files, or with one directory for each task")
    parser.add_argument("--allow-code-tasks", action="store_true", help="allow tasks that run answers as code")
    parser.add_argument("--task-limit", type=int, help="samples of each task; default: all")
    parser.add_argument("--early-exit", action="store_true", help="also train an exit head at layer l")
    return parser.parse_args()


def print_row(point: str, row: PointResult) -> None:
    start, end = row["start"], row["end"]
    found = ", ".join(f"{share:.0%} of {length}" for length, share in row["needles"].items())
    print(
        f"{point:>6}  KL {start['kl']:.3f} -> {end['kl']:.3f}, {end['perplexity_ratio']:.3f}x, agreement "
        f"{end['top1_agreement']:.1%}, {row['tokens']:,} tokens; needles {found}",
        flush=True,
    )
    for task in row.get("tasks", ()):
        print(f"        {json.dumps(task)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
