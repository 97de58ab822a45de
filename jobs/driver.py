"""Phases of an attempt, or of a trial of a sweep, on the connected cluster. A phase is a Ray task, or a gang-scheduled
group of workers in a torch process group. The driver starts quickly, because only the tasks import the computations.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.attempt.events import (
    STOP_POLL_INTERVAL_S,
    EventReporter,
    make_progress_callback,
    read_stop_request,
    report_workers_requested,
    report_workers_started,
)
from swiftkv_platform.jobs.attempt.stored import (
    StoredInputs,
    find_calibrated_start,
    find_completed_training_checkpoint,
    find_prepared_rows,
    make_calibrated_start_key,
    publish_rows,
)
from swiftkv_platform.jobs.failures import explain_failure, find_root_cause
from swiftkv_platform.jobs.values import STOP_REASONS, GroupMember, RunPlan, StoppedError, WorkerConfig
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.specs import JobSpec, ResourcesSpec
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.object_store import LocalObjectStore, ObjectStore, open_store
from swiftkv_platform.traces import get_job_span_recorder

if TYPE_CHECKING:
    from swiftkv_platform.jobs.attempt.stored import PreparedInputs
    from swiftkv_platform.jobs.worker.setup import Workspace

_SHARED_DIRECTORY_VARIABLE = "SWIFTKV_SHARED_DIRECTORY"
"""Environment variable that confirms that every node mounts the store's directory."""
_CAPACITY_CHECKS = 5
_MAX_GROUP_RESTARTS = 3


class TrainedCheckpoint(NamedTuple):
    key: str
    """Key of the last checkpoint in the object store."""
    inputs: ray.ObjectRef
    """Reference to the attempt's `StoredInputs`."""


def train(
    store: ObjectStore, request: AttemptRequest, reporter: EventReporter, *, rows_store: ObjectStore | None = None
) -> TrainedCheckpoint:
    """Train from the newest checkpoint, if any. `rows_store`: store of the prepared rows; None: `store`."""
    # 1. check the spec and prepare the rows
    rows_uri = (rows_store or store).uri
    report_workers_requested(reporter, request.spec, "prepare")
    plan_ref, prepared = make_task(prepare_run, request.spec.resources, num_returns=2).remote(request, rows_uri)
    from swiftkv_platform.jobs.ray_train import fit  # takes seconds, while the task runs

    plan: RunPlan = wait_for_task(plan_ref, store, request)
    # 2. report the plan
    for message, is_warning in plan.messages:
        reporter.send_message(message, level="warn" if is_warning else "info")
    optimizer = plan.spec.optimizer
    searched = " (first trial of the learning-rate search)" if optimizer.rate_search else ""
    reporter.send_message(
        f"{plan.total_steps} steps of {plan.spec.training.batch_size} rows of {plan.spec.data.max_length} tokens, "
        f"learning rate {optimizer.learning_rate:g}{searched}, {plan.num_trained_parameters} trained parameters",
        total_steps=plan.total_steps,
        num_trained_parameters=plan.num_trained_parameters,
        data=plan.statistics,
    )
    if request.parent is not None:
        reporter.send_message(f"continuing from {request.parent.name}", parent=request.parent.model_dump())
    # 3. train, unless an earlier attempt has trained all steps
    checkpoint = find_completed_training_checkpoint(store, request, plan.total_steps)
    if checkpoint is None:
        settled = request.model_copy(update={"spec": plan.spec})
        report_workers_requested(reporter, request.spec, "train", num_workers=request.spec.resources.min_workers)
        checkpoint = fit(WorkerConfig(settled, store.uri, plan.total_steps, prepared, plan.flops_per_token))
    return TrainedCheckpoint(checkpoint, prepared)


