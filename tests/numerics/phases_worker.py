"""Calibration, training, evaluation and publishing of a job by real processes. A separate module, so that spawned
workers can import it."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import swiftkv_platform.jobs.worker.evaluate as evaluation
import swiftkv_platform.jobs.worker.measure as measure
import swiftkv_platform.jobs.worker.setup as setup
import swiftkv_platform.model.weights.lazy_student as weights
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest, Parent
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.strategy import EvaluationModel
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer, parallelize
from swiftkv_platform.evaluation.continuations import compare_continuations
from swiftkv_platform.evaluation.harness.run import run_tasks
from swiftkv_platform.evaluation.harness.tasks import resolve_tasks
from swiftkv_platform.evaluation.quality import evaluate
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints, PreparedInputs, StoredResults
from swiftkv_platform.jobs.worker.evaluate import evaluate_and_publish
from swiftkv_platform.jobs.worker.setup import (
    calibrate,
    create_shared_workspace,
    get_compute_dtype,
    load_tokenizer,
    open_lazy_student,
    set_up_process,
)
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.writing import MAX_SHARD_BYTES, write_model_shards
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import open_store
from tests.numerics.distillation_worker import Recorder, tiny_rows
from tests.numerics.spawning import run_in_group

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One job, and the directory that it writes to."""

    directory: str
    teacher: str
    sharded: bool = True
    """Evaluate with the model sharded, as when it does not fit one worker."""
    num_samples: int = 60
    prefill_rounds: int = 5
    """Number of forward passes; the prefill time is their median."""
    max_file_bytes: int = MAX_SHARD_BYTES
    """Largest size of a weight file; a worker holds one file in memory while it writes it."""
    killed_after: str | None = None
    """Name of the part of the evaluation after which the first worker is killed."""
    spec: dict[str, Any] = field(default_factory=dict)
    parent: Parent | None = None

    @property
    def request(self) -> AttemptRequest:
        sections: dict[str, Any] = {
            "model": {"name_or_path": self.teacher, "dtype": "float32"},
            "swiftkv": {"num_key_value_layers": 2, "key_value_group_size": 2, "calibration_tokens": 1024},
            "data": {"max_length": 24},
            "training": {"batch_size": 8, "max_steps": 3},
            "optimizer": {"learning_rate": 1e-3},
            "evaluation": {"max_tokens": 512, "continuations": 6, "continuation_tokens": 4, "max_drop": None},
            "resources": {"num_workers": 4},
            "tracking": {"wandb": {"mode": "disabled"}},
        }
        merged = {key: sections.get(key, {}) | self.spec.get(key, {}) for key in sections | self.spec}
        spec = JobSpec.model_validate({**merged, "name": "phases"})
        return AttemptRequest(job_id="j", attempt=1, spec=spec, run_id="r", parent=self.parent)


@dataclass(frozen=True)
class Outcome:
    """Results of the first worker, and the memory growth of all workers."""

    losses: list[dict[str, float]]
    manifest: Manifest | None
    grown_bytes: list[dict[str, int]]
    """By worker and phase, the peak of anonymous memory above its size before the first phase."""


class AnonymousMemory:
    """Measures this process's anonymous resident memory (`RssAnon`), which leaves out mapped files."""

    def __init__(self) -> None:
        self.grown: dict[str, int] = {}
        self._before = self._now()

    @contextmanager
    def watched(self, phase: str) -> Iterator[None]:
        done, most = threading.Event(), [0]

        def look() -> None:
            while not done.wait(0.005):
                most[0] = max(most[0], self._now() - self._before)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.grown[phase] = most[0]

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        raise AssertionError("Linux says how much anonymous memory a process has")


@contextmanager
def in_this_process() -> Iterator[None]:
    """Restore the module settings that the phases change, since they run in this process and not in their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "return_freed_memory", lambda: None)
        for module, name in (
            (evaluation, "MAX_MODEL_MEMORY_FRACTION"),
            (measure, "_PREFILL_ROUNDS"),
            (weights, "write_model_shards"),
        ):
            patch.setattr(module, name, getattr(module, name))
        yield


def run_phases(case: Case) -> Outcome:
    """Run all phases over the default process group."""
    trained = run_training(case)
    return replace(run_evaluation(case), losses=trained.losses)


def run_training(case: Case) -> Outcome:
    """Calibrate and train, which a job's workers do in the same processes."""
    request, directory = case.request, Path(case.directory)
    set_up_process(request.spec)
    spec, workers, memory = request.spec, Workers(), AnonymousMemory()
    rows = tiny_rows(case.num_samples)
    with memory.watched("calibrate"):
        start = directory / "start"
        if workers.is_first:
            start.mkdir(parents=True)
        workers.gather(None)
        calibrate(spec, case.teacher, rows, start, device=CPU)
        workers.gather(None)
    checkpoints = AttemptCheckpoints(open_store(str(directory / "store")), request, keep=1)
    with memory.watched("train"):
        steps = _train(case, rows, start, checkpoints)
    return Outcome([step.losses for step in steps], None, workers.gather(memory.grown))


