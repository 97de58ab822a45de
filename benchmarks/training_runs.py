"""Training runs in this process, on one teacher and one set of rows.

They are the trainer's own, with rate search, guard and best state as in a job; held-out KL is measured at both ends.
"""

from __future__ import annotations

import json
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
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.course import CourseNote, Progress
from swiftkv_platform.distillation.fork import Fork, load_trained
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.pieces import TrainedTensors
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer, parallelize
from swiftkv_platform.evaluation.quality import Totals
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.prepare import prepare
from swiftkv_platform.jobs.worker.setup import calibrate, compute_dtype, load_student, open_lazy, teacher_path
from swiftkv_platform.model.checkpoint import StoredTensors
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store


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

    def load(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> Any:
        """A student with these tensors, which can run as its teacher too."""
        student = load_student(prepare(spec, self._directory / "rows")[0].spec, self.path)
        load_trained(student, tensors)
        return student.eval()

    def totals(self, spec: JobSpec, tensors: Mapping[str, Tensor]) -> Totals:
        """A student with these tensors against its teacher, over the rows that are held out."""
        lazy = open_lazy(spec, self.path)
        measured = MeasuredStudent(lazy, spec.distillation, sharded=False, device=torch.device("cpu"))
        measured.start_from(tensors)
        totals: Totals = measured(lambda student: Evaluation(student, self.data.held_out, spec.evaluation).compare(""))
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
    ) -> Mapping[str, Tensor]:
        student, dtype = load_student(spec, self.path), compute_dtype(spec)
        load_trained(student, start)
        fork = Fork(student, spec.distillation, dtype=dtype)
        parallel = parallelize(fork, spec, dtype=dtype, device=torch.device("cpu"))
        request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
        checkpoints = AttemptCheckpoints(open_store(str(directory)), request, keep=1)
        Trainer(
            parallel,
            self.data.train,
            Checkpointer(parallel, checkpoints, local_rank=0),
            spec,
            total_steps=total_steps,
            listener=notes,
            held_out=self.data.steering if len(self.data.steering) else None,
        ).run()
        key = checkpoints.model()
        assert key is not None, "a run that ends has saved its last step"
        return TrainedTensors(directory / key)
