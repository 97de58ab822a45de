"""The Ray tasks of an attempt. The driver imports this module and no other of the workers', so it starts at once: a
task imports what computes where it runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from jobs.attempt.downloads import access_of
from jobs.attempt.events import Reporter
from jobs.attempt.places import say_placed, say_waiting
from jobs.attempt.preparation import StoredPreparation, find_rows, find_start, load_start, publish_rows, publish_start
from jobs.values import Outcome, Plan, WorkerConfig
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.specs import JobSpec, ResourcesSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import fetch_directory

if TYPE_CHECKING:
    from jobs.attempt.preparation import Prepared
    from swiftkv_platform.model.calibration_statistics import CalibrationStatistics


def write(request: AttemptRequest, store_uri: str, worker: int) -> int:
    """Let the teacher write a worker's share (`jobs.worker.generate_data`), unless the rows are prepared already."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="write", worker=worker)
    from jobs.worker.generate_data import write as run

    store = open_store(store_uri)
    say_placed(store, request, "write")
    return 0 if find_rows(store, request) is not None else run(request, store_uri, worker)


def prepare(request: AttemptRequest, store_uri: str) -> tuple[Plan, StoredPreparation]:
    """Prepare rows and start (`jobs.worker.prepare`), or take those that an earlier attempt has prepared."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="prepare")
    from jobs.worker.generate_data import AttemptAnswers
    from jobs.worker.prepare import prepare as run

    store = open_store(store_uri)
    say_placed(store, request, "prepare")
    with tempfile.TemporaryDirectory(prefix="rows-") as workspace:
        rows = Path(workspace) / "rows"
        key = find_rows(store, request)
        if key is not None:
            fetch_directory(store, key, rows)

        def publish() -> str:
            nonlocal key
            key = key or publish_rows(store, request, rows)
            return key

        def helpers(num_shares: int) -> Iterator[CalibrationStatistics]:
            return _collect_elsewhere(request, store.uri, publish(), num_shares)

        start = find_start(store, request)
        plan, prepared = run(
            request.spec,
            rows,
            calibrated=None if start is None else load_start(store, start),
            answers=AttemptAnswers(store, request),
            helpers=helpers,
            access=access_of(request),
        )
        if start is None and prepared.calibrated is not None:
            start = publish_start(store, request, prepared.calibrated)
        return plan, StoredPreparation(store.uri, publish(), start)


def _collect_elsewhere(
    request: AttemptRequest, store_uri: str, rows: str, num_shares: int
) -> Iterator[CalibrationStatistics]:
    """Collect all shares but the first in tasks of their own, which are under way when this returns."""
    # The task that asks holds one worker's resources itself: together they take what training will.
    if num_shares > 1:
        say_waiting(Reporter(open_store(store_uri), request.attempt_id, "prepare"), request.spec, "calibrate")
    task = ray.remote(collect_share).options(**task_options(request.spec.resources))
    pending = [task.remote(request, store_uri, rows, share, num_shares) for share in range(1, num_shares)]
    return (ray.get(share) for share in pending)


def collect_share(
    request: AttemptRequest, store_uri: str, rows: str, share: int, num_shares: int
) -> CalibrationStatistics:
    """A share of the calibration, see `jobs.worker.prepare`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="calibrate", share=share)
    from jobs.worker.prepare import collect_share as run

    with tempfile.TemporaryDirectory(prefix="rows-") as directory:
        store = open_store(store_uri)
        say_placed(store, request, "calibrate")
        fetch_directory(store, rows, Path(directory))
        return run(request.spec, Path(directory), share, num_shares, access=access_of(request))


def task_options(resources: ResourcesSpec) -> dict[str, Any]:
    """A worker's resources, for a task."""
    return {
        "num_cpus": resources.cpus_per_worker,
        "num_gpus": resources.gpus_per_worker,
        "accelerator_type": resources.accelerator_type,
    }


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> Outcome:
    """Train on a worker (`jobs.worker.train`). Code that starts the workers needs neither model nor
    trainer, whose imports take seconds."""
    from jobs.worker.train import train_loop_per_worker as run

    return run(config)


def evaluate_trial(request: AttemptRequest, store_uri: str, checkpoint: str, stored: StoredPreparation) -> Manifest:
    """The task after the training of a sweep's trial, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="evaluate", trial=request.spec.name)
    from jobs.worker.evaluate import evaluate_trial as run

    say_placed(open_store(store_uri), request, "evaluate")
    with _fetched(stored) as prepared:
        return run(request, store_uri, checkpoint, prepared)


def publish_trial(
    request: AttemptRequest, store_uri: str, spec: JobSpec, trial_store_uri: str, trial: Manifest, files: dict[str, str]
) -> Manifest:
    """The task after a sweep's last trial, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    from jobs.worker.evaluate import publish_trial as run

    return run(request, store_uri, spec, trial_store_uri, trial, files)


def evaluate(request: AttemptRequest, store_uri: str, checkpoint: str, stored: StoredPreparation) -> Manifest:
    """The task after training, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="evaluate")
    from jobs.worker.evaluate import evaluate_and_publish

    say_placed(open_store(store_uri), request, "evaluate")
    with _fetched(stored) as prepared:
        return evaluate_and_publish(request, store_uri, checkpoint, prepared)


@contextmanager
def _fetched(stored: StoredPreparation) -> Iterator[Prepared]:
    with tempfile.TemporaryDirectory(prefix="rows-") as workspace:
        stored.fetch(Path(workspace) / "rows")
        yield stored.open(Path(workspace) / "rows")