def evaluate_on_workers(
    store: ObjectStore,
    request: AttemptRequest,
    reporter: EventReporter,
    checkpoint: str,
    prepared: ray.ObjectRef,
    *,
    is_trial: bool = False,
) -> Manifest:
    """Evaluate the trained student on a group of workers. Returns the manifest that worker 0 has published. Raises
    `StoppedError` on a stop request. `is_trial`: publish only the report."""
    resources = request.spec.resources
    num_workers = choose_group_size(resources)
    report_workers_requested(reporter, request.spec, "evaluate", num_workers=num_workers)
    bundle = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    if resources.accelerator_type:
        bundle[f"accelerator_type:{resources.accelerator_type}"] = 0.001
    group = placement_group([{name: amount for name, amount in bundle.items() if amount}] * num_workers)
    try:
        for failures in range(_MAX_GROUP_RESTARTS + 1):
            try:
                return _run_evaluation_group(group, store, request, checkpoint, prepared, is_trial)
            except StoppedError:
                raise
            except Exception as error:
                if (
                    failures == _MAX_GROUP_RESTARTS
                    or find_root_cause(error) is not None
                    or not explain_failure(error).retryable
                ):
                    raise
                get_logger().warning("evaluation_restarted", error=explain_failure(error).message)
    finally:
        remove_placement_group(group)
    raise AssertionError("the last failure is raised")


def publish_model_to_target(store: ObjectStore, request: AttemptRequest, reporter: EventReporter, key: str) -> None:
    """Copy a model to the target in the spec, if the spec has one. Idempotent."""
    target = request.spec.publish.publication
    if target is None:
        return
    report_workers_requested(reporter, request.spec, "publish")
    url = wait_for_task(make_task(copy_model, request.spec.resources).remote(request, store.uri, key), store, request)
    reporter.send_message(f"published to {url}", published={"to": target.to, "url": url})


def save_model(store: ObjectStore, request: AttemptRequest, checkpoint: str, directory: Path) -> None:
    """Write the trained student of a checkpoint to a directory of this machine, without an evaluation."""
    wait_for_task(
        make_task(write_model, request.spec.resources).remote(request, store.uri, checkpoint, directory), store, request
    )


def generate_answers(store: ObjectStore, request: AttemptRequest, reporter: EventReporter) -> None:
    """Generate the teacher's answers to the prompts in the data, if any, on all workers."""
    if all(source.complete is None for source in request.spec.data.sources):
        return
    reporter.send_message("the teacher generates answers to the prompts in the data")
    resources = request.spec.resources
    report_workers_requested(reporter, request.spec, "write")
    task = make_task(write_answers, resources)
    shares = [task.remote(request, store.uri, worker) for worker in range(resources.max_workers)]
    num_tokens = sum(wait_for_task(share, store, request) for share in shares)
    reporter.send_message(f"the teacher generated {num_tokens} tokens")


def make_task(function: Callable[..., Any], resources: ResourcesSpec, *, num_returns: int = 1) -> Any:
    return ray.remote(function).options(**build_task_options(resources), num_returns=num_returns)


def build_task_options(resources: ResourcesSpec) -> dict[str, Any]:
    return {
        "num_cpus": resources.cpus_per_worker,
        "num_gpus": resources.gpus_per_worker,
        "memory": resources.memory_per_worker,
        "accelerator_type": resources.accelerator_type,
    }


def wait_for_task(task: ray.ObjectRef, store: ObjectStore, attempt: AttemptRequest) -> Any:
    """Wait for a task's result, without a timeout. Cancels the task and raises `StoppedError` on a stop request."""
    try:
        return _wait_for_all_tasks([task], store, attempt)
    except StoppedError:
        ray.cancel(task, force=True)
        raise


