"""Response models of jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

from pydantic import ConfigDict

from swiftkv_platform.contract.cures import advise_on_failure
from swiftkv_platform.contract.events import Level
from swiftkv_platform.contract.verdicts import summarize_quality
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, Prices
from swiftkv_platform.control_plane.jobs.job import (
    EventType,
    Job,
    JobStatus,
    MetricPoint,
    PhaseProgress,
    Progress,
    Reason,
)
from swiftkv_platform.control_plane.responses import ResponseModel, T
from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import Positive
from swiftkv_platform.storage.attempt_store import CheckpointName, StoredCheckpoint


class JobError(ResponseModel):
    code: str
    message: str
    param: str | None = None
    """Dotted path of the field that caused the problem, if any."""
    cure: str
    """Advice on how to fix the problem: the fields to change, with their values and what to use instead."""


class JobResponse(ResponseModel):
    """A distillation job. Times are Unix seconds."""

    id: str
    object: Literal["distillation.job"] = "distillation.job"
    name: str
    status: JobStatus
    error: JobError | None
    """Cause of a failed job and its cure; null for others."""
    status_reason: Reason | None
    phase: str | None
    """Phase of a job on the cluster: `write` (the teacher's answers), `prepare`, `calibrate`, `train`, `evaluate` or
    `publish`; null before the first, and off the cluster."""
    phase_progress: PhaseProgress | None
    """Progress of the phase, if its workers report it; `progress` has the steps of `train`."""
    queue_place: int | None
    """Position of a queued job among its tenant's, which start in this order; the first has 1."""
    waiting_since: int | None
    """Time since which a queued job waits for resources of the cluster; `status_reason` says for which."""
    created_at: int
    started_at: int | None
    finished_at: int | None
    estimated_finish: int | None
    progress: Progress
    attempt: int
    spec: JobSpec
    distilled_model: str | None
    """`mdl_` id, once the job has succeeded."""
    result: dict[str, Any] | None
    """The evaluation report."""
    verdict: str | None
    """One-sentence summary of the model's evaluation; null if it was not evaluated."""
    tracking: dict[str, Any] | None
    artifact_uri: str | None
    cost: float | None
    """Cost so far, over all attempts, at the operator's prices; null without prices."""
    estimated_cost: float | None
    """Estimated cost at the end of the training, at the present speed."""
    submission_id: str | None
    """Ray's submission id of the present attempt."""
    metadata: dict[str, str]
    tenant: str
    created_by: str

    @classmethod
    def from_job(
        cls, job: Job, prices: Prices, now: float, queue_place: int | None = None, waits: Reason | None = None
    ) -> Self:
        """Make the response. `waits`: why a queued job has not started."""
        error = None
        if (cause := job.error) is not None:
            cure = advise_on_failure(cause.code, cause.field, job.spec, value=cause.value, job_id=job.id)
            error = {**vars(cause), "param": cause.field, "cure": cure}
        return cls.model_validate(
            {
                **vars(job),
                "name": job.spec.name,
                "phase": job.phase,
                "phase_progress": job.phase_progress,
                "queue_place": queue_place,
                "status_reason": waits or job.status_reason,
                "attempt": job.attempt.number,
                "submission_id": job.attempt.submission_id,
                "cost": prices.compute_cost_so_far(job, now),
                "estimated_cost": prices.estimate_final_cost(job, now),
                "error": error,
                "verdict": summarize_quality(job.result) if job.result else None,
                "metadata": job.spec.metadata,
            }
        )


class ResumeRequest(FiniteBaseModel):
    """Options for resuming a paused job."""

    cost_cap: Positive | None = None
    """Replaces `limits.cost_cap`."""


class EstimateResponse(JobEstimate):
    """Estimate of the job's cost and of its student; for a sweep, of its first trial. If the teacher's configuration is
    on the hub, only sources and gates are set, and the rest is null."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    object: Literal["distillation.estimate"] = "distillation.estimate"


class EventResponse(ResponseModel):
    """Something that happened to a job."""

    id: str
    object: Literal["distillation.job.event"] = "distillation.job.event"
    created_at: int
    level: Level
    type: EventType
    message: str
    data: dict[str, Any]


class MetricPointResponse(ResponseModel):
    """The measurements of one step: `logits_loss`, `lr`, `tokens_per_second`, ... as the attempt reported them."""

    model_config = ConfigDict(extra="allow")

    step: int
    attempt: int
    time: float
    """Unix seconds."""

    @classmethod
    def from_point(cls, point: MetricPoint) -> Self:
        return cls.model_validate({**point.values, "step": point.step, "attempt": point.attempt, "time": point.time})


class CheckpointResponse(ResponseModel):
    """A complete checkpoint."""

    id: str
    object: Literal["checkpoint"] = "checkpoint"
    attempt: int
    step: int
    key: str
    """Directory in the object store."""
    size: int
    """Bytes."""
    sha256: str
    """SHA-256 of the checkpoint's manifest, which has the SHA-256 of each file."""
    held_out_kl: float | None
    """Held-out KL at this step, in nats; null if it was not measured."""
    distilled_model: str | None
    """The job's model (`mdl_...`) if it is made of this checkpoint, else null."""

    @classmethod
    def from_checkpoint(cls, checkpoint: StoredCheckpoint, *, model: str | None = None) -> Self:
        return cls.model_validate({**vars(checkpoint), "id": make_checkpoint_id(checkpoint), "distilled_model": model})


def make_checkpoint_id(checkpoint: StoredCheckpoint | CheckpointName) -> str:
    """Return the id of a checkpoint, unique within its job."""
    return f"ckpt_{checkpoint.step:08d}_{checkpoint.attempt:04d}"


class AncestorResponse(ResponseModel):
    """A model or checkpoint that another one was trained from."""

    name: str
    """`mdl_...` or `job_...:ckpt_...`."""
    job_id: str | None
    """Job that made the model or checkpoint; null for an imported model."""


class ArtifactFileResponse(ResponseModel):
    """One file of a distilled model."""

    object: Literal["artifact.file"] = "artifact.file"
    path: str
    """Relative to the model's directory."""
    size: int
    """Bytes."""
    sha256: str
    url: str
    """Download address: for a limited time at S3, else at this server."""


class TrackingFileResponse(ResponseModel):
    """One file of a W&B run that has not been uploaded to W&B yet."""

    object: Literal["tracking.file"] = "tracking.file"
    path: str
    """Below `jobs/{id}/`."""
    size: int
    """Bytes."""
    url: str
    """Download address: for a limited time at S3, else at this server."""


def paginate(items: Sequence[T], cursor: Callable[[T], str], page: PageQuery) -> Page[T]:
    """Return a page of a list that is in memory."""
    descending = page.order == "desc"
    ordered = sorted(items, key=cursor, reverse=descending)
    after = page.after
    if after is not None:
        ordered = [item for item in ordered if (cursor(item) < after if descending else cursor(item) > after)]
    return Page(ordered[: page.limit], has_more=len(ordered) > page.limit)


class RecipeResponse(ResponseModel):
    """A job spec that ships with the platform."""

    id: str
    object: Literal["recipe"] = "recipe"
    description: str
    """Its purpose, and known results."""
    text: str
    """The spec as YAML, with comments."""
    spec: JobSpec