def _train(case: Case, rows: PackedRows, start: Path, checkpoints: AttemptCheckpoints) -> list[StepMetrics]:
    spec = case.request.spec
    lazy = open_lazy_student(spec, case.teacher, Checkpoint.from_directory(start))
    distillation_model = DistillationModel(lazy.model, spec.distillation, dtype=get_compute_dtype(spec))
    lazy.map_parameters(distillation_model)
    strategy = parallelize(distillation_model, spec, dtype=get_compute_dtype(spec), device=CPU, weights=lazy)
    listener = Recorder()
    checkpointer = Checkpointer(strategy, checkpoints, local_rank=dist.get_rank())
    Trainer(strategy, rows, checkpointer, spec, total_steps=spec.training.max_steps, listener=listener).run()
    return listener.steps


def run_evaluation(case: Case) -> Outcome:
    """Evaluate the last checkpoint of the case with the start beside it. With `case.killed_after`, the first worker
    dies as soon as that part is stored."""
    request, directory = case.request, Path(case.directory)
    rows, store = tiny_rows(case.num_samples), open_store(str(directory / "store"))
    workers, memory = Workers(), AnonymousMemory()
    evaluation.MAX_MODEL_MEMORY_FRACTION = 0.0 if case.sharded else 1.0
    measure._PREFILL_ROUNDS = case.prefill_rounds
    weights.write_model_shards = partial(write_model_shards, max_shard_bytes=case.max_file_bytes)
    prepared = PreparedInputs(
        PreparedData(rows, rows, rows, None, "rows"), Checkpoint.from_directory(directory / "start")
    )  # type: ignore[arg-type]
    newest = AttemptCheckpoints(store, request, keep=1).find_newest() if workers.is_first else None
    checkpoint = workers.broadcast_from_first(newest)
    keep = StoredResults.store_result

    def store_result(self: StoredResults, name: str, data: bytes) -> None:
        keep(self, name, data)
        if name == case.killed_after:
            os._exit(9)

    StoredResults.store_result = store_result  # type: ignore[method-assign]
    try:
        with memory.watched("evaluate"):
            manifest = evaluate_and_publish(request, store.uri, checkpoint, prepared)
    finally:
        StoredResults.store_result = keep  # type: ignore[method-assign]
    return Outcome([], workers.broadcast_from_first(manifest), workers.gather(memory.grown))


def count_flops(case: Case) -> list[int]:
    """Return each worker's FLOPs for the evaluation's text, continuations and tasks, with the whole model on each."""
    spec, workers, rows = case.request.spec, Workers(), tiny_rows(case.num_samples)
    measured = EvaluationModel(open_lazy_student(spec, case.teacher), spec.distillation, sharded=False, device=CPU)
    settings = spec.evaluation
    counter = FlopCounterMode(display=False)
    with counter:
        evaluate(measured.student, rows, max_tokens=settings.max_tokens, batch_size=4, workers=workers)
        prompts = {"num_prompts": settings.continuations, "num_tokens": settings.continuation_tokens}
        compare_continuations(measured.student, rows, **prompts, batch_size=4, workers=workers)
        tasks = resolve_tasks(settings.tasks)
        run_tasks(measured.student, load_tokenizer(spec, case.teacher), tasks, settings, workers=workers)
    return workers.gather(counter.get_total_flops())


def share_workspace(case: Case) -> list[tuple[str, bool, int]]:
    """Return, for each worker, the path of the workspace that a machine's workers share, whether this worker fetches
    into it, and how many workers share it."""
    del case
    workers = Workers()
    with create_shared_workspace("shared") as workspace:
        assert workspace.path.is_dir()
        found = workers.gather((str(workspace.path), workspace.is_downloader, workspace.num_local_workers))
    workers.gather(None)
    return found


def run_spawned(function: Callable[[Case], Any], cases: Sequence[Case], world_size: int, directory: Path) -> list[Any]:
    """Call `function` for each case in `world_size` new processes, and return rank 0's results."""
    return run_in_group(_run_all, (function, list(cases)), world_size, directory)


def _run_all(function: Callable[[Case], Any], cases: list[Case]) -> list[Any]:
    return [function(case) for case in cases]
