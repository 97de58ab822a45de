"""Entry point of an attempt: prepare, train, evaluate and publish on a Ray cluster. The computations run in Ray tasks
and Ray Train workers, not in this process.

    python -m swiftkv_platform.jobs.distill --job-id ID --attempt N --store URI
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import ray
from ulid import ULID

from swiftkv_platform.contract.attempts import (
    MANIFEST,
    PROTOCOL,
    PROTOCOL_OPTION,
    AttemptId,
    AttemptRequest,
    Manifest,
    describe_protocol_mismatch,
)
from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.contract.events import AttemptEvent, ReasonCode
from swiftkv_platform.contract.verdicts import describe_undecided_gates
from swiftkv_platform.errors import ConflictError, InvalidInputError, ProtocolError, StorageError, SwiftKVError
from swiftkv_platform.jobs.attempt.events import Reporter, following
from swiftkv_platform.jobs.driver import (
    have_data_written,
    measure,
    needed_resources,
    publish_copy,
    refuse_unshared_store,
    train,
    warn_if_too_large,
)
from swiftkv_platform.jobs.failures import Failure, explain, root_cause
from swiftkv_platform.jobs.sweep import run_sweep
from swiftkv_platform.jobs.values import StoppedError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.traces import get_job_spans

_RAY_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a lost worker is noticed sooner than with the default of 2 s
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a spec mean the same on workers as elsewhere
}
_LONGEST_TEMP_ROOT = 40
_TERMINATED = 128 + signal.SIGTERM
_ENDING = (signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt. Exit status: 0 when the artifact is published, 1 after an `error` event, 143 when told to
    stop."""
    parser = argparse.ArgumentParser(
        prog="python -m swiftkv_platform.jobs.distill", description="Run one attempt of a distillation job."
    )
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--store", required=True, help="object store: a directory or s3://bucket/prefix")
    parser.add_argument(PROTOCOL_OPTION, type=int, default=1, help="version of the control plane's protocol")
    options = parser.parse_args(arguments)
    configure_logging(job_id=options.job_id, attempt=options.attempt)
    store, attempt = open_store(options.store), AttemptId(options.job_id, options.attempt)
    try:
        if options.protocol > PROTOCOL:
            message = describe_protocol_mismatch(workers=PROTOCOL, control_plane=options.protocol)
            raise ProtocolError(message, value=options.protocol)
        request = AttemptStore(store).read_request(attempt)
    except SwiftKVError as error:
        _fail(error, store, attempt)
        return 1
    _set_ray_train_environment()
    ray.init()
    signal.signal(signal.SIGTERM, _stop)  # after ray.init, which sets its own handler
    try:
        return 0 if run_attempt(store, request) is None else 1
    except SystemExit:  # from `_stop`; Ray changes the status if interrupted
        return _TERMINATED


def run_attempt(store: ObjectStore, request: AttemptRequest) -> Failure | None:
    """Run an attempt on the connected cluster; a failure becomes its `error` event and is returned."""
    try:
        distill(store, request)
    except StoppedError as stopped:
        if stopped.reason is ReasonCode.PAUSED:
            Reporter(store, request.attempt_id, "driver").status("paused")
            return None
        failure = Failure(stopped.reason, "told to stop during training; a checkpoint of that step is complete")
        _report(failure, store, request.attempt_id)
        sys.exit(_TERMINATED)
    except Exception as error:
        return _fail(error, store, request.attempt_id)
    return None


def _fail(error: Exception, store: ObjectStore, attempt: AttemptId) -> Failure:
    failure = explain(error)
    get_logger().error("attempt_failed", code=failure.code, error=failure.message, exc_info=error)
    _report(failure, store, attempt)
    return failure


def _report(failure: Failure, store: ObjectStore, attempt: AttemptId) -> None:
    Reporter(store, attempt, "driver").error(
        failure.message, code=failure.code, field=failure.field, value=failure.value, retryable=failure.retryable
    )


def distill(store: ObjectStore, request: AttemptRequest) -> Manifest | None:
    """Run the phases of an attempt. Returns the manifest of the model, None for a job that only publishes one."""
    spans = get_job_spans()
    try:
        with spans.span("attempt", request.traceparent, job_id=request.job_id, attempt=request.attempt) as context:
            return _distill(store, request.model_copy(update={"traceparent": context}))
    finally:
        spans.flush()


