"""Outcome of a job whose attempt has ended: success, another attempt, or its final status. Submits nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swiftkv_platform.contract.attempts import PROTOCOL, Manifest, is_from_protocol_1, refusal
from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.jobs.costs import measured_speed
from swiftkv_platform.control_plane.jobs.job import Failure, Job, JobStatus, Reason, requeue
from swiftkv_platform.control_plane.jobs.ports import Submission, SubmissionStatus
from swiftkv_platform.control_plane.jobs.reading import Reading
from swiftkv_platform.control_plane.models.model import Model, documents_fault
from swiftkv_platform.errors import ArtifactCorruptError, ProtocolError, StorageError
from swiftkv_platform.storage.attempt_store import AttemptStore

_LONGEST_DELAY_S = 60.0
_OF_THE_CLUSTER = (ReasonCode.PREEMPTED, ReasonCode.NOT_PLACED)
"""Reasons for an attempt's end that are caused by the cluster and use up no retry."""
_TO_TRY_AGAIN = (ReasonCode.NOT_PLACED, ReasonCode.PREEMPTED, ReasonCode.WORKER_LOST)
"""Reasons for which the control plane ends an attempt, but makes another one."""


@dataclass(frozen=True)
class AttemptOutcomes:
    """Decides what happens to a job once its attempt has ended."""

    store: AttemptStore
    digest: Callable[[Manifest], str]
    """SHA-256 of a manifest."""
    retry_delay_s: float
    """Pause before the second attempt; it doubles with every further one."""

    def decide(self, reading: Reading, submission: Submission | None) -> Model | None:
        """Change the status of the job of `reading`; returns the model if the attempt has made one.

        `submission`: None means that Ray has forgotten it, as a restarted head does.
        """
        job = reading.job
        cancelling = job.status is JobStatus.CANCELLING
        ended_well = submission is not None and submission.status is SubmissionStatus.SUCCEEDED
        ended_well = ended_well and not job.attempt.paused
        if ended_well and job.spec.only_publishes:
            self._settle_publication(reading)
            return None
        unexplained = job.attempt.stopping is None and job.attempt.failure is None
        damage: Failure | None = None
        if ended_well or (unexplained and not cancelling):
            # The manifest is written last: if it exists, the work is done, even if the process failed afterwards.
            try:
                manifest = self.store.artifact_manifest(job.attempt_id)
            except ArtifactCorruptError as error:
                damage = Failure(Reason(error.code, error.message), retryable=True)
            else:
                if manifest is not None:
                    model = self._model(reading, manifest)
                    fault = documents_fault(model)
                    if fault is None:
                        return self._promote(reading, model)
                    damage = Failure(Reason(ArtifactCorruptError.code, f"the model was not stored: {fault}"), False)
        if cancelling:
            reading.move(JobStatus.CANCELLED, job.status_reason)
        elif job.status is JobStatus.PAUSING:
            self._settle_pause(reading, damage or job.attempt.failure)
        elif submission is None and unexplained and damage is None:
            # Ray no longer knows the attempt. The job did not cause that, so it uses up no retry.
            message = f"Ray no longer knows {job.attempt.submission_id}; its head was restarted"
            self._requeue(reading, Reason(ReasonCode.WORKER_LOST, message), counts=False)
        else:
            self._settle_failure(reading, damage or _cause(job, submission))
        return None

    def _settle_publication(self, reading: Reading) -> None:
        """Mark a job that copied a model as succeeded; no model was made."""
        if reading.job.status is JobStatus.STARTING:
            reading.move(JobStatus.RUNNING)
        result = {"published": {"model": reading.job.spec.training.from_, "to": reading.job.spec.publish.to}}
        reading.job = replace(reading.job, result=result, progress=replace(reading.job.progress, percent=100.0))
        reading.move(JobStatus.SUCCEEDED)

    def _settle_pause(self, reading: Reading, failure: Failure | None) -> None:
        """Mark the job as paused, even if its attempt ended for another cause; as failed if that cause is not
        retryable."""
        stopping = reading.job.attempt.stopping
        if stopping is not None and stopping.code not in _TO_TRY_AGAIN:
            reading.move(JobStatus.FAILED, stopping)
        elif failure is not None and not failure.retryable:
            reading.move(JobStatus.FAILED, failure.reason)
        else:
            reading.move(JobStatus.PAUSED, reading.job.status_reason)

    def _settle_failure(self, reading: Reading, failure: Failure) -> None:
        retries_left = reading.job.retries < reading.job.spec.fault_tolerance.max_retries
        counts = failure.reason.code not in _OF_THE_CLUSTER
        if failure.retryable and (retries_left or not counts):
            self._requeue(reading, failure.reason, counts=counts)
        else:
            reading.move(JobStatus.FAILED, failure.reason)

    def _requeue(self, reading: Reading, reason: Reason, *, counts: bool) -> None:
        job = reading.job
        reading.job, event = requeue(
            job,
            now=reading.now,
            reason=reason,
            delay_s=min(self.retry_delay_s * 2.0 ** min(job.attempt.number - 1, 16), _LONGEST_DELAY_S),
            counts=counts,
        )
        reading.events.append(event)

    def _model(self, reading: Reading, manifest: Manifest) -> Model:
        job = reading.job
        return Model(
            id=new_id("mdl"),
            tenant=job.tenant,
            name=job.spec.name,
            job_id=job.id,
            attempt=job.attempt.number,
            created_at=reading.now,
            artifact_uri=self.store.artifact_uri(job.attempt_id),
            manifest_digest=self.digest(manifest),
            size=manifest.size,
            lineage=dict(manifest.lineage),
            metrics=dict(manifest.metrics),
        )

    def _promote(self, reading: Reading, model: Model) -> Model:
        """Make `model` the job's; the update that stores both is refused if the job has changed."""
        if reading.job.status is JobStatus.STARTING:
            reading.move(JobStatus.RUNNING)
        job = reading.job
        reading.job = replace(
            job,
            distilled_model=model.id,
            artifact_uri=model.artifact_uri,
            result=model.metrics,
            progress=replace(job.progress, percent=100.0),
            speed=measured_speed(job, reading.now),
        )
        reading.move(JobStatus.SUCCEEDED)
        return model


