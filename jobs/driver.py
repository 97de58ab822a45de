"""Phases of one model on the connected cluster, for an attempt or a trial of a sweep. A phase is a Ray task, or a group
of workers that are placed all or none and joined by torch's process group. Imports none of the computations, so that
the driver starts quickly; tasks import them where they run.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.attempt.events import (
    LOOK_INTERVAL_S,
    Reporter,
    look,
    phase_progress,
    say_placed,
    say_waiting,
)
from swiftkv_platform.jobs.attempt.stored import (
    StoredPreparation,
    find_rows,
    find_start,
    finished_before,
    publish_rows,
    start_key,
)
from swiftkv_platform.jobs.failures import explain, root_cause
from swiftkv_platform.jobs.values import STOPPED, Member, Plan, StoppedError, WorkerConfig
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.specs import JobSpec, ResourcesSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.object_store import LocalObjectStore, ObjectStore
from swiftkv_platform.traces import get_job_spans

if TYPE_CHECKING:
    from swiftkv_platform.jobs.attempt.stored import Prepared
    from swiftkv_platform.jobs.worker.setup import Workspace

_SHARED = "SWIFTKV_SHARED_DIRECTORY"
"""Environment variable by which the operator confirms that every node mounts the store's directory."""
_LOOKS_FOR_ROOM = 5
_MAX_FAILURES = 3
"""Times that a group is restarted after it lost a worker."""


def train(
    store: ObjectStore, request: AttemptRequest, reporter: Reporter, *, rows_store: ObjectStore | None = None
) -> tuple[str, ray.ObjectRef]:
    """Train from the newest checkpoint, if any. Returns the last checkpoint's key and the `StoredPreparation`.
    `rows_store`: store of the prepared rows, if it is not `store`."""
    rows_uri = (rows_store or store).uri
    say_waiting(reporter, request.spec, "prepare")
    plan_ref, prepared = as_task(prepare, request.spec.resources, num_returns=2).remote(request, rows_uri)
    from swiftkv_platform.jobs.ray_train import fit  # imports for seconds, while the task is running

    plan: Plan = wait_for(plan_ref, store, request)
    for message, is_warning in plan.messages:
        reporter.message(message, level="warn" if is_warning else "info")
    optimizer = plan.spec.optimizer
    searched = " (the search begins there)" if optimizer.rate_search else ""
    reporter.message(
        f"{plan.total_steps} steps of {plan.spec.training.batch_size} rows of {plan.spec.data.max_length} tokens, "
        f"learning rate {optimizer.learning_rate:g}{searched}, {plan.num_trained_parameters} trained parameters",
        total_steps=plan.total_steps,
        num_trained_parameters=plan.num_trained_parameters,
        data=plan.statistics,
    )
    if request.parent is not None:
        reporter.message(f"continues from {request.parent.name}", parent=request.parent.model_dump())
    checkpoint = finished_before(store, request, plan.total_steps)
    if checkpoint is None:
        settled = request.model_copy(update={"spec": plan.spec})
        say_waiting(reporter, request.spec, "train", num_workers=request.spec.resources.min_workers)
        checkpoint = fit(WorkerConfig(settled, store.uri, plan.total_steps, prepared, plan.flops_per_token))
    return checkpoint, prepared


def measure(
    store: ObjectStore,
    request: AttemptRequest,
    reporter: Reporter,
    checkpoint: str,
    prepared: ray.ObjectRef,
    *,
    is_trial: bool = False,
) -> Manifest:
    """Evaluate the trained student on the job's workers together. Returns the manifest that the first one published.
    `is_trial`: publish only the report. Raises `StoppedError` if the attempt is to end first."""
    resources = request.spec.resources
    num_workers = group_size(resources)
    say_waiting(reporter, request.spec, "evaluate", num_workers=num_workers)
    bundle = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    if resources.accelerator_type:
        bundle[f"accelerator_type:{resources.accelerator_type}"] = 0.001
    group = placement_group([{name: amount for name, amount in bundle.items() if amount}] * num_workers)
    try:
        for failures in range(_MAX_FAILURES + 1):
            try:
                return _run_together(group, store, request, checkpoint, prepared, is_trial)
            except StoppedError:
                raise
            except Exception as error:
                if failures == _MAX_FAILURES or root_cause(error) is not None or not explain(error).retryable:
                    raise
                get_logger().warning("group_begins_again", error=explain(error).message)
    finally:
        remove_placement_group(group)
    raise AssertionError("the last failure is raised")


