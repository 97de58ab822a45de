"""The Ray tasks of an attempt. The driver imports only this module of the workers' code, so that it starts quickly;
tasks import their computations where they run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.jobs.attempt.events import phase_progress, say_placed
from swiftkv_platform.jobs.attempt.stored import StoredPreparation, find_rows, find_start, publish_rows, start_key
from swiftkv_platform.jobs.values import Member, Plan
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.traces import spans_of_jobs

if TYPE_CHECKING:
    from swiftkv_platform.jobs.attempt.stored import Prepared
    from swiftkv_platform.jobs.worker.setup import Workspace


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


def evaluate_trial(
    request: AttemptRequest, store_uri: str, checkpoint: str, stored: StoredPreparation, member: Member
) -> Manifest | None:
    """Measure a sweep's trial together with the other workers, see `jobs.worker.evaluate`."""
    configure_logging(
        job_id=request.job_id, attempt=request.attempt, phase="evaluate", trial=request.spec.name, rank=member.rank
    )
    from swiftkv_platform.jobs.worker.evaluate import evaluate_trial as run

    with _evaluating(request, store_uri, stored, member) as prepared:
        return run(request, store_uri, checkpoint, prepared)


def publish_trial(
    request: AttemptRequest, store_uri: str, spec: JobSpec, trial_store_uri: str, trial: Manifest, files: dict[str, str]
) -> Manifest:
    """Publish the chosen trial's model, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    from swiftkv_platform.jobs.worker.evaluate import publish_trial as run

    return run(request, store_uri, spec, trial_store_uri, trial, files)


def evaluate(
    request: AttemptRequest, store_uri: str, checkpoint: str, stored: StoredPreparation, member: Member
) -> Manifest | None:
    """Evaluate the student together with the other workers and publish it, see `jobs.worker.evaluate`."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="evaluate", rank=member.rank)
    from swiftkv_platform.jobs.worker.evaluate import evaluate_and_publish

    with _traced(request, "evaluate", rank=member.rank), _evaluating(request, store_uri, stored, member) as prepared:
        return evaluate_and_publish(request, store_uri, checkpoint, prepared)


def publish(request: AttemptRequest, store_uri: str, key: str) -> str:
    """Copy the model at `key` to the target in the spec; returns its address there."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, phase="publish")
    store = open_store(store_uri)
    say_placed(store, request, "publish")
    from swiftkv_platform.reports.model_card import model_card
    from swiftkv_platform.storage.publishing import publish as run

    spec = request.spec.publish.publication
    assert spec is not None, "called for a spec that publishes"
    return run(
        store,
        key,
        spec.to,
        card=lambda manifest: model_card(manifest.lineage, manifest.metrics, licence=None),
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
    spans = spans_of_jobs()
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
    if workers.from_first(stored.lacks_start):
        set_up_process(spec)
        path = teacher_path(spec.model, workspace.path, access=access_of(request), fetch=workspace.fetches)
        workers.gather(None)  # the others wait
        told = phase_progress(open_store(store_uri), request, "calibrate", "layers")
        find_start(spec, stored, path, rows, device=task_device(spec), progress=told)