def choose_group_size(resources: ResourcesSpec) -> int:
    """Return the number of workers that fit on the cluster now, within the spec's bounds. Checks for a few seconds,
    because finished training workers release their resources with a delay."""
    min_workers, max_workers = resources.min_workers, resources.max_workers
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}

    def count_fitting_workers(totals: dict[str, float]) -> int:
        return min(int(totals.get(name, 0.0) // amount) for name, amount in each.items() if amount)

    fitting = min_workers
    max_workers = (
        min(max_workers, count_fitting_workers(ray.cluster_resources())) if min_workers < max_workers else min_workers
    )
    for _ in range(_CAPACITY_CHECKS):
        if fitting >= max_workers:
            break
        fitting = max(min_workers, count_fitting_workers(ray.available_resources()))
        time.sleep(STOP_POLL_INTERVAL_S if fitting < max_workers else 0.0)
    return min(fitting, max(min_workers, max_workers))


def _run_evaluation_group(
    group: PlacementGroup,
    store: ObjectStore,
    request: AttemptRequest,
    checkpoint: str,
    prepared: ray.ObjectRef,
    is_trial: bool,
) -> Manifest:
    """Run `evaluate_student` on all workers of a group, and return worker 0's result."""
    resources, size = request.spec.resources, group.bundle_count

    def make_rank_options(rank: int) -> dict[str, Any]:
        return {"max_retries": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}

    each = {"num_cpus": resources.cpus_per_worker, "num_gpus": resources.gpus_per_worker}
    tasks = [ray.remote(_pick_rendezvous_address).options(num_cpus=0, **make_rank_options(0)).remote()]
    try:
        address = _wait_for_all_tasks(tasks, store, request)
        worker = ray.remote(evaluate_student)
        tasks = [
            worker.options(**each, **make_rank_options(rank)).remote(
                request, store.uri, checkpoint, prepared, GroupMember(rank, size, address), is_trial
            )
            for rank in range(size)
        ]
        manifest: Manifest = _wait_for_all_tasks(tasks, store, request)
        return manifest
    except BaseException:
        _, running = ray.wait(tasks, num_returns=len(tasks), timeout=0)  # cancelling an ended task may end this process
        for task in running:
            ray.cancel(task, force=True)
        raise


def _wait_for_all_tasks(tasks: list[ray.ObjectRef], store: ObjectStore, request: AttemptRequest) -> Any:
    """Wait for all tasks, and return the first one's result. Raises the error of a failed task."""
    pending = tasks
    while pending:
        done, pending = ray.wait(pending, timeout=STOP_POLL_INTERVAL_S)
        for task in done:
            ray.get(task)
        stop_request = read_stop_request(store, request) if pending else None
        if stop_request in STOP_REASONS:
            raise StoppedError(STOP_REASONS[stop_request])
    return ray.get(tasks[0])


def _pick_rendezvous_address() -> str:
    """Return host and a free port of worker 0's machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"{ray.util.get_node_ip_address()}:{port}"


def sum_worker_resources(spec: JobSpec) -> dict[str, float]:
    """Return the total resources of all concurrent workers, by Ray's names."""
    resources = spec.resources
    num_workers = resources.min_workers * (spec.sweep.max_concurrent if spec.sweep else 1)
    return {"CPU": resources.cpus_per_worker * num_workers, "GPU": resources.gpus_per_worker * num_workers}


def check_store_is_shared(store: ObjectStore) -> None:
    """Raise `InvalidInputError` if the store is a local directory and the cluster has several nodes."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if num_nodes == 1 or not isinstance(store, LocalObjectStore) or os.environ.get(_SHARED_DIRECTORY_VARIABLE) == "1":
        return
    why = f", a directory, and the cluster has {num_nodes} nodes; use an s3:// address, or "
    cure = f"{_SHARED_DIRECTORY_VARIABLE}=1 in the environment of Ray's head if every node mounts the directory"
    raise InvalidInputError.for_field("storage_uri", store.uri, why + cure)


def check_fits_machine(resources: ResourcesSpec, machine: Mapping[str, float]) -> None:
    """Raise `InvalidInputError` if this machine, to which no node is added, cannot run the workers. Ray would wait.

    Args:
        machine: the machine's resources by Ray's names.
    """
    kinds = [name.partition(":")[2] for name in machine if name.startswith("accelerator_type:")]
    if resources.accelerator_type is not None and resources.accelerator_type not in kinds:
        has = f"; this machine has {', '.join(kinds) or 'no GPU'}; leave accelerator_type out"
        raise InvalidInputError.for_field("resources.accelerator_type", resources.accelerator_type, has)
    gib = 1 << 30
    for field, name, unit, unit_size in (("gpus", "GPU", "GPUs", 1), ("memory", "memory", "GiB of free memory", gib)):
        each = getattr(resources, f"{field}_per_worker") or 0
        has = f"; this machine has {machine.get(name, 0.0) / unit_size:.3g} {unit}; use fewer"
        if each > machine.get(name, 0.0):
            raise InvalidInputError.for_field(f"resources.{field}_per_worker", each, has)
        if each * resources.min_workers > machine.get(name, 0.0):
            needs = f", which need {each * resources.min_workers / unit_size:.3g} {unit}{has}"
            raise InvalidInputError.for_field("resources.num_workers", resources.min_workers, needs)


def warn_if_too_large(reporter: EventReporter, spec: JobSpec) -> None:
    """Warn if the cluster has too few resources for the job. Ray would wait silently, since the cluster might grow."""
    available = ray.cluster_resources()
    for name, amount in sum_worker_resources(spec).items():
        if amount > available.get(name, 0.0):
            reporter.send_message(
                f"waiting for nodes: the workers need {amount:g} {name}s, and the cluster has "
                f"{available.get(name, 0.0):g}; add nodes or use a smaller resources.num_workers",
                level="warn",
            )


def write_answers(request: AttemptRequest, store_uri: str, worker: int) -> int:
    """Generate a worker's share of the teacher's answers, unless the rows are prepared already. Returns the tokens."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="write", worker=worker)
    from swiftkv_platform.jobs.worker.prepare import write_worker_answers as run

    store = open_store(store_uri)
    report_workers_started(store, request, "write")
    return 0 if find_prepared_rows(store, request) is not None else run(request, store_uri, worker)


def prepare_run(request: AttemptRequest, store_uri: str) -> tuple[RunPlan, StoredInputs]:
    """Check the spec, and prepare the rows unless an earlier attempt has prepared them."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="prepare")
    from swiftkv_platform.jobs.worker.prepare import AttemptAnswers
    from swiftkv_platform.jobs.worker.prepare import prepare_run as run
    from swiftkv_platform.jobs.worker.setup import get_access

    store = open_store(store_uri)
    report_workers_started(store, request, "prepare")
    with _trace_phase(request, "prepare"), tempfile.TemporaryDirectory(prefix="rows-") as workspace:
        rows = Path(workspace) / "rows"
        key = find_prepared_rows(store, request)
        if key is not None:
            fetch_directory(store, key, rows)
        progress = make_progress_callback(store, request, "prepare", "sources")
        answers = AttemptAnswers(store, request)
        plan, _ = run(request.spec, rows, answers=answers, access=get_access(request), progress=progress)
        key = key or publish_rows(store, request, rows)
        return plan, StoredInputs(
            store.uri, key, find_calibrated_start(store, request) or make_calibrated_start_key(request)
        )


def publish_trial(
    request: AttemptRequest, store_uri: str, spec: JobSpec, trial_store_uri: str, trial: Manifest, files: dict[str, str]
) -> Manifest:
    """Publish the chosen trial's model, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    from swiftkv_platform.jobs.worker.evaluate import publish_trial as run

    return run(request, store_uri, spec, trial_store_uri, trial, files)


def evaluate_student(
    request: AttemptRequest, store_uri: str, checkpoint: str, stored: StoredInputs, member: GroupMember, is_trial: bool
) -> Manifest | None:
    """Evaluate the student with the other workers, and publish it; for a trial, publish only the report."""
    trial: dict[str, Any] = {"trial": request.spec.name} if is_trial else {}
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="evaluate", rank=member.rank, **trial)
    from swiftkv_platform.jobs.worker.evaluate import evaluate_and_publish, evaluate_trial

    with (
        _trace_phase(request, "evaluate", rank=member.rank),
        _join_evaluation(request, store_uri, stored, member) as prepared,
    ):
        run = evaluate_trial if is_trial else evaluate_and_publish
        return run(request, store_uri, checkpoint, prepared)


def write_model(request: AttemptRequest, store_uri: str, checkpoint: str, directory: Path) -> None:
    """Write the trained student, see `save_model`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="save")
    from swiftkv_platform.jobs.worker.evaluate import save_trained_student

    save_trained_student(request, store_uri, checkpoint, directory)


def copy_model(request: AttemptRequest, store_uri: str, key: str) -> str:
    """Copy the model at `key` to the target in the spec. Returns the address of the copy."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    store = open_store(store_uri)
    report_workers_started(store, request, "publish")
    from swiftkv_platform.reports.model_card import render_model_card
    from swiftkv_platform.storage.publishing import publish as run

    spec = request.spec.publish.publication
    assert spec is not None, "the spec has a target to publish to"
    return run(
        store,
        key,
        spec.to,
        card=lambda manifest: render_model_card(manifest.lineage, manifest.metrics, license_id=None),
        private=spec.private,
        targets=request.publish_targets,
        progress=make_progress_callback(store, request, "publish", "bytes"),
    )


@contextmanager
def _trace_phase(request: AttemptRequest, phase: str, *, rank: int = 0) -> Iterator[None]:
    """Trace a phase on worker 0. Spans are sent before the task ends, since its process may end too."""
    if rank != 0:
        yield
        return
    spans = get_job_span_recorder()
    try:
        with spans.span(phase, request.traceparent, job_id=request.job_id, attempt=request.attempt):
            yield
    finally:
        spans.flush()


@contextmanager
def _join_evaluation(
    request: AttemptRequest, store_uri: str, stored: StoredInputs, member: GroupMember
) -> Iterator[PreparedInputs]:
    """Join the evaluation's process group, and download the inputs to this machine."""
    from swiftkv_platform.jobs.worker.setup import create_shared_workspace, join_process_group
    from swiftkv_platform.model.workers import Workers

    if member.rank == 0:
        report_workers_started(open_store(store_uri), request, "evaluate")
    with join_process_group(member, request.spec.resources), create_shared_workspace("rows") as workspace:
        rows, workers = workspace.path / "rows", Workers()
        if workspace.is_downloader:
            stored.fetch_rows(rows)
        workers.gather(None)  # the others wait
        _recalibrate_student_if_needed(request, store_uri, stored, rows, workspace)
        if workspace.is_downloader:
            stored.fetch_calibrated_start(rows)
        workers.gather(None)
        yield stored.open(rows)


def _recalibrate_student_if_needed(
    request: AttemptRequest, store_uri: str, stored: StoredInputs, rows: Path, workspace: Workspace
) -> None:
    """Calibrate again if an earlier attempt has deleted the calibrated start after its training."""
    from swiftkv_platform.jobs.worker.setup import (
        calibrate_student_if_needed,
        get_access,
        get_task_device,
        resolve_shared_teacher,
        set_up_process,
    )
    from swiftkv_platform.model.workers import Workers

    spec, workers = request.spec, Workers()
    if workers.broadcast_from_first(stored.needs_calibration):
        set_up_process(spec)
        path = resolve_shared_teacher(spec.model, workspace, access=get_access(request))
        progress = make_progress_callback(open_store(store_uri), request, "calibrate", "layers")
        calibrate_student_if_needed(spec, stored, path, rows, device=get_task_device(spec), progress=progress)