def publish_copy(store: ObjectStore, request: AttemptRequest, reporter: Reporter, key: str) -> None:
    """Copy a model to the target in the spec, if it has one. Repeating the copy changes nothing."""
    target = request.spec.publish.publication
    if target is None:
        return
    say_waiting(reporter, request.spec, "publish")
    url = wait_for(as_task(publish, request.spec.resources).remote(request, store.uri, key), store, request)
    reporter.message(f"published to {url}", published={"to": target.to, "url": url})


def have_data_written(store: ObjectStore, request: AttemptRequest, reporter: Reporter) -> None:
    """Let every worker write its share of the teacher's answers, if the data needs any."""
    if all(source.complete is None for source in request.spec.data.sources):
        return
    reporter.message("the teacher answers the prompts of its data")
    resources = request.spec.resources
    say_waiting(reporter, request.spec, "write")
    task = as_task(write, resources)
    shares = [task.remote(request, store.uri, worker) for worker in range(resources.max_workers)]
    written = sum(wait_for(share, store, request) for share in shares)
    reporter.message(f"the teacher wrote {written} tokens")


def as_task(function: Callable[..., Any], resources: ResourcesSpec, *, num_returns: int = 1) -> Any:
    return ray.remote(function).options(**task_options(resources), num_returns=num_returns)


def task_options(resources: ResourcesSpec) -> dict[str, Any]:
    return {
        "num_cpus": resources.cpus_per_worker,
        "num_gpus": resources.gpus_per_worker,
        "memory": resources.memory_per_worker,
        "accelerator_type": resources.accelerator_type,
    }


def wait_for(task: ray.ObjectRef, store: ObjectStore, request: AttemptRequest) -> Any:
    """Wait for a task's result, however long the cluster takes to place it. Raises `StoppedError` if the attempt is to
    end first; another attempt then repeats the task."""
    try:
        return _wait([task], store, request)
    except StoppedError:
        ray.cancel(task, force=True)
        raise


