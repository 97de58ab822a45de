"""Driver of an attempt: prepare, train, evaluate and publish on a Ray cluster. All computations run in Ray tasks and
Ray Train workers.

    python -m swiftkv_platform.jobs.distill --job-id ID --attempt N --store URI
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

import ray

from swiftkv_platform.contract.attempts import (
    PROTOCOL,
    PROTOCOL_OPTION,
    AttemptId,
    AttemptRequest,
    Manifest,
    describe_protocol_mismatch,
)
from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.contract.verdicts import describe_undecided_gates
from swiftkv_platform.errors import ProtocolError, StorageError, SwiftKVError
from swiftkv_platform.jobs.attempt.events import EventReporter
from swiftkv_platform.jobs.driver import (
    check_store_is_shared,
    evaluate_on_workers,
    generate_answers,
    publish_model_to_target,
    train,
    warn_if_too_large,
)
from swiftkv_platform.jobs.failures import Failure, explain_failure
from swiftkv_platform.jobs.sweep import run_sweep
from swiftkv_platform.jobs.values import StoppedError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from swiftkv_platform.traces import get_job_span_recorder

_RAY_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # detects a lost worker sooner than the default of 2 s
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a spec have the same meaning on workers
}
EXIT_STATUS_TERMINATED = 128 + signal.SIGTERM
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one attempt. Exit status: 0 if the artifact is published, 1 after an `error` event, 143 after SIGTERM."""
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
        _report_error(error, store, attempt)
        return 1
    set_ray_train_environment()
    ray.init()
    signal.signal(signal.SIGTERM, exit_on_termination)  # after ray.init, which sets its own handler
    try:
        return 0 if run_attempt(store, request) is None else 1
    except SystemExit:  # from `exit_on_termination`; an interrupted Ray call changes the status
        return EXIT_STATUS_TERMINATED


def run_attempt(store: ObjectStore, request: AttemptRequest) -> Failure | None:
    """Run an attempt on the connected cluster. A failure is written as an `error` event and returned."""
    try:
        distill(store, request)
    except StoppedError as stopped:
        if stopped.reason is ReasonCode.PAUSED:
            EventReporter(store, request.attempt_id, "driver").send_status("paused")
            return None
        failure = Failure(stopped.reason, "stopped on request during training; the last checkpoint is complete")
        _send_error_event(failure, store, request.attempt_id)
        sys.exit(EXIT_STATUS_TERMINATED)
    except Exception as error:
        return _report_error(error, store, request.attempt_id)
    return None


def _report_error(error: Exception, store: ObjectStore, attempt: AttemptId) -> Failure:
    failure = explain_failure(error)
    get_logger().error("attempt_failed", code=failure.code, error=failure.message, exc_info=error)
    _send_error_event(failure, store, attempt)
    return failure


def _send_error_event(failure: Failure, store: ObjectStore, attempt: AttemptId) -> None:
    EventReporter(store, attempt, "driver").send_error(
        failure.message, code=failure.code, field=failure.field, value=failure.value, retryable=failure.retryable
    )


def distill(
    store: ObjectStore, request: AttemptRequest, *, on_trained: Callable[[str], None] = lambda _checkpoint: None
) -> Manifest | None:
    """Run the phases of an attempt. Returns the manifest of the model; None for a job that only publishes a model.
    `on_trained`: called after training with the key of the checkpoint that becomes the model; not for a sweep."""
    spans = get_job_span_recorder()
    try:
        with spans.span("attempt", request.traceparent, job_id=request.job_id, attempt=request.attempt) as context:
            return _run_phases(store, request.model_copy(update={"traceparent": context}), on_trained)
    finally:
        spans.flush()


def _run_phases(store: ObjectStore, request: AttemptRequest, on_trained: Callable[[str], None]) -> Manifest | None:
    reporter = EventReporter(store, request.attempt_id, "driver")
    reporter.send_status("running")
    check_store_is_shared(store)
    # a job that only publishes a model
    if request.spec.is_publish_only:
        assert request.parent is not None, "a job that only publishes has a parent"
        publish_model_to_target(store, request, reporter, request.parent.key)
        return None
    # 1. completions of the teacher, if the data needs them
    warn_if_too_large(reporter, request.spec)
    generate_answers(store, request, reporter)
    # 2. prepare, train and evaluate
    if request.spec.sweep is not None:
        manifest = run_sweep(store, request, reporter)
    else:
        checkpoint, prepared = train(store, request, reporter)
        on_trained(checkpoint)
        reporter.send_status("evaluating")
        manifest = evaluate_on_workers(store, request, reporter, checkpoint, prepared)
    # 3. publish
    if open_gates := describe_undecided_gates(manifest.metrics):
        reporter.send_message(f"undecided quality gates: {'; '.join(open_gates)}", level="warn", undecided=open_gates)
    if open_gates and request.spec.publish.publication is not None:
        reporter.send_message(
            "not published, because a quality gate is undecided; to publish anyway, use `swiftkv models publish`",
            level="warn",
        )
    else:
        _try_to_publish(store, request, reporter)
    reporter.send_artifact(request.attempt_id.artifact_prefix, manifest)
    _delete_intermediate_objects(store, request)
    return manifest


def _try_to_publish(store: ObjectStore, request: AttemptRequest, reporter: EventReporter) -> None:
    """Copy the model to the target in the spec. A failure is reported, but does not fail the job."""
    try:
        publish_model_to_target(store, request, reporter, request.attempt_id.artifact_prefix)
    except StoppedError:
        raise
    except Exception as error:
        failure = explain_failure(error)
        get_logger().error("not_published", code=failure.code, error=failure.message, exc_info=error)
        message = (
            f"the model is complete, but publishing failed: {failure.message}; retry with `swiftkv models publish`"
        )
        reporter.send_message(message, level="error", code=failure.code)


def _delete_intermediate_objects(store: ObjectStore, request: AttemptRequest) -> None:
    """Delete inputs and trial checkpoints after success, unless there is a later attempt. Storage errors are logged."""
    attempts = AttemptStore(store)
    try:
        if not attempts.is_superseded(request.attempt_id):
            attempts.discard_inputs(request.job_id)
            attempts.discard_trial_checkpoints(request.job_id)
    except StorageError as error:
        get_logger().warning("intermediate_objects_not_deleted", error=error.message)


def set_ray_train_environment() -> None:
    """Set defaults of Ray Train's settings, which workers inherit."""
    for name, value in _RAY_TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def exit_on_termination(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Exit at once: Ray ends the workers of a lost driver, and their last checkpoint is complete."""
    for each in TERMINATION_SIGNALS:  # further signals do not interrupt the cleanup
        signal.signal(each, signal.SIG_IGN)
    get_logger().warning("attempt_stopped")
    sys.exit(EXIT_STATUS_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
