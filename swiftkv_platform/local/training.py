"""Runs of a job on a temporary local Ray, without a control plane."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ulid import ULID

from swiftkv_platform.contract.attempts import (
    JOBS_PREFIX,
    MANIFEST,
    AttemptId,
    AttemptRequest,
    attempts_prefix,
    trials_prefix,
)
from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.errors import ConflictError, InvalidInputError
from swiftkv_platform.jobs.attempt.events import follow_events
from swiftkv_platform.jobs.distill import (
    EXIT_STATUS_TERMINATED,
    TERMINATION_SIGNALS,
    distill,
    exit_on_termination,
    set_ray_train_environment,
)
from swiftkv_platform.jobs.driver import check_fits_machine, save_model, sum_worker_resources
from swiftkv_platform.jobs.failures import Failure, explain_failure, find_root_cause
from swiftkv_platform.jobs.values import StoppedError
from swiftkv_platform.local.ray_head import make_temp_dir
from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import is_complete, read_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, join_object_key, open_store

LOCAL_STORE, LOCAL_MODEL, LOCAL_FAILURE = "job", "model", "failure.json"
"""Names in the output directory of a run that is unfinished; see `run_job_locally`."""
_REPORT_FILES = ("evaluation.json", "evaluation.html", "sweep.json", "sweep.html")
_ROWS = "rows"
"""Directory with the results of single rows of the evaluation."""
_CHANGEABLE_SECTIONS = ("evaluation", "publish")
"""Sections of the spec on which training does not depend."""
_INTERRUPTED = Failure("interrupted", "the run was interrupted; the same command resumes it from its last checkpoint")


def run_job_locally(spec: JobSpec, output: Path, *, on_event: Callable[[AttemptEvent], None] | None = None) -> Path:
    """Run the job on a temporary local Ray, without a control plane. Writes the artifact to `output` and returns that.

    The results of single rows of the evaluation are in `rows/`, which is no part of the artifact.

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
    set_ray_train_environment()
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
                _delete_run_without_progress(store, request.job_id, output)
                raise
        _move_artifact(store, request.attempt_id, output)
    return output


def _distill_or_keep_results(store: ObjectStore, request: AttemptRequest, output: Path) -> None:
    checkpoints: list[str] = []
    try:
        distill(store, request, on_trained=checkpoints.append)
    except StoppedError:
        sys.exit(EXIT_STATUS_TERMINATED)
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
    if job_id is not None and not _has_training_progress(store, job_id):
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
            "use another directory, or delete this directory"
        )
        raise ConflictError.for_field("output", str(output), why)
    if attempts.read_artifact_manifest(last.attempt_id) is not None:
        return last
    # 2. the next one
    if "evaluation" in differing:
        for attempt in last.attempt_id.list_attempts_so_far():
            store.delete_prefix(attempt.evaluation_prefix)
    newest = attempts.find_newest_checkpoint(job_id)
    get_logger().info("resuming an interrupted run", output=str(output), checkpoint=newest)
    return last.model_copy(update={"attempt": number + 1, "spec": spec, "resume_from": newest})


def _has_training_progress(store: ObjectStore, job_id: str) -> bool:
    """Whether the job has an artifact, or it or a trial of its sweep a checkpoint after a step."""
    trials = trials_prefix(job_id)
    stores = [
        store,
        *(open_store(join_object_key(store.uri, f"{trials}/{name}")) for name in store.list_directories(trials)),
    ]
    numbers = map(int, store.list_directories(attempts_prefix(job_id)))
    return any(is_complete(store, AttemptId(job_id, number).artifact_prefix) for number in numbers) or any(
        each.step for one in stores for each in AttemptStore(one).list_checkpoints(job_id)
    )


def _delete_run_without_progress(store: ObjectStore, job_id: str, output: Path) -> None:
    """Delete the run unless it has training progress."""
    if not _has_training_progress(store, job_id):
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
    _copy_rows(store, attempt, output)


def _copy_rows(store: ObjectStore, attempt: AttemptId, output: Path) -> None:
    """Copy the results of single rows that the attempt has stored, in place of those of an earlier one."""
    directory = output / _ROWS
    shutil.rmtree(directory, ignore_errors=True)
    for info in store.list(attempt.row_results_prefix):
        directory.mkdir(exist_ok=True)
        store.download_file(info.key, directory / info.key.rpartition("/")[2])


def _move_artifact(store: ObjectStore, attempt: AttemptId, output: Path) -> None:
    """Move the artifact's files to `output`, the manifest last, and delete the run. A later call continues a call that
    was interrupted."""
    artifact = output / LOCAL_STORE / attempt.artifact_prefix
    names = [*read_manifest(store, attempt.artifact_prefix).files, MANIFEST]
    # 1. what an earlier attempt has left
    shutil.rmtree(output / LOCAL_MODEL, ignore_errors=True)
    for name in {*_REPORT_FILES, LOCAL_FAILURE} - {*names}:
        (output / name).unlink(missing_ok=True)
    _copy_rows(store, attempt, output)
    # 2. the artifact
    for name in names:
        if (artifact / name).is_file():  # moved already
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (artifact / name).replace(output / name)
    shutil.rmtree(output / LOCAL_STORE)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise `SystemExit` on termination signals, so that the block cleans up."""
    before = {each: signal.getsignal(each) for each in TERMINATION_SIGNALS}
    _set_signal_handlers(dict.fromkeys(TERMINATION_SIGNALS, exit_on_termination))
    try:
        yield
    finally:
        _set_signal_handlers(before)


def _set_signal_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        for each, handler in handlers.items():
            signal.signal(each, handler)


@contextmanager
def _start_local_ray(spec: JobSpec) -> Iterator[None]:
    """Start a local Ray with enough CPUs for the workers, separate from other Rays of this machine. Raises
    `InvalidInputError` if the machine lacks GPUs or memory for them."""
    directory = make_temp_dir()
    try:
        os.environ.update(HIDE_UNRESERVED_GPUS)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # this machine is not preempted
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # a busy machine is slow to start
        num_cpus = max(1, math.ceil(sum_worker_resources(spec)["CPU"]))
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _temp_dir=str(directory))
        _set_signal_handlers({signal.SIGTERM: exit_on_termination})  # replaces Ray's handler, which exits at once
        try:
            check_fits_machine(spec.resources, ray.cluster_resources())
            yield
        finally:
            ray.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
