"""Run the workers of an attempt under Ray Train. The computation is imported only on the workers."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback

from swiftkv_platform.jobs.attempt.events import checkpoint_on_sigterm, leave_on_sigterm
from swiftkv_platform.jobs.values import Outcome, StoppedError, WorkerConfig
from swiftkv_platform.specs import ResourcesSpec
from swiftkv_platform.storage.addresses import open_store

_MAX_WORKER_FAILURES = 3
"""Times an attempt brings its workers back from the newest checkpoint before it gives up."""
_RESIZE_INTERVAL_S = float(os.environ.get("SWIFTKV_RESIZE_INTERVAL_S", "60"))
"""Seconds between checks for new machines, if the number of workers is elastic."""


class _Backend(_TorchBackend):  # type: ignore[misc]  # Ray is untyped
    """Torch's process group, and a handler of SIGTERM on the main thread of every worker."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(leave_on_sigterm)


class _Config(TorchConfig):  # type: ignore[misc]  # Ray is untyped
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


class _Trainer(TorchTrainer):  # type: ignore[misc]  # Ray is untyped
    def _register_sigint_handler(self, controller: Any) -> None:
        """Do nothing, so that SIGINT interrupts `fit`. Ray Train's handler would end the process with status 0, and
        stay after training; the controller and its workers end with the driver anyway."""

    def _create_default_callbacks(self) -> list[Any]:
        """Leave out the callback for Ray Data, whose actor takes seconds to start and is never used."""
        callbacks: list[Any] = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, DatasetsCallback)]


def scaling_config(resources: ResourcesSpec) -> ScalingConfig:
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
    """Run the workers to the last step; returns the key of the last checkpoint.

    Raises:
        TrainingError: training failed in a way that a restart would repeat.
        StoppedError: the attempt is to pause, or got SIGTERM.
        ray.train.TrainingFailedError: workers failed too often.
    """
    resources = worker.request.spec.resources
    on_gpu = resources.gpus_per_worker > 0
    # Checkpoints go to the attempt's own store, not through Ray Train, whose storage is scratch space of this machine.
    store = open_store(worker.store_uri)
    with tempfile.TemporaryDirectory(prefix="ray-train-") as scratch, checkpoint_on_sigterm(store, worker.request):
        result = _Trainer(
            train_loop_per_worker,
            train_loop_config={"worker": worker},
            # Objects are sent over gloo; sharded parameters in host memory are reduced there as well.
            torch_config=_Config(backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo"),
            scaling_config=scaling_config(resources),
            run_config=RunConfig(
                name=f"{worker.request.job_id}-{worker.request.attempt}",
                storage_path=scratch,
                failure_config=FailureConfig(max_failures=_MAX_WORKER_FAILURES),
            ),
        ).fit()
    outcome: Outcome = result.return_value
    if outcome.error is not None:
        raise outcome.error
    if outcome.stopped is not None:
        raise StoppedError(outcome.stopped)
    assert outcome.checkpoint is not None, "a run that ends well has saved its last step"
    return outcome.checkpoint


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> Outcome:
    """Train on a worker (`jobs.worker.train`). Imports model and trainer only here: they take seconds, and the driver
    needs neither."""
    from swiftkv_platform.jobs.worker.train import train_loop_per_worker as run

    return run(config)