def group_size(resources: ResourcesSpec) -> int:
    """Return the number of workers for a group: as many as fit now, within the spec's bounds. Resources held by others
    are not waited for, except for a moment: workers that have trained release theirs shortly after they end."""
    fewest, most = resources.min_workers, resources.max_workers
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}

    def room(there: dict[str, float]) -> int:
        return min(int(there.get(name, 0.0) // amount) for name, amount in each.items() if amount)

    found = fewest
    most = min(most, room(ray.cluster_resources())) if fewest < most else fewest
    for _ in range(_LOOKS_FOR_ROOM):
        if found >= most:
            break
        found = max(fewest, room(ray.available_resources()))
        time.sleep(LOOK_INTERVAL_S if found < most else 0.0)
    return min(found, max(fewest, most))


def _run_together(
    group: PlacementGroup,
    store: ObjectStore,
    request: AttemptRequest,
    checkpoint: str,
    prepared: ray.ObjectRef,
    is_trial: bool,
) -> Manifest:
    """Run `evaluate` on all workers of a group, and return the first one's result."""
    resources, size = request.spec.resources, group.bundle_count

    def at(rank: int) -> dict[str, Any]:
        return {"max_retries": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}

    each = {"num_cpus": resources.cpus_per_worker, "num_gpus": resources.gpus_per_worker}
    tasks = [ray.remote(_meeting_place).options(num_cpus=0, **at(0)).remote()]
    try:
        address = _wait(tasks, store, request)
        worker = ray.remote(evaluate)
        tasks = [
            worker.options(**each, **at(rank)).remote(
                request, store.uri, checkpoint, prepared, Member(rank, size, address), is_trial
            )
            for rank in range(size)
        ]
        manifest: Manifest = _wait(tasks, store, request)
        return manifest
    except BaseException:
        _, running = ray.wait(tasks, num_returns=len(tasks), timeout=0)  # cancelling an ended task may end this process
        for one in running:
            ray.cancel(one, force=True)
        raise


def _wait(tasks: list[ray.ObjectRef], store: ObjectStore, request: AttemptRequest) -> Any:
    """Return the first task's result when all have ended. Raises the error of a task that fails."""
    pending = tasks
    while pending:
        done, pending = ray.wait(pending, timeout=LOOK_INTERVAL_S)
        for task in done:
            ray.get(task)
        stop_request = look(store, request) if pending else None
        if stop_request in STOPPED:
            raise StoppedError(STOPPED[stop_request])
    return ray.get(tasks[0])


def _meeting_place() -> str:
    """Host and a free port of the machine of the first worker."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"{ray.util.get_node_ip_address()}:{port}"


def needed_resources(spec: JobSpec) -> dict[str, float]:
    """Return the resources, by Ray's names, of all workers that run at the same time."""
    resources = spec.resources
    num_workers = resources.min_workers * (spec.sweep.max_concurrent if spec.sweep else 1)
    return {"CPU": resources.cpus_per_worker * num_workers, "GPU": resources.gpus_per_worker * num_workers}


def refuse_unshared_store(store: ObjectStore) -> None:
    """Raise `InvalidInputError` if the store is a directory and the cluster has several nodes, which cannot see each
    other's directories."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if num_nodes == 1 or not isinstance(store, LocalObjectStore) or os.environ.get(_SHARED) == "1":
        return
    instead = f"use an s3:// address, or {_SHARED}=1 in the environment of Ray's head if every node mounts it"
    raise InvalidInputError.for_field(
        "storage_uri", store.uri, f", a directory, and the cluster has {num_nodes} nodes; {instead}"
    )


def warn_if_too_large(reporter: Reporter, spec: JobSpec) -> None:
    """Warn if the cluster lacks the resources for the job: Ray would wait silently, since the cluster might grow."""
    available = ray.cluster_resources()
    for name, amount in needed_resources(spec).items():
        if amount > available.get(name, 0.0):
            reporter.message(
                f"waiting for the cluster to grow: the workers need {amount:g} {name}s, and it has "
                f"{available.get(name, 0.0):g}; use fewer resources.num_workers",
                level="warn",
            )


def write(request: AttemptRequest, store_uri: str, worker: int) -> int:
    """Let the teacher write a worker's share (`jobs.worker.prepare`), unless the rows are prepared already."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="write", worker=worker)
    from swiftkv_platform.jobs.worker.prepare import write as run

    store = open_store(store_uri)
    say_placed(store, request, "write")
    return 0 if find_rows(store, request) is not None else run(request, store_uri, worker)


def prepare(request: AttemptRequest, store_uri: str) -> tuple[Plan, StoredPreparation]:
    """Prepare rows (`jobs.worker.prepare`), or use those that an earlier attempt has prepared."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="prepare")
    from swiftkv_platform.jobs.worker.prepare import AttemptAnswers
    from swiftkv_platform.jobs.worker.prepare import prepare as run
    from swiftkv_platform.jobs.worker.setup import access_of

    store = open_store(store_uri)
    say_placed(store, request, "prepare")
    with _traced(request, "prepare"), tempfile.TemporaryDirectory(prefix="rows-") as workspace:
        rows = Path(workspace) / "rows"
        key = find_rows(store, request)
        if key is not None:
            fetch_directory(store, key, rows)
        told = phase_progress(store, request, "prepare", "sources")
        answers = AttemptAnswers(store, request)
        plan, _ = run(request.spec, rows, answers=answers, access=access_of(request), progress=told)
        key = key or publish_rows(store, request, rows)
        return plan, StoredPreparation(store.uri, key, find_start(store, request) or start_key(request))


def publish_trial(
    request: AttemptRequest, store_uri: str, spec: JobSpec, trial_store_uri: str, trial: Manifest, files: dict[str, str]
) -> Manifest:
    """Publish the chosen trial's model, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    from swiftkv_platform.jobs.worker.evaluate import publish_trial as run

    return run(request, store_uri, spec, trial_store_uri, trial, files)


def evaluate(
    request: AttemptRequest, store_uri: str, checkpoint: str, stored: StoredPreparation, member: Member, is_trial: bool
) -> Manifest | None:
    """Evaluate the student together with the other workers and publish it, or of a trial only its report, see
    `jobs.worker.evaluate`."""
    trial: dict[str, Any] = {"trial": request.spec.name} if is_trial else {}
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="evaluate", rank=member.rank, **trial)
    from swiftkv_platform.jobs.worker.evaluate import evaluate_and_publish, evaluate_trial

    with _traced(request, "evaluate", rank=member.rank), _evaluating(request, store_uri, stored, member) as prepared:
        run = evaluate_trial if is_trial else evaluate_and_publish
        return run(request, store_uri, checkpoint, prepared)


def publish(request: AttemptRequest, store_uri: str, key: str) -> str:
    """Copy the model at `key` to the target in the spec; returns its address there."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    store = open_store(store_uri)
    say_placed(store, request, "publish")
    from swiftkv_platform.reports.model_card import render_model_card
    from swiftkv_platform.storage.publishing import publish as run

    spec = request.spec.publish.publication
    assert spec is not None, "called for a spec that publishes"
    return run(
        store,
        key,
        spec.to,
        card=lambda manifest: render_model_card(manifest.lineage, manifest.metrics, licence=None),
        private=spec.private,
        targets=request.publish_targets,
        progress=phase_progress(store, request, "publish", "bytes"),
    )


@contextmanager
def _traced(request: AttemptRequest, phase: str, *, rank: int = 0) -> Iterator[None]:
    """Trace a phase on the first worker. Spans are sent before the task ends, since its process may end too."""
    if rank != 0:
        yield
        return
    spans = get_job_spans()
    try:
        with spans.span(phase, request.traceparent, job_id=request.job_id, attempt=request.attempt):
            yield
    finally:
        spans.flush()


@contextmanager
def _evaluating(
    request: AttemptRequest, store_uri: str, stored: StoredPreparation, member: Member
) -> Iterator[Prepared]:
    """Join the workers of an evaluation, and download the inputs to this machine."""
    from swiftkv_platform.jobs.worker.setup import joined, shared_workspace
    from swiftkv_platform.model.workers import Workers

    if member.rank == 0:
        say_placed(open_store(store_uri), request, "evaluate")
    with joined(member, request.spec.resources), shared_workspace("rows") as workspace:
        rows, workers = workspace.path / "rows", Workers()
        if workspace.fetches:
            stored.fetch(rows)
        workers.gather(None)  # the others wait
        _have_start(request, store_uri, stored, rows, workspace)
        if workspace.fetches:
            stored.fetch_start(rows)
        workers.gather(None)
        yield stored.open(rows)


def _have_start(
    request: AttemptRequest, store_uri: str, stored: StoredPreparation, rows: Path, workspace: Workspace
) -> None:
    """Calibrate again if an earlier attempt that trained has already deleted the calibrated start."""
    from swiftkv_platform.jobs.worker.setup import access_of, find_start, set_up_process, task_device, teacher_path
    from swiftkv_platform.model.workers import Workers

    spec, workers = request.spec, Workers()
    if workers.broadcast_from_first(stored.lacks_start):
        set_up_process(spec)
        path = teacher_path(spec.model, workspace.path, access=access_of(request), fetch=workspace.fetches)
        workers.gather(None)  # the others wait
        told = phase_progress(open_store(store_uri), request, "calibrate", "layers")
        find_start(spec, stored, path, rows, device=task_device(spec), progress=told)