def _distill(store: ObjectStore, request: AttemptRequest) -> Manifest | None:
    reporter = Reporter(store, request.attempt_id, "driver")
    reporter.status("running")
    refuse_unshared_store(store)
    if request.spec.is_publish_only:
        assert request.parent is not None, "a spec that only publishes names a model"
        publish_copy(store, request, reporter, request.parent.key)
        return None
    warn_if_too_large(reporter, request.spec)
    have_data_written(store, request, reporter)
    if request.spec.sweep is not None:
        manifest = run_sweep(store, request, reporter)
    else:
        checkpoint, prepared = train(store, request, reporter)
        reporter.status("evaluating")
        manifest = measure(store, request, reporter, checkpoint, prepared)
    if open_gates := describe_undecided_gates(manifest.metrics):
        reporter.message(f"undecided quality gates: {'; '.join(open_gates)}", level="warn", undecided=open_gates)
    if open_gates and request.spec.publish.publication is not None:
        reporter.message("not published: a gate is undecided; `swiftkv models publish` publishes it", level="warn")
    else:
        _try_to_publish(store, request, reporter)
    reporter.artifact(request.attempt_id.artifact_prefix, manifest)
    _clean_up(store, request)
    return manifest


def _try_to_publish(store: ObjectStore, request: AttemptRequest, reporter: Reporter) -> None:
    """Copy the model to the target in the spec. A failure is reported, but does not fail the job."""
    try:
        publish_copy(store, request, reporter, request.attempt_id.artifact_prefix)
    except StoppedError:
        raise
    except Exception as error:
        failure = explain(error)
        get_logger().error("not_published", code=failure.code, error=failure.message, exc_info=error)
        message = (
            f"the model is complete, but could not be published: {failure.message}; `swiftkv models publish` retries it"
        )
        reporter.message(message, level="error", code=failure.code)


def _clean_up(store: ObjectStore, request: AttemptRequest) -> None:
    """Delete inputs and trial checkpoints after success, unless a later attempt uses them. Storage errors are only
    logged."""
    attempts = AttemptStore(store)
    try:
        if not attempts.is_superseded(request.attempt_id):
            attempts.discard_inputs(request.job_id)
            attempts.discard_trial_checkpoints(request.job_id)
    except StorageError as error:
        get_logger().warning("files_left_behind", error=error.message)


def run_local(spec: JobSpec, output: Path, *, on_event: Callable[[AttemptEvent], None] | None = None) -> Path:
    """Run the job on its own local Ray, without a control plane. The artifact is written to `output`, which is
    returned.

    Args:
        output: a new or empty directory, or one that holds an artifact, which is replaced.
        on_event: called with the attempt's events, on another thread.

    Raises:
        ConflictError: `output` holds something else; raised before anything starts.
        SwiftKVError: the job failed.
    """
    if output.exists() and any(output.iterdir()) and not (output / MANIFEST).is_file():
        why = ", which exists and is not an artifact; name an empty or a new directory"
        raise ConflictError.for_field("output", str(output), why)
    if spec.training.from_ is not None:
        raise InvalidInputError.for_field(
            "training.from",
            spec.training.from_,
            ", which only a control plane knows, and none is used here; use `swiftkv jobs submit`",
        )
    _set_ray_train_environment()
    with _leaving_when_told(), tempfile.TemporaryDirectory(prefix="distill-") as directory:
        store = open_store(directory)
        name = f"job_{ULID()}"
        request = AttemptRequest(job_id=name, attempt=1, spec=spec, run_id=name)
        with _local_ray(spec), following(AttemptStore(store), request, on_event):
            try:
                distill(store, request)
            except StoppedError:
                sys.exit(_TERMINATED)
            except Exception as error:
                cause = root_cause(error)
                if cause is None:
                    raise
                raise cause from error
        fetch_directory(store, request.attempt_id.artifact_prefix, output)
    return output


@contextmanager
def _leaving_when_told() -> Iterator[None]:
    """Turn signals that end the process into `SystemExit`, so that the block cleans up."""
    before = {each: signal.getsignal(each) for each in _ENDING}
    _set_handlers(dict.fromkeys(_ENDING, _stop))
    try:
        yield
    finally:
        _set_handlers(before)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def _local_ray(spec: JobSpec) -> Iterator[None]:
    """Start a local Ray with room for the workers, in its own directory, apart from other Rays of this machine."""
    root = tempfile.gettempdir()
    # Ray's sockets are deep below, and the path of a unix socket is limited to some 100 characters.
    parent = root if len(root) <= _LONGEST_TEMP_ROOT else "/tmp"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="skv-", dir=parent, ignore_cleanup_errors=True) as directory:
        os.environ.update(HIDE_UNRESERVED_GPUS)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # this machine is not preempted
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # a busy machine is slow to start
        num_cpus = max(1, math.ceil(needed_resources(spec)["CPU"]))
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        _set_handlers({signal.SIGTERM: _stop})  # Ray has set its own, which exits at once
        try:
            yield
        finally:
            ray.shutdown()


def _set_ray_train_environment() -> None:
    for name, value in _RAY_TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Exit at once: Ray ends the workers of a driver that is gone, and their last checkpoint is complete."""
    _set_handlers(dict.fromkeys(_ENDING, signal.SIG_IGN))  # further signals do not interrupt the cleanup
    get_logger().warning("attempt_stopped")
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
