"""Driver of an attempt: prepare, train, evaluate and publish on a Ray cluster. All computations run in Ray tasks and
Ray Train workers.

    python -m swiftkv_platform.jobs.distill --job-id ID --attempt N --store URI
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import ray
from ulid import ULID

from swiftkv_platform.contract.attempts import (
    JOBS_PREFIX,
    MANIFEST,
    PROTOCOL,
    PROTOCOL_OPTION,
    AttemptId,
    AttemptRequest,
    Manifest,
    attempts_prefix,
    describe_protocol_mismatch,
    trials_prefix,
)
from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.contract.events import AttemptEvent, ReasonCode
from swiftkv_platform.contract.verdicts import describe_undecided_gates
from swiftkv_platform.errors import ConflictError, InvalidInputError, ProtocolError, StorageError, SwiftKVError
from swiftkv_platform.jobs.attempt.events import Reporter, follow_events
from swiftkv_platform.jobs.driver import (
    check_fits_machine,
    check_store_is_shared,
    evaluate_on_workers,
    generate_data,
    publish_copy,
    save_model,
    sum_worker_resources,
    train,
    warn_if_too_large,
)
from swiftkv_platform.jobs.failures import Failure, explain_failure, find_root_cause
from swiftkv_platform.jobs.sweep import run_sweep
from swiftkv_platform.jobs.values import StoppedError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import is_complete, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, join_key
from swiftkv_platform.traces import get_job_spans

_RAY_TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # detects a lost worker sooner than the default of 2 s
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a spec have the same meaning on workers
}
_MAX_TEMP_ROOT_LENGTH = 40
_EXIT_STATUS_TERMINATED = 128 + signal.SIGTERM
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
LOCAL_STORE, LOCAL_MODEL, LOCAL_FAILURE = "job", "model", "failure.json"
"""Names in the output directory of a local run that is unfinished; see `run_local`."""
_REPORT_FILES = ("evaluation.json", "evaluation.html", "sweep.json", "sweep.html")
_CHANGEABLE_SECTIONS = ("evaluation", "publish")
"""Sections of the spec on which training does not depend."""
_INTERRUPTED = Failure("interrupted", "the run was interrupted; the same command resumes it from its last checkpoint")


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
    _set_ray_train_environment()
    ray.init()
    signal.signal(signal.SIGTERM, _handle_termination)  # after ray.init, which sets its own handler
    try:
        return 0 if run_attempt(store, request) is None else 1
    except SystemExit:  # from `_handle_termination`; an interrupted Ray call changes the status
        return _EXIT_STATUS_TERMINATED


def run_attempt(store: ObjectStore, request: AttemptRequest) -> Failure | None:
    """Run an attempt on the connected cluster. A failure is written as an `error` event and returned."""
    try:
        distill(store, request)
    except StoppedError as stopped:
        if stopped.reason is ReasonCode.PAUSED:
            Reporter(store, request.attempt_id, "driver").send_status("paused")
            return None
        failure = Failure(stopped.reason, "stopped on request during training; the last checkpoint is complete")
        _send_error_event(failure, store, request.attempt_id)
        sys.exit(_EXIT_STATUS_TERMINATED)
    except Exception as error:
        return _report_error(error, store, request.attempt_id)
    return None


def _report_error(error: Exception, store: ObjectStore, attempt: AttemptId) -> Failure:
    failure = explain_failure(error)
    get_logger().error("attempt_failed", code=failure.code, error=failure.message, exc_info=error)
    _send_error_event(failure, store, attempt)
    return failure


def _send_error_event(failure: Failure, store: ObjectStore, attempt: AttemptId) -> None:
    Reporter(store, attempt, "driver").send_error(
        failure.message, code=failure.code, field=failure.field, value=failure.value, retryable=failure.retryable
    )


def distill(
    store: ObjectStore, request: AttemptRequest, *, on_trained: Callable[[str], None] = lambda _checkpoint: None
) -> Manifest | None:
    """Run the phases of an attempt. Returns the manifest of the model; None for a job that only publishes a model.
    `on_trained`: called after training with the key of the checkpoint that becomes the model; not for a sweep."""
    spans = get_job_spans()
    try:
        with spans.span("attempt", request.traceparent, job_id=request.job_id, attempt=request.attempt) as context:
            return _run_phases(store, request.model_copy(update={"traceparent": context}), on_trained)
    finally:
        spans.flush()


def _run_phases(store: ObjectStore, request: AttemptRequest, on_trained: Callable[[str], None]) -> Manifest | None:
    reporter = Reporter(store, request.attempt_id, "driver")
    reporter.send_status("running")
    check_store_is_shared(store)
    # a job that only publishes a model
    if request.spec.is_publish_only:
        assert request.parent is not None, "a spec that only publishes names a model"
        publish_copy(store, request, reporter, request.parent.key)
        return None
    # 1. completions of the teacher, if the data needs them
    warn_if_too_large(reporter, request.spec)
    generate_data(store, request, reporter)
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
            "not published, because a quality gate is undecided; publish it with `swiftkv models publish`", level="warn"
        )
    else:
        _try_to_publish(store, request, reporter)
    reporter.send_artifact(request.attempt_id.artifact_prefix, manifest)
    _clean_up(store, request)
    return manifest


def _try_to_publish(store: ObjectStore, request: AttemptRequest, reporter: Reporter) -> None:
    """Copy the model to the target in the spec. A failure is reported, but does not fail the job."""
    try:
        publish_copy(store, request, reporter, request.attempt_id.artifact_prefix)
    except StoppedError:
        raise
    except Exception as error:
        failure = explain_failure(error)
        get_logger().error("not_published", code=failure.code, error=failure.message, exc_info=error)
        message = (
            f"the model is complete, but publishing failed: {failure.message}; retry with `swiftkv models publish`"
        )
        reporter.send_message(message, level="error", code=failure.code)


def _clean_up(store: ObjectStore, request: AttemptRequest) -> None:
    """Delete inputs and trial checkpoints after success, unless there is a later attempt. Storage errors are logged."""
    attempts = AttemptStore(store)
    try:
        if not attempts.is_superseded(request.attempt_id):
            attempts.discard_inputs(request.job_id)
            attempts.discard_trial_checkpoints(request.job_id)
    except StorageError as error:
        get_logger().warning("files_left_behind", error=error.message)


def run_local(spec: JobSpec, output: Path, *, on_event: Callable[[AttemptEvent], None] | None = None) -> Path:
    """Run the job on a temporary local Ray, without a control plane. Writes the artifact to `output` and returns that.

    Until the artifact is complete, `output` has the attempt's object store in `job/`, and in `failure.json` the reason
    why it is unfinished. If training has ended, a failure also leaves the trained model in `model/`, and the report if
    there is one. The next call resumes from the last checkpoint; it may change the spec's sections `evaluation` and
    `publish`. A run without a checkpoint after a step leaves nothing.

    Args:
        output: a new or empty directory, or one with an unfinished run of this spec.
        on_event: called with the attempt's events, on another thread.

    Raises:
        ConflictError: `output` has a finished model, the run of another spec or other files, or another process runs
            there; raised before the job starts.
        SwiftKVError: the job failed.
    """
    if spec.training.from_ is not None:
        raise InvalidInputError.for_field(
            "training.from",
            spec.training.from_,
            ", which needs a control plane; use `swiftkv jobs submit`",
        )
    output = output.absolute()  # workers have another working directory
    _set_ray_train_environment()
    with _exit_on_signals(), _reserve_directory(output):
        if (output / MANIFEST).is_file():  # the last run was killed while it deleted its files
            shutil.rmtree(output / LOCAL_STORE)
            return output
        store = open_store(str(output / LOCAL_STORE))
        request = _plan_local_attempt(spec, store, output)
        if AttemptStore(store).read_artifact_manifest(request.attempt_id) is None:
            _write_failure(_INTERRUPTED, output)
            AttemptStore(store).write_request(request)
            try:
                with _start_local_ray(spec), follow_events(AttemptStore(store), request, on_event):
                    _distill_or_keep_results(store, request, output)
            except BaseException:
                _discard_untrained(store, request.job_id, output)
                raise
        _move_artifact(store, request.attempt_id, output)
    return output


def _distill_or_keep_results(store: ObjectStore, request: AttemptRequest, output: Path) -> None:
    checkpoints: list[str] = []
    try:
        distill(store, request, on_trained=checkpoints.append)
    except StoppedError:
        sys.exit(_EXIT_STATUS_TERMINATED)
    except Exception as error:
        _write_failure(explain_failure(error), output)
        _copy_reports(store, request.attempt_id, output)
        for checkpoint in checkpoints:
            try:
                save_model(store, request, checkpoint, output / LOCAL_MODEL)
            except Exception as fault:  # the first error is the reason; the checkpoint has the weights too
                get_logger().error("model_not_saved", error=explain_failure(fault).message, exc_info=fault)
        cause = find_root_cause(error)
        if cause is None:
            raise
        raise cause from error


@contextmanager
def _reserve_directory(output: Path) -> Iterator[None]:
    """Create `output` and lock it for this process. Raises `ConflictError` unless it is empty or has an unfinished
    run."""
    output.mkdir(parents=True, exist_ok=True)
    directory = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = ", in which another process trains; use another directory"
            raise ConflictError.for_field("output", str(output), why) from error
        if not (output / LOCAL_STORE).is_dir() and any(output.iterdir()):
            content = "a finished model" if (output / MANIFEST).is_file() else "files other than an unfinished run"
            why = f", a directory with {content}; use a new or empty directory"
            raise ConflictError.for_field("output", str(output), why)
        yield
    finally:
        os.close(directory)


def _plan_local_attempt(spec: JobSpec, store: ObjectStore, output: Path) -> AttemptRequest:
    """Return the request of the next attempt of the run in `output`, or of the last one if its artifact is complete.

    Raises `ConflictError` if the run has trained with another spec.
    """
    attempts = AttemptStore(store)
    job_id = next(iter(store.list_directories(JOBS_PREFIX)), None)
    if job_id is not None and not _has_trained(store, job_id):
        store.delete_prefix(JOBS_PREFIX)  # nothing is lost, and the user may have corrected spec or data
        job_id = None
    if job_id is None:
        name = f"job_{ULID()}"
        return AttemptRequest(job_id=name, attempt=1, spec=spec, run_id=name)
    # 1. the last attempt, and whether it is of this spec
    number = max(map(int, store.list_directories(attempts_prefix(job_id))))
    last = attempts.read_request(AttemptId(job_id, number))
    differing = [name for name in JobSpec.model_fields if getattr(spec, name) != getattr(last.spec, name)]
    fixed = [name for name in differing if name not in _CHANGEABLE_SECTIONS]
    if fixed:
        why = (
            f", a directory with an unfinished run of another spec (different: {', '.join(fixed)}); run that spec, "
            "use another directory, or delete this one"
        )
        raise ConflictError.for_field("output", str(output), why)
    if attempts.read_artifact_manifest(last.attempt_id) is not None:
        return last
    # 2. the next one
    if "evaluation" in differing:
        for attempt in last.attempt_id.list_until_this():
            store.delete_prefix(attempt.evaluation_prefix)
    newest = attempts.find_newest_checkpoint(job_id)
    get_logger().info("resuming", output=str(output), checkpoint=newest)
    return last.model_copy(update={"attempt": number + 1, "spec": spec, "resume_from": newest})


def _has_trained(store: ObjectStore, job_id: str) -> bool:
    """Whether the job has an artifact, or it or a trial of its sweep a checkpoint after a step."""
    trials = trials_prefix(job_id)
    stores = [store, *(open_store(join_key(store.uri, f"{trials}/{name}")) for name in store.list_directories(trials))]
    numbers = map(int, store.list_directories(attempts_prefix(job_id)))
    return any(is_complete(store, AttemptId(job_id, number).artifact_prefix) for number in numbers) or any(
        each.step for one in stores for each in AttemptStore(one).list_checkpoints(job_id)
    )


def _discard_untrained(store: ObjectStore, job_id: str, output: Path) -> None:
    """Delete the run unless it has trained."""
    if not _has_trained(store, job_id):
        shutil.rmtree(output / LOCAL_STORE)
        (output / LOCAL_FAILURE).unlink()
        if not any(output.iterdir()):
            output.rmdir()


def _write_failure(failure: Failure, output: Path) -> None:
    (output / LOCAL_FAILURE).write_text(json.dumps(asdict(failure), indent=2) + "\n", encoding="utf-8")


def _copy_reports(store: ObjectStore, attempt: AttemptId, output: Path) -> None:
    """Copy the reports that the attempt has stored."""
    for name in _REPORT_FILES:
        if store.head(f"{attempt.prefix}/{name}") is not None:
            store.download_file(f"{attempt.prefix}/{name}", output / name)


def _move_artifact(store: ObjectStore, attempt: AttemptId, output: Path) -> None:
    """Move the artifact's files to `output`, the manifest last, and delete the run. A later call continues a call that
    was interrupted."""
    artifact = output / LOCAL_STORE / attempt.artifact_prefix
    names = [*read_manifest(store, attempt.artifact_prefix).files, MANIFEST]
    # 1. what an earlier attempt has left
    shutil.rmtree(output / LOCAL_MODEL, ignore_errors=True)
    for name in {*_REPORT_FILES, LOCAL_FAILURE} - {*names}:
        (output / name).unlink(missing_ok=True)
    # 2. the artifact
    for name in names:
        if (artifact / name).is_file():  # moved already
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (artifact / name).replace(output / name)
    shutil.rmtree(output / LOCAL_STORE)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise `SystemExit` on termination signals, so that the block cleans up."""
    before = {each: signal.getsignal(each) for each in _TERMINATION_SIGNALS}
    _set_handlers(dict.fromkeys(_TERMINATION_SIGNALS, _handle_termination))
    try:
        yield
    finally:
        _set_handlers(before)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def _start_local_ray(spec: JobSpec) -> Iterator[None]:
    """Start a local Ray with enough CPUs for the workers, separate from other Rays of this machine. Raises
    `InvalidInputError` if the machine lacks GPUs or memory for them."""
    root = tempfile.gettempdir()
    # Paths of unix sockets are limited to about 100 characters, and Ray's sockets are in nested directories.
    parent = root if len(root) <= _MAX_TEMP_ROOT_LENGTH else "/tmp"  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="skv-", dir=parent, ignore_cleanup_errors=True) as directory:
        os.environ.update(HIDE_UNRESERVED_GPUS)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # this machine is not preempted
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # a busy machine is slow to start
        num_cpus = max(1, math.ceil(sum_worker_resources(spec)["CPU"]))
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _temp_dir=directory)
        _set_handlers({signal.SIGTERM: _handle_termination})  # replaces Ray's handler, which exits at once
        try:
            check_fits_machine(spec.resources, ray.cluster_resources())
            yield
        finally:
            ray.shutdown()


def _set_ray_train_environment() -> None:
    for name, value in _RAY_TRAIN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _handle_termination(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Exit at once: Ray ends the workers of a lost driver, and their last checkpoint is complete."""
    _set_handlers(dict.fromkeys(_TERMINATION_SIGNALS, signal.SIG_IGN))  # further signals do not interrupt the cleanup
    get_logger().warning("attempt_stopped")
    sys.exit(_EXIT_STATUS_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
