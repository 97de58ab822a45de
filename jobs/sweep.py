"""Trials of a sweep on the connected cluster, and the choice of the best one.

Each trial is an attempt in its own object store below the job's. Checkpoints, events and report have their usual keys,
and a later attempt of the sweep resumes from them. Ray Tune would keep a second record of finished trials, which the
control plane could neither fence nor resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest, Manifest, StopRequest, trials_prefix
from swiftkv_platform.contract.events import (
    AttemptEvent,
    MessageEvent,
    MetricsEvent,
    PlacementEvent,
    ProgressEvent,
    ReasonCode,
    SteeringEvent,
    TrackingEvent,
)
from swiftkv_platform.contract.sweeps import (
    GROUP_SIZE_FIELD,
    SweepReport,
    Trial,
    expand_sweep,
    make_trial_result,
    summarize_trials,
)
from swiftkv_platform.contract.verdicts import read_gate_verdict
from swiftkv_platform.errors import InvalidInputError, QualityGateError, TrainingError
from swiftkv_platform.jobs.attempt.events import (
    STOP_POLL_INTERVAL_S,
    EventReporter,
    checkpoint_on_sigterm,
    follow_events,
    read_stop_request,
)
from swiftkv_platform.jobs.driver import evaluate_on_workers, make_task, publish_trial, train, wait_for_task
from swiftkv_platform.jobs.failures import explain_failure, find_root_cause
from swiftkv_platform.jobs.values import STOP_REASONS, StoppedError
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.reports.pages import render_sweep_page
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, join_object_key, open_store


@dataclass(frozen=True)
class TrialOutcome:
    """Result of a trial."""

    manifest: Manifest | None
    """Manifest of the trial's report; None if the trial failed."""
    error: str | None = None


def run_sweep(store: ObjectStore, request: AttemptRequest, reporter: EventReporter) -> Manifest:
    """Run all trials that no earlier attempt has finished, and publish the model of the best one.

    Raises:
        StoppedError: a pause request, or preempted nodes; running trials have saved checkpoints.
        QualityGateError: every trial fails a gate; the attempt's `sweep.json` has the results.
    """
    # 1. run the trials
    trials = expand_sweep(request.spec)
    outcomes = _run_trials(store, request, trials, reporter)
    # 2. write the report
    ended = ((trial, outcomes[trial.name]) for trial in trials)
    report = summarize_trials(
        [
            make_trial_result(trial, report=one.manifest.metrics if one.manifest else None, error=one.error)
            for trial, one in ended
        ]
    )
    files = {
        "sweep.json": report.model_dump_json(indent=2) + "\n",
        "sweep.html": render_sweep_page(request.spec.name, report),
    }
    for name, text in files.items():
        store.put_bytes(f"{request.attempt_id.prefix}/{name}", text.encode())
    reporter.send_message(f"{len(trials)} trials finished", sweep=_build_table(report), recommended=report.recommended)
    # 3. choose a trial and publish its model
    trial = _choose_trial(report, trials)
    passed = report.recommended_result is not None and report.recommended_result.has_passed_gates
    why = "cheapest trial that passed all gates" if passed else "undecided trial with the lowest KL"
    reporter.send_message(f"selected trial {trial.name}: {why}")
    reporter.send_status("evaluating")
    manifest = outcomes[trial.name].manifest
    assert manifest is not None, "the selected trial has a report"
    task = make_task(publish_trial, trial.spec.resources)
    trial_uri = _open_trial_store(store, request, trial).uri
    published: Manifest = wait_for_task(
        task.remote(request, store.uri, trial.spec, trial_uri, manifest, files), store, request
    )
    return published


def run_trial(request: AttemptRequest, store_uri: str, trial: Trial) -> TrialOutcome:
    """Train and evaluate one trial, and forward its events to the job. In the job's metrics, the steps of a trial
    follow those of earlier trials."""
    configure_logging(job_id=request.job_id, attempt=request.attempt, trial=trial.name)
    store = open_store(store_uri)
    reporter = EventReporter(store, request.attempt_id, f"trial-{trial.name}")
    trial_store = _open_trial_store(store, request, trial)
    attempts = AttemptStore(trial_store)
    own = request.model_copy(
        update={
            "spec": trial.spec,
            "resume_from": attempts.find_newest_checkpoint(request.job_id, before_attempt=request.attempt),
            "run_id": f"{request.run_id}-{trial.name}",
        }
    )
    attempts.write_request(own)
    num_trials = len(expand_sweep(request.spec))

    def forward_event(event: AttemptEvent) -> None:
        match event:
            case MetricsEvent():
                total = event.data["total_steps"]
                points = [
                    {**point, "step": trial.index * total + point["step"], "trial": trial.index}
                    for point in event.data["points"]
                ]
                reporter.send_metrics(points, num_trials * total)
            case PlacementEvent():
                reporter.send_placement(event.data)
            case SteeringEvent():
                reporter.send_steering_decision(f"[{trial.name}] {event.message}", event.data)
            case ProgressEvent():
                data = event.data
                part, eta = f"{trial.name}: {data['part']}", data.get("eta_s")
                reporter.send_progress(data["phase"], part, done=data["done"], total=data["total"], eta_s=eta)
            case MessageEvent() | TrackingEvent():
                reporter.send_message(f"[{trial.name}] {event.message}", level=event.level, **event.data)

    with follow_events(attempts, own, forward_event):
        try:
            checkpoint, prepared = train(
                trial_store, own, EventReporter(trial_store, own.attempt_id, "driver"), rows_store=store
            )
        except Exception as error:
            if not _is_caused_by_trial(error):
                raise
            message = explain_failure(error).message
            trial_store.put_bytes(_make_failure_key(request.attempt_id), message.encode())
            return TrialOutcome(None, message)
        manifest = evaluate_on_workers(trial_store, own, reporter, checkpoint, prepared, is_trial=True)
    return TrialOutcome(manifest)


