"""Run training workers under Ray Train. Only the workers import the computations."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback

from swiftkv_platform.jobs.attempt.events import checkpoint_on_sigterm, record_sigterm
from swiftkv_platform.jobs.values import StoppedError, TrainingResult, WorkerConfig
from swiftkv_platform.specs import ResourcesSpec
from swiftkv_platform.storage.object_store import open_store

_MAX_WORKER_FAILURES = 3
"""Restarts of the workers from the newest checkpoint before the attempt fails."""
_RESIZE_INTERVAL_S = float(os.environ.get("SWIFTKV_RESIZE_INTERVAL_S", "60"))
"""Seconds between checks for new nodes, if the number of workers is elastic."""


class _Backend(_TorchBackend):  # type: ignore[misc]  # Ray is untyped
    """Torch's process group, plus a SIGTERM handler on the main thread of every worker."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(record_sigterm)


class _Config(TorchConfig):  # type: ignore[misc]  # Ray is untyped
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


class _Trainer(TorchTrainer):  # type: ignore[misc]  # Ray is untyped
    def _register_sigint_handler(self, controller: Any) -> None:
        """Register nothing, so that SIGINT interrupts `fit`. Ray Train's handler would end the process with status 0,
        and remain after training; controller and workers end with the driver anyway."""

    def _create_default_callbacks(self) -> list[Any]:
        """Omit the callback for Ray Data, whose unused actor takes seconds to start."""
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, DatasetsCallback)]


def make_scaling_config(resources: ResourcesSpec) -> ScalingConfig:
    """Return the workers to request from Ray Train."""
    elastic = resources.min_workers < resources.max_workers
    on_gpu = resources.gpus_per_worker > 0
    return ScalingConfig(
        num_workers=(resources.min_workers, resources.max_workers) if elastic else resources.max_workers,
        elastic_resize_monitor_interval_s=_RESIZE_INTERVAL_S,
        use_gpu=on_gpu,
        # Ray Train ignores zeros.
        resources_per_worker={
            "CPU": resources.cpus_per_worker,
            "GPU": resources.gpus_per_worker,
            "memory": resources.memory_per_worker or 0,
        },
        accelerator_type=resources.accelerator_type,
    )


def fit(worker: WorkerConfig) -> str:
    """Train to the last step; return the key of the checkpoint that becomes the model.

    Raises:
        TrainingError: training failed, and a restart would fail again.
        StoppedError: a pause request or SIGTERM.
        ray.train.TrainingFailedError: workers failed too often.
    """
    resources = worker.request.spec.resources
    on_gpu = resources.gpus_per_worker > 0
    # Checkpoints are in the attempt's own store. Ray Train's storage is scratch space on this machine.
    store = open_store(worker.store_uri)
    with tempfile.TemporaryDirectory(prefix="ray-train-") as scratch, checkpoint_on_sigterm(store, worker.request):
        result = _Trainer(
            train_loop_per_worker,
            train_loop_config={"worker": worker},
            # Gloo transfers objects and reduces sharded parameters in host memory.
            torch_config=_Config(backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo"),
            scaling_config=make_scaling_config(resources),
            run_config=RunConfig(
                name=f"{worker.request.job_id}-{worker.request.attempt}",
                storage_path=scratch,
                failure_config=FailureConfig(max_failures=_MAX_WORKER_FAILURES),
            ),
        ).fit()
    training: TrainingResult = result.return_value
    if training.error is not None:
        raise training.error
    if training.stopped is not None:
        raise StoppedError(training.stopped)
    assert training.checkpoint is not None, "a successful run has saved its last step"
    return training.checkpoint


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> TrainingResult:
    """Train on a worker. Imports model and trainer here: they take seconds, and the driver does not need them."""
    from swiftkv_platform.jobs.worker.train import train_loop_per_worker as run

    return run(config)
