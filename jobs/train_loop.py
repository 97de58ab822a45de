"""What every Ray Train worker runs: the trainer, with the attempt's storage, events and tracking wired to it. With
`fit` the only code that touches `ray.train`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import ray
import ray.train
import ray.train.torch
import torch.distributed as dist

from jobs.checkpoints import AttemptCheckpoints
from jobs.events import MetricsBuffer, Reporter
from jobs.phases import Outcome, WorkerConfig
from jobs.prepare import Prepared, compute_dtype, load_student, set_up_process
from jobs.sources import teacher_path
from swiftkv_platform.attempts import AttemptRequest, Manifest
from swiftkv_platform.distillation.checkpoint import Checkpointer, Progress, from_rank_0
from swiftkv_platform.distillation.fork import Fork, load_trained
from swiftkv_platform.distillation.optimizer import build_optimizer
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer, TrainerListener
from swiftkv_platform.errors import TrainingError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from swiftkv_platform.tracking.tracker import create_tracker


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> Outcome:
    """Train to the end, from the newest checkpoint there is. The outcome of rank 0 is the run's."""
    worker = config["worker"]
    request, spec = worker.request, worker.request.spec
    rank = ray.train.get_context().get_world_rank()
    configure_logging(job_id=request.job_id, attempt=request.attempt, rank=rank)
    set_up_process(spec)
    store = open_store(worker.store_uri)
    listener: _Listener = _RankZero(store, worker) if rank == 0 else _Silent()
    checkpoints = AttemptCheckpoints(store, request, keep=spec.checkpoint.keep, on_commit=listener.on_commit)
    try:
        _build_trainer(worker, checkpoints, listener).run()
    except TrainingError as error:  # raised on every worker alike
        return Outcome(checkpoints.newest(), error)
    finally:
        listener.close()
    return Outcome(checkpoints.newest())


def _build_trainer(worker: WorkerConfig, checkpoints: AttemptCheckpoints, listener: _Listener) -> Trainer:
    spec, dtype = worker.request.spec, compute_dtype(worker.request.spec)
    prepared: Prepared = ray.get(worker.prepared)
    local_rank = ray.train.get_context().get_local_rank()
    with _teacher_on_this_machine(spec, local_rank) as path:
        student = load_student(spec, path)
    fork = Fork(student, spec.distillation, dtype=dtype, gradient_checkpointing=spec.training.gradient_checkpointing)
    if prepared.calibrated is not None:
        load_trained(student, prepared.calibrated)
    parallel = Parallel(fork, spec.sharding, dtype=dtype, device=ray.train.torch.get_device())
    optimizer = build_optimizer(parallel.trained(), spec.optimizer)
    return Trainer(
        parallel,
        optimizer,
        prepared.data.train,
        Checkpointer(parallel.module, optimizer, checkpoints, local_rank=local_rank),
        spec,
        total_steps=worker.total_steps,
        listener=listener,
    )


@contextmanager
def _teacher_on_this_machine(spec: JobSpec, local_rank: int) -> Iterator[str]:
    """A path to the teacher; one worker of each machine fetches a remote one for all of them."""
    workspace = Path(tempfile.gettempdir()) / from_rank_0(lambda: f"teacher-{uuid4().hex}")
    try:
        path = teacher_path(spec.model.name_or_path, workspace, fetch=local_rank == 0)
        dist.barrier()
        yield path
        dist.barrier()
    finally:
        if local_rank == 0:
            shutil.rmtree(workspace, ignore_errors=True)


class _Listener(TrainerListener, Protocol):
    """Hears what the trainer and its checkpoints do."""

    def on_commit(self, key: str, manifest: Manifest, progress: Progress) -> None: ...

    def close(self) -> None: ...


class _Silent:
    """Of the workers other than rank 0."""

    def on_start(self, progress: Progress) -> None:
        """Rank 0 reports for all."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Rank 0 reports for all."""

    def on_commit(self, key: str, manifest: Manifest, progress: Progress) -> None:
        """Only rank 0 completes checkpoints."""

    def close(self) -> None:
        """Nothing is open."""


class _RankZero:
    """Turns steps and checkpoints into events, tracked metrics and log lines."""

    def __init__(self, store: ObjectStore, worker: WorkerConfig) -> None:
        request, spec = worker.request, worker.request.spec
        self._reporter = Reporter(store, request, "rank0")
        self._metrics = MetricsBuffer(self._reporter, worker.total_steps)
        self._tracker = create_tracker(spec.tracking, tracking_directory(request), name=spec.name)
        self._tracker.start(request.run_id, spec.model_dump(mode="json"))
        if self._tracker.info is not None:
            self._reporter.tracking(self._tracker.info)

    def on_start(self, progress: Progress) -> None:
        self._reporter.message(f"training begins at step {progress.step}", step=progress.step)
        get_logger().info("training_begins", step=progress.step)

    def on_step(self, metrics: StepMetrics) -> None:
        point = metrics.point()
        self._metrics.add(point)
        self._tracker.log(point, metrics.step)

    def on_commit(self, key: str, manifest: Manifest, progress: Progress) -> None:
        self._metrics.flush()
        self._reporter.checkpoint(key, manifest, progress.step)
        get_logger().info("checkpoint_saved", key=key, step=progress.step, size=manifest.size)

    def close(self) -> None:
        self._metrics.flush()
        self._tracker.finish({})


def tracking_directory(request: AttemptRequest) -> Path:
    """Where a job's tracker keeps its files on this machine."""
    return Settings().home / "tracking" / request.job_id