def _cause(job: Job, submission: Submission | None) -> Failure:
    """Return the failure: the control plane's decision, else the attempt's own last error, else what Ray reports."""
    if job.attempt.stopping is not None:
        return Failure(job.attempt.stopping, retryable=job.attempt.stopping.code in _TO_TRY_AGAIN)
    if job.attempt.yields is not None and (job.attempt.failure is None or job.attempt.failure.retryable):
        return Failure(job.attempt.yields, retryable=True)
    if job.attempt.failure is not None:
        return job.attempt.failure
    assert submission is not None, "a forgotten submission without a known failure is not a failure"
    name, said_nothing = job.attempt.submission_id, not job.attempt.cursor
    if said_nothing and is_from_protocol_1(submission.message):
        message = refusal(workers=1, control_plane=PROTOCOL)
        return Failure(Reason(ProtocolError.code, message), retryable=False)
    match submission.status:
        case SubmissionStatus.SUCCEEDED:
            message = f"{name} succeeded, but its artifact has no manifest, so it is not complete"
            return Failure(Reason(StorageError.code, message), retryable=False)
        case SubmissionStatus.STOPPED:
            message = f"{name} was stopped, but not by this control plane"
            return Failure(Reason(ReasonCode.PREEMPTED, message), retryable=True)
        case _:
            # Ray's message ends with the log's tail; the whole log is stored with the attempt.
            explanation = submission.message.partition("\n")[0].strip() or "no reason given"
            return Failure(
                Reason(ReasonCode.WORKER_LOST, f"{name} failed without saying why; Ray: {explanation}"), retryable=True
            )
