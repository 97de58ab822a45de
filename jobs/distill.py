"""The entrypoint of an attempt: prepare, train, evaluate and publish on a Ray cluster. It knows Ray and the attempt's
place in the object store; what happens on a worker is `train_loop`'s business.

    python -m jobs.distill --job-id ID --attempt N --store URI
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import ray
from ulid import ULID

from jobs.events import Reporter
from jobs.failures import Failure, explain, root_cause
from jobs.phases import Plan, WorkerConfig, evaluate, prepare
from swiftkv_platform.attempts import MANIFEST, AttemptEvent, AttemptRequest, Manifest, artifact_prefix
from swiftkv_platform.errors import ConflictError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.specs import JobSpec, ResourcesSpec
from swiftkv_platform.storage.artifacts import fetch_directory, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, open_store

_RAY_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a lost worker is noticed sooner than by the default of 2 s
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a spec mean the same on workers as elsewhere
}
_FOLLOW_INTERVAL_S = 0.5
_LONGEST_TEMP_ROOT = 40
_TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when the artifact is published, 1 after an `error` event, 143 when told to stop."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.distill", description="Run one attempt of a distillation job."
    )
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--store", required=True, help="object store: a directory or s3://bucket/prefix")
    options = parser.parse_args(arguments)
    configure_logging(job_id=options.job_id, attempt=options.attempt)
    store = open_store(options.store)
    request = AttemptStore(store).read_request(options.job_id, options.attempt)
    _set_ray_train_environment()
    ray.init()
    signal.signal(signal.SIGTERM, _stop)  # after ray.init, which sets a handler of its own
    try:
        return 0 if run_attempt(store, request) is None else 1
    except SystemExit:  # from `_stop`; where it interrupts Ray, Ray changes its status
        return _TERMINATED


def run_attempt(store: ObjectStore, request: AttemptRequest) -> Failure | None:
    """Run an attempt on the connected cluster; a failure becomes its `error` event and is returned."""
    try:
        distill(store, request)
    except Exception as error:
        failure = explain(error)
        get_logger().error("attempt_failed", code=failure.code, error=failure.message, exc_info=error)
        Reporter(store, request, "driver").error(
            failure.message, code=failure.code, field=failure.field, value=failure.value, retryable=failure.retryable
        )
        return failure
    return None


def distill(store: ObjectStore, request: AttemptRequest) -> Manifest:
    """The phases of an attempt; returns the manifest of the published model."""
    reporter, resources = Reporter(store, request, "driver"), request.spec.resources
    reporter.status("running")
    _warn_if_too_large(reporter, resources)
    plan_ref, prepared = _as_task(prepare, resources, num_returns=2).remote(request)
    from jobs.fit import fit  # takes seconds, in which the task has begun

    plan: Plan = ray.get(plan_ref)
    reporter.message(
        f"{plan.total_steps} steps, {plan.num_trained_parameters} trained parameters",
        total_steps=plan.total_steps,
        num_trained_parameters=plan.num_trained_parameters,
        data=plan.statistics,
    )
    checkpoint = _finished_before(store, request, plan.total_steps)
    if checkpoint is None:
        checkpoint = fit(WorkerConfig(request, store.uri, plan.total_steps, prepared))
    reporter.status("evaluating")
    task = _as_task(evaluate, resources)
    manifest: Manifest = ray.get(task.remote(request, store.uri, checkpoint, prepared))
    reporter.artifact(artifact_prefix(request.job_id, request.attempt), manifest)
    return manifest


def run_local(spec: JobSpec, output: Path, *, on_event: Callable[[AttemptEvent], None] | None = None) -> Path:
    """Run the job on a Ray of its own, without a control plane; the artifact ends up in `output`, which is returned.

    Args:
        output: a new or empty directory, or one that holds an artifact, which is replaced.
        on_event: told what the attempt says, from another thread.

    Raises:
        ConflictError: `output` holds something else; raised before anything starts.
        SwiftKVError: the job failed, for the reason it names.
    """
    if output.exists() and any(output.iterdir()) and not (output / MANIFEST).is_file():
        raise ConflictError(
            f"{output} exists and holds no artifact; name an empty or a new directory",
            field="output",
            value=str(output),
        )
    _set_ray_train_environment()
    with tempfile.TemporaryDirectory(prefix="distill-") as directory:
        store = open_store(directory)
        name = f"job_{ULID()}"
        request = AttemptRequest(job_id=name, attempt=1, spec=spec, run_id=name)
        with _local_ray(spec.resources), _following(AttemptStore(store), request, on_event):
            try:
                distill(store, request)
            except Exception as error:
                cause = root_cause(error)
                if cause is None:
                    raise
                raise cause from error
        fetch_directory(store, artifact_prefix(name, 1), output)
    return output


def _finished_before(store: ObjectStore, request: AttemptRequest, total_steps: int) -> str | None:
    """The checkpoint to resume from, if it is the last step's: then there is nothing left to train."""
    if request.resume_from is None:
        return None
    step = int(read_manifest(store, request.resume_from).lineage["step"])
    return request.resume_from if step >= total_steps else None


def _as_task(function: Callable[..., Any], resources: ResourcesSpec, *, num_returns: int = 1) -> Any:
    """`function` as a Ray task with a worker's resources."""
    return ray.remote(function).options(
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker,
        accelerator_type=resources.accelerator_type,
        num_returns=num_returns,
    )


def _warn_if_too_large(reporter: Reporter, resources: ResourcesSpec) -> None:
    """Ray waits for resources that a cluster does not have (it might grow): say so instead of waiting in silence."""
    available = ray.cluster_resources()
    needed = {
        "CPU": resources.cpus_per_worker * resources.num_workers,
        "GPU": resources.gpus_per_worker * resources.num_workers,
    }
    for name, amount in needed.items():
        if amount > available.get(name, 0.0):
            reporter.message(
                f"waiting for the cluster to grow: the workers need {amount:g} {name}s, it has "
                f"{available.get(name, 0.0):g}; fewer resources.num_workers would do",
                level="warn",
            )


@contextmanager
def _local_ray(resources: ResourcesSpec) -> Iterator[None]:
    """A Ray with room for the workers, in a directory of its own; other Rays of this machine are left alone."""
    root = tempfile.gettempdir()
    # Ray's sockets lie deep below, and the path of a unix socket ends after some 100 characters.
    parent = root if len(root) <= _LONGEST_TEMP_ROOT else "/tmp"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="skv-", dir=parent, ignore_cleanup_errors=True) as directory:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody takes this machine away
        num_cpus = max(1, math.ceil(resources.cpus_per_worker * resources.num_workers))
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _following(
    store: AttemptStore, request: AttemptRequest, on_event: Callable[[AttemptEvent], None] | None
) -> Iterator[None]:
    """Hand every event of the attempt to `on_event`, the last ones before the context ends."""
    if on_event is None:
        yield
        return
    ended, cursor = threading.Event(), dict[str, int]()

    def follow() -> None:
        while True:
            last_round = ended.wait(_FOLLOW_INTERVAL_S)
            for stored in store.read_events(request.job_id, request.attempt, cursor):
                cursor[stored.writer] = stored.sequence
                on_event(stored.event)
            if last_round:
                return

    follower = threading.Thread(target=follow, name="events", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _set_ray_train_environment() -> None:
    for name, value in _RAY_TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leave at once: Ray ends the workers of a driver that is gone, and their last checkpoint is complete."""
    get_logger().warning("attempt_stopped")
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
