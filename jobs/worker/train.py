"""Train loop of a Ray Train worker: connects the trainer to the attempt's storage, events and tracking. Only this
module and `swiftkv_platform.jobs.ray_train` use `ray.train`.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from swiftkv_platform.contract.attempts import Manifest, Parent, StopRequest
from swiftkv_platform.distillation.checkpoint import (
    Checkpointer,
    broadcast_from_rank_0,
    load_training_state,
    run_on_all_workers,
)
from swiftkv_platform.distillation.steering import SteeringNote, TrainingProgress
from swiftkv_platform.distillation.strategy import Strategy
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.errors import StorageError, TrainingError
from swiftkv_platform.jobs.attempt.events import (
    EventReporter,
    MetricsBuffer,
    StopRequestWatcher,
    make_progress_callback,
    report_workers_started,
    sigterm_received,
)
from swiftkv_platform.jobs.attempt.stored import (
    AttemptCheckpoints,
    StoredInputs,
    check_no_missing_tensors,
    fetch_parent,
    open_parent,
    open_trained_tensors,
)
from swiftkv_platform.jobs.attempt.tracking import LossCurve, TrackedRun
from swiftkv_platform.jobs.values import STOP_REASONS, TrainingResult, WorkerConfig
from swiftkv_platform.jobs.worker.setup import (
    calibrate_student_if_needed,
    distribute_model,
    get_access,
    resolve_teacher,
    set_up_process,
)
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.planning.machines import PEAK_FLOPS
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import StoredDirectory
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from swiftkv_platform.traces import DISABLED_SPAN_RECORDER, get_job_span_recorder


class WorkerLeavingError(Exception):
    """Ends the workers, so that Ray Train restarts them; the run continues."""


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> TrainingResult:
    """Train from the newest checkpoint, if any, to the last step. Rank 0 returns the result of the run."""
    worker = config["worker"]
    request, spec = worker.request, worker.request.spec
    rank = ray.train.get_context().get_world_rank()
    configure_logging(job_id=request.job_id, attempt=request.attempt, rank=rank)
    store = open_store(worker.store_uri)
    if rank == 0:
        report_workers_started(store, request, "train")
    set_up_process(spec)
    listener: _Listener = _RankZeroListener(store, worker) if rank == 0 else _Listener()
    checkpoints = AttemptCheckpoints(
        store, request, keep=spec.checkpoint.keep, on_commit=listener.on_commit, on_failure=listener.on_failure
    )
    stop_request = StopRequest.NONE
    try:
        stop_request = _build_trainer(worker, checkpoints, listener).run()
    except TrainingError as error:  # raised on every worker
        return TrainingResult(checkpoints.find_newest(), error)
    finally:
        listener.close()
    if stop_request is StopRequest.LEAVE:
        raise WorkerLeavingError("a worker received SIGTERM; the checkpoint is complete")
    stopped = STOP_REASONS.get(stop_request)
    return TrainingResult(checkpoints.find_model() if stopped is None else checkpoints.find_newest(), stopped=stopped)


def _build_trainer(worker: WorkerConfig, checkpoints: AttemptCheckpoints, listener: _Listener) -> Trainer:
    spec = worker.request.spec
    stored: StoredInputs = ray.get(worker.prepared)
    local_rank = ray.train.get_context().get_local_rank()
    resumes = broadcast_from_rank_0(lambda: bool(checkpoints.list_resumable_checkpoints()))
    parent = None if resumes else worker.request.parent
    with _fetch_inputs(worker, stored, local_rank) as (path, rows):
        _fetch_calibrated_start(worker, stored, path, rows, local_rank)
        prepared = stored.open(rows)
        strategy = distribute_model(spec, path, prepared.calibrated, device=ray.train.torch.get_device())
        if parent is not None:
            _load_parent(strategy, worker, parent, rows.with_name("parent"), local_rank)
    return Trainer(
        strategy,
        prepared.data.train,
        Checkpointer(strategy, checkpoints, local_rank=local_rank),
        spec,
        total_steps=worker.total_steps,
        listener=listener,
        validation_rows=prepared.data.steering if len(prepared.data.steering) else None,
    )


def _fetch_calibrated_start(worker: WorkerConfig, stored: StoredInputs, path: str, rows: Path, local_rank: int) -> None:
    """Download the calibrated start to this machine, after the workers have calibrated if necessary."""
    request = worker.request
    spans = get_job_span_recorder() if dist.get_rank() == 0 else DISABLED_SPAN_RECORDER
    with spans.span("calibrate", request.traceparent, job_id=request.job_id, attempt=request.attempt):
        progress = make_progress_callback(open_store(worker.store_uri), request, "calibrate", "layers")
        calibrate_student_if_needed(
            request.spec, stored, path, rows, device=ray.train.torch.get_device(), progress=progress
        )
    if local_rank == 0:
        stored.fetch_calibrated_start(rows)
    dist.barrier()


def _load_parent(strategy: Strategy, worker: WorkerConfig, parent: Parent, directory: Path, local_rank: int) -> None:
    """Load the weights of the job's parent and, if the spec says so, its optimizer state. Workers read their shards
    from the store, or the whole parent from a copy on their machine."""
    store, is_downloader = open_store(worker.store_uri), local_rank == 0

    def fetch() -> StoredDirectory | None:
        if strategy.reads_own_shards:
            return open_parent(store, parent, directory, is_downloader=is_downloader)
        if is_downloader:
            fetch_parent(store, parent, directory)
        return None

    files = run_on_all_workers(fetch)
    if worker.request.spec.training.load_optimizer_state:
        load_training_state(strategy, directory, None if files is None else files.read)
    else:
        check_no_missing_tensors(parent, strategy.load_trained_tensors(open_trained_tensors(parent, directory, files)))


@contextmanager
def _fetch_inputs(worker: WorkerConfig, stored: StoredInputs, local_rank: int) -> Iterator[tuple[str, Path]]:
    """Yield the paths of teacher and prepared rows. Rank 0 of each machine downloads them for all its workers."""
    workspace = Path(tempfile.gettempdir()) / broadcast_from_rank_0(lambda: f"train-{uuid4().hex}")
    if local_rank == 0:
        workspace.mkdir(mode=0o700)
    try:
        model, access = worker.request.spec.model, get_access(worker.request)
        path = resolve_teacher(model, workspace, access=access) if local_rank == 0 else None
        if local_rank == 0:
            stored.fetch_rows(workspace / "rows")
        dist.barrier()
        yield path or resolve_teacher(model, workspace, access=access, fetch=False), workspace / "rows"
        dist.barrier()
    finally:
        if local_rank == 0:
            shutil.rmtree(workspace, ignore_errors=True)


class _Listener:
    """Listener of trainer and checkpoints on all workers but rank 0, which alone writes reports."""

    def __init__(self) -> None:
        self._watched = os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1") != "0"

    def poll_stop_request(self) -> StopRequest:
        """Return `LEAVE` after SIGTERM, and `SAVE` once if Ray Train announces the preemption of a worker's node.
        Collective."""
        own = StopRequest.LEAVE if sigterm_received.is_set() else StopRequest.NONE
        if not self._watched or ray.train.get_preemption_info() is None:
            return own
        self._watched = False  # Ray Train restarts the workers when the node is lost
        return max(own, StopRequest.SAVE)

    def on_start(self, progress: TrainingProgress) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_steering(self, note: SteeringNote) -> None: ...

    def on_commit(self, key: str, manifest: Manifest, progress: TrainingProgress) -> None: ...

    def on_failure(self, key: str, progress: TrainingProgress, error: StorageError) -> None: ...

    def close(self) -> None: ...


class _RankZeroListener(_Listener):
    """Reports steps and checkpoints as events, tracked metrics and log lines. Steps do not wait for the store or the
    checkpoint thread."""

    def __init__(self, store: ObjectStore, worker: WorkerConfig) -> None:
        super().__init__()
        request = worker.request
        self._reporter = EventReporter(store, request.attempt_id, "rank0")
        self._run = TrackedRun(store, request, self._reporter.send_tracking)
        self._telemetry = Telemetry(request.spec, worker.flops_per_token, ray.train.torch.get_device())
        self._metrics = MetricsBuffer(self._reporter, worker.total_steps)
        self._curve = LossCurve(store, request.attempt_id)
        self._control = StopRequestWatcher(store, request)
        self._request = request
        self._training_since: float | None = None

    def poll_stop_request(self) -> StopRequest:
        return max(super().poll_stop_request(), self._control.stop_request)

    def on_start(self, progress: TrainingProgress) -> None:
        self._telemetry.start(progress.tokens)
        self._curve.resume(progress.step)
        self._reporter.send_message(f"training starts at step {progress.step}", step=progress.step)
        get_logger().info("training_started", step=progress.step)
        self._training_since = time.time()

    def on_step(self, metrics: StepMetrics) -> None:
        if self._training_since is not None:
            self._trace_first_step(self._training_since)
            self._training_since = None
        point = metrics.to_point() | self._telemetry.compute_point(metrics)
        self._metrics.add_point(point)
        self._curve.add_point(point)
        self._run.log(point, metrics.step)

    def on_steering(self, note: SteeringNote) -> None:
        get_logger().info("steering_decision", note=note.message)
        with suppress(StorageError):  # training continues while the store is unavailable
            self._reporter.send_steering_decision(note.message, note.data)

    def _trace_first_step(self, started: float) -> None:
        labels = {"job_id": self._request.job_id, "attempt": self._request.attempt}
        get_job_span_recorder().record("first step", self._request.traceparent, started, time.time(), **labels)

    def on_commit(self, key: str, manifest: Manifest, progress: TrainingProgress) -> None:
        self._metrics.flush()
        self._curve.save()
        self._run.save()
        self._reporter.send_checkpoint(key, manifest, progress.step)
        get_logger().info("checkpoint_saved", key=key, step=progress.step, size=manifest.size)

    def on_failure(self, key: str, progress: TrainingProgress, error: StorageError) -> None:
        get_logger().error("checkpoint_lost", key=key, step=progress.step, error=error.message)
        message = f"checkpoint of step {progress.step} could not be stored; training continues: {error.message}"
        with suppress(StorageError):  # the event store may be unavailable too
            self._reporter.send_message(message, level="warn", step=progress.step)

    def close(self) -> None:
        self._control.close()
        self._metrics.close()
        self._curve.save()
        self._run.close()
        get_job_span_recorder().flush()


class Telemetry:
    """Performance metrics of one worker.

    Args:
        flops_per_token: FLOPs of training per counted position; None if unknown.
    """

    def __init__(self, spec: JobSpec, flops_per_token: float | None, device: torch.device) -> None:
        self._device = device
        self._tokens = 0
        self._flops_per_token = flops_per_token
        self._peak = spec.resources.peak_flops_per_second or _look_up_peak_flops(spec, device)

    def compute_point(self, metrics: StepMetrics) -> dict[str, float]:
        """Return the peak `memory_bytes` of the device, or of the process on a CPU, and if known `flops_per_second` and
        `mfu` (model FLOPs utilization) of this worker."""
        counted, self._tokens = metrics.tokens - self._tokens, metrics.tokens
        figures = {"memory_bytes": float(self._measure_memory())}
        if self._flops_per_token is not None and counted and metrics.tokens_per_second:
            figures["flops_per_second"] = self._flops_per_token * metrics.tokens_per_second / metrics.world_size
            if self._peak is not None:
                figures["mfu"] = figures["flops_per_second"] / self._peak
        return figures

    def start(self, tokens: int) -> None:
        self._tokens = tokens

    def _measure_memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def _look_up_peak_flops(spec: JobSpec, device: torch.device) -> float | None:
    if device.type != "cuda" or spec.model.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
