"""Training runs in this process, on one teacher and one set of rows.

They are the trainer's own, with rate search, guard and best state as in a job; held-out KL is measured at both ends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.data.completions import AnswerStore
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.distillation.checkpoint import Checkpointer, Progress, TrainedTensors
from swiftkv_platform.distillation.course import CourseNote
from swiftkv_platform.distillation.fork import Fork, load_trained
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import parallelize
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.evaluation.quality import Totals
from swiftkv_platform.jobs.attempt.checkpoints import AttemptCheckpoints
from swiftkv_platform.jobs.attempt.downloads import teacher_path
from swiftkv_platform.jobs.worker.calibrate import calibrate
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.prepare import compute_dtype, load_student, open_lazy, prepare
from swiftkv_platform.model.checkpoint import StoredTensors
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store


def python_spec(
    name: str, args: argparse.Namespace, seed: int, *, short_length: int, model: dict[str, Any], swiftkv: dict[str, Any]
) -> dict[str, Any]:
    """A job over the standard library's sources, 8 rows of 256 tokens a step; with `args.short` smaller ones.

    It names neither rate nor warm-up nor anything else that decides how well a run goes, but for its length.
    """
    length, batch_size = (short_length, 2) if args.short else (256, 8)
    return {
        "name": name,
        "model": model,
        "swiftkv": {**swiftkv, "calibration_tokens": 1024 if args.short else 16384},
        "data": {"max_length": length, "sources": [{"name_or_path": "builtin:python-stdlib"}]},
        "training": {"batch_size": batch_size, "micro_batch_size": batch_size, "max_steps": args.steps, "seed": seed},
        "sharding": {"strategy": "ddp"},
        "resources": {"num_workers": 1},
        "evaluation": {"max_tokens": args.evaluation_tokens},
    }


@contextmanager
def one_worker(directory: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Notes:
    """Keeps what the trainer tells of the run's course."""

    notes: list[CourseNote] = field(default_factory=list)
    tokens: int = 0

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


@dataclass(frozen=True)
class FinishedRun:
    """A run from its calibrated start to the model that a job would publish."""

    spec: JobSpec
    """With its defaults resolved."""
    start_kl: float
    """Held-out KL, nats, of all that the evaluation takes, as `end_kl`."""
    end_kl: float
    tokens: int
    """Positions that the loss counted."""
    notes: tuple[CourseNote, ...]


@dataclass(frozen=True)
class TrainedRun:
    """A run that has ended and is not measured yet."""

    spec: JobSpec
    """With its defaults resolved."""
    start: Mapping[str, Tensor]
    """Trained tensors at the start, by name, as `end`."""
    end: Mapping[str, Tensor]
    """Those of the model that a job would publish."""
    tokens: int
    """Positions that the loss counted."""
    notes: tuple[CourseNote, ...]


class TrainingRuns:
    """Runs that share their teacher and rows, and where their `swiftkv` sections are equal their start.

    Args:
        spec: the teacher and the data; the rest is each run's own.
        directory: a new one.
        answers: what the teacher has written, for data that asks for it.
    """

    def __init__(self, spec: JobSpec, directory: Path, answers: AnswerStore | None = None) -> None:
        directory.mkdir()
        self._directory = directory
        self.path = teacher_path(spec.model, directory)
        """The teacher."""
        _, self.data = prepare(spec, directory / "rows", answers=answers)
        self._starts: dict[str, StoredTensors] = {}

    def run(self, spec: JobSpec) -> FinishedRun:
        """Calibrate, train and measure."""
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            run = self.train(spec, Path(name))
            start_kl, end_kl = self.kl(run.spec, run.start), self.kl(run.spec, run.end)
        return FinishedRun(run.spec, start_kl, end_kl, run.tokens, run.notes)

    def train(self, spec: JobSpec, directory: Path) -> TrainedRun:
        """Calibrate and train; what ends up in the model lies in `directory`, which is empty before."""
        plan, _ = prepare(spec, self._directory / "rows")
        start, notes = self._start(plan.spec), _Notes()
        end = self._train(plan.spec, plan.total_steps, start, directory, notes)
        return TrainedRun(plan.spec, start, end, notes.tokens, tuple(notes.notes))

    def untrained(self, spec: JobSpec) -> TrainedRun:
        """Calibrate alone: the run ends where it starts."""
        plan, _ = prepare(spec, self._directory / "rows")
        start = self._start(plan.spec)
        return TrainedRun(plan.spec, start, start, tokens=0, notes=())

    def student(self, spec: JobSpec, rows: PackedRows, directory: Path) -> Mapping[str, Tensor]:
        """Trained tensors of a run over `rows` instead of the spec's own, to the last step, in a new `directory`."""
        plan, _ = prepare(spec, self._directory / "rows")
        directory.mkdir()
        return self._train(plan.spec, plan.total_steps, self._start(plan.spec), directory, _Notes(), rows)

    def load(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> Any:
        """A student with these tensors, which can run as its teacher too."""
        student = load_student(prepare(spec, self._directory / "rows")[0].spec, self.path)
        load_trained(student, tensors)
        return student.eval()

    def kl(self, spec: JobSpec, tensors: Mapping[str, Tensor], rows: PackedRows | None = None) -> float:
        """KL(teacher || student), nats, over `rows`; None: over those that are held out."""
        return self.totals(spec, tensors, rows).student.kl

    def totals(self, spec: JobSpec, tensors: Mapping[str, Tensor], rows: PackedRows | None = None) -> Totals:
        """A student with these tensors against its teacher, over the same rows as `kl`."""
        measured_rows = self.data.held_out if rows is None else rows
        lazy = open_lazy(spec, self.path)
        measured = MeasuredStudent(lazy, spec.distillation, sharded=False, device=torch.device("cpu"))
        measured.start_from(tensors)
        totals: Totals = measured(lambda student: Evaluation(student, measured_rows, spec.evaluation).compare(""))
        return totals

    def _start(self, spec: JobSpec) -> StoredTensors:
        key = json.dumps([spec.swiftkv.model_dump(), spec.training.seed], sort_keys=True)
        if key not in self._starts:
            directory = self._directory / f"start-{len(self._starts)}"
            directory.mkdir()
            calibrate(spec, self.path, self.data.train, directory, device="cpu")
            self._starts[key] = StoredTensors(directory)
        return self._starts[key]

    def _train(
        self,
        spec: JobSpec,
        total_steps: int,
        start: StoredTensors,
        directory: Path,
        notes: _Notes,
        rows: PackedRows | None = None,
    ) -> Mapping[str, Tensor]:
        student, dtype = load_student(spec, self.path), compute_dtype(spec)
        load_trained(student, start)
        fork = Fork(student, spec.distillation, dtype=dtype)
        parallel = parallelize(fork, spec, dtype=dtype, device=torch.device("cpu"))
        request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
        checkpoints = AttemptCheckpoints(open_store(str(directory)), request, keep=1)
        Trainer(
            parallel,
            self.data.train if rows is None else rows,
            Checkpointer(parallel, checkpoints, local_rank=0),
            spec,
            total_steps=total_steps,
            listener=notes,
            held_out=self.data.held_out if rows is None else None,
        ).run()
        key = checkpoints.model()
        assert key is not None, "a run that ends has saved its last step"
        return TrainedTensors(directory / key)