def _is_caused_by_trial(error: Exception) -> bool:
    """Whether an error is caused by the trial's values, such as a too high learning rate, and not by the job."""
    cause = find_root_cause(error)
    if isinstance(cause, InvalidInputError):
        return cause.field == GROUP_SIZE_FIELD  # too large for the trial's l
    return isinstance(cause, TrainingError) or explain_failure(error).code == ReasonCode.OUT_OF_MEMORY


def _run_trials(
    store: ObjectStore, request: AttemptRequest, trials: tuple[Trial, ...], reporter: EventReporter
) -> dict[str, TrialOutcome]:
    sweep = request.spec.sweep
    assert sweep is not None, "the spec has a sweep"
    outcomes: dict[str, TrialOutcome] = {}
    for trial in trials:
        before = _find_earlier_outcome(store, request, trial)
        if before is not None:
            reporter.send_message(f"[{trial.name}] finished in an earlier attempt")
            outcomes[trial.name] = before
    waiting = [trial for trial in trials if trial.name not in outcomes]
    running: dict[ray.ObjectRef, Trial] = {}
    # The task needs no CPU: it waits for its workers.
    task = ray.remote(run_trial).options(num_cpus=0, max_retries=0)
    stop_request = StopRequest.NONE
    with checkpoint_on_sigterm(store, request):
        while running or (waiting and stop_request not in STOP_REASONS):
            while waiting and stop_request not in STOP_REASONS and len(running) < sweep.max_concurrent:
                trial = waiting.pop(0)
                running[task.remote(request, store.uri, trial)] = trial
            done, _ = ray.wait(list(running), timeout=STOP_POLL_INTERVAL_S)
            known, stop_request = stop_request, max(stop_request, read_stop_request(store, request))
            for trial in running.values() if stop_request is not known else ():
                _forward_stop_request(stop_request, AttemptStore(_open_trial_store(store, request, trial)), request)
            for ended in done:
                trial = running.pop(ended)
                try:
                    outcome: TrialOutcome = ray.get(ended)
                except StoppedError:
                    waiting.append(trial)
                    continue
                outcomes[trial.name] = outcome
                if outcome.error is not None:
                    reporter.send_message(f"[{trial.name}] failed: {outcome.error}", level="warn")
    if waiting:
        raise StoppedError(STOP_REASONS[stop_request])
    return outcomes


def _forward_stop_request(stop_request: StopRequest, trial: AttemptStore, request: AttemptRequest) -> None:
    """Forward the job's stop request to a running trial."""
    if stop_request is StopRequest.PAUSE:
        trial.request_pause(request.attempt_id)
    elif stop_request is StopRequest.STOP:
        trial.announce_preemption(request.attempt_id)


def _open_trial_store(store: ObjectStore, request: AttemptRequest, trial: Trial) -> ObjectStore:
    return open_store(join_object_key(store.uri, f"{trials_prefix(request.job_id)}/{trial.name}"))


def _find_earlier_outcome(store: ObjectStore, request: AttemptRequest, trial: Trial) -> TrialOutcome | None:
    """Return the outcome of a trial that an earlier attempt has finished; None if there is none."""
    trial_store = _open_trial_store(store, request, trial)
    for attempt in reversed(request.attempt_id.list_attempts_so_far()):
        manifest = AttemptStore(trial_store).read_artifact_manifest(attempt)
        if manifest is not None:
            return TrialOutcome(manifest)
        failure = _make_failure_key(attempt)
        if trial_store.head(failure) is not None:
            return TrialOutcome(None, trial_store.get_bytes(failure).decode())
    return None


def _make_failure_key(attempt: AttemptId) -> str:
    return f"{attempt.prefix}/failed.txt"


def _choose_trial(report: SweepReport, trials: tuple[Trial, ...]) -> Trial:
    chosen = report.recommended_result
    if chosen is not None:
        return next(trial for trial in trials if trial.name == chosen.name)
    measured = [candidate for candidate in report.points if candidate.report is not None]
    if not measured:
        raise TrainingError(f"every trial of the sweep failed; first error: {report.points[0].error}", field="sweep")
    best = min(measured, key=lambda candidate: candidate.ranking_key[-1])
    assert best.report is not None
    failed = next(gate for gate in best.report["gates"] if read_gate_verdict(gate) == "failed")
    raise QualityGateError(
        f"every trial of the sweep fails a quality gate; in {best.name}, the trial with the lowest KL, "
        f"{failed['subject']} is {failed['value']:.4g} and the limit {failed['field']} is {failed['limit']:g}; use "
        "more training or a larger l",
        field=failed["field"],
        value=failed["value"],
    )


def _build_table(report: SweepReport) -> list[dict[str, object]]:
    """Return the trials' figures for the job's events."""
    rows: list[dict[str, object]] = []
    for candidate in report.points:
        row: dict[str, object] = {"trial": candidate.name, "error": candidate.error}
        if candidate.report is not None:
            prefill, cache, kl = candidate.ranking_key
            row |= {"prefill_flops_ratio": prefill, "kv_bytes_ratio": cache, "kl": kl}
            row |= {
                "perplexity_ratio": candidate.report["perplexity_ratio"],
                "within_budget": candidate.has_passed_gates,
            }
        rows.append(row)
    return rows
