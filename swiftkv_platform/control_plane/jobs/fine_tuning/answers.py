"""The JSON of jobs as OpenAI's clients read fine-tuning jobs. Knows no route and no database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from swiftkv_platform.contract.events import Level
from swiftkv_platform.control_plane.http.answers import Answer
from swiftkv_platform.control_plane.jobs.answers import JobAnswer, JobError, checkpoint_id
from swiftkv_platform.control_plane.jobs.job import Event, JobStatus
from swiftkv_platform.storage.attempt_store import StoredCheckpoint

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]

_STATUSES: Mapping[JobStatus, Status] = {
    JobStatus.QUEUED: "queued",
    JobStatus.STARTING: "running",
    JobStatus.RUNNING: "running",
    JobStatus.EVALUATING: "running",
    JobStatus.PAUSING: "running",
    JobStatus.PAUSED: "queued",
    JobStatus.CANCELLING: "running",
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLED: "cancelled",
}


class HyperparametersAnswer(Answer):
    n_epochs: int
    batch_size: int | Literal["auto"]
    learning_rate_multiplier: Literal["auto"] = "auto"


class SupervisedAnswer(Answer):
    hyperparameters: HyperparametersAnswer


class MethodAnswer(Answer):
    type: Literal["supervised"] = "supervised"
    supervised: SupervisedAnswer


class WandbAnswer(Answer):
    project: str
    entity: str | None
    name: str
    tags: list[str]


class IntegrationAnswer(Answer):
    type: Literal["wandb"] = "wandb"
    wandb: WandbAnswer


class FineTuningJobAnswer(Answer):
    """A distillation job as a fine-tuning job. Times are Unix seconds."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    status: Status
    """The job's status in OpenAI's terms; a paused one is `queued`. `swiftkv.status` is more exact."""
    model: str
    """The teacher."""
    fine_tuned_model: str | None
    """`mdl_` id, once the job has succeeded."""
    organization_id: str
    """The tenant."""
    training_file: str
    """The first data source."""
    validation_file: None = None
    result_files: list[str] = []
    hyperparameters: HyperparametersAnswer
    method: MethodAnswer
    integrations: list[IntegrationAnswer]
    metadata: dict[str, str]
    seed: int
    trained_tokens: int | None
    """Null until the job has ended."""
    error: JobError | None
    swiftkv: JobAnswer
    """The same job as returned by `GET /jobs/{id}`."""

    @classmethod
    def of(cls, job: JobAnswer) -> Self:
        spec = job.spec
        hyperparameters = HyperparametersAnswer(
            n_epochs=spec.training.num_epochs,
            batch_size="auto" if spec.training.batch_size is None else spec.training.batch_size,
        )
        return cls(
            id=job.id,
            created_at=job.created_at,
            finished_at=job.finished_at,
            estimated_finish=job.estimated_finish,
            status=_STATUSES[job.status],
            model=spec.model.name_or_path,
            fine_tuned_model=job.distilled_model,
            organization_id=job.tenant,
            training_file=spec.data.sources[0].name_or_path,
            hyperparameters=hyperparameters,
            method=MethodAnswer(supervised=SupervisedAnswer(hyperparameters=hyperparameters)),
            integrations=_integrations(job),
            metadata=job.metadata,
            seed=spec.training.seed,
            trained_tokens=job.progress.tokens if job.status.is_terminal else None,
            error=job.error,
            swiftkv=job,
        )


def _integrations(job: JobAnswer) -> list[IntegrationAnswer]:
    wandb = job.spec.tracking.wandb
    if wandb.mode == "disabled":
        return []
    answer = WandbAnswer(project=wandb.project, entity=wandb.entity, name=job.name, tags=list(wandb.tags))
    return [IntegrationAnswer(wandb=answer)]


class FineTuningEventAnswer(Answer):
    """Something that happened to a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Level
    message: str
    type: Literal["message", "metrics"]
    """`metrics`, or `message` for every other type; `data` has the details."""
    data: dict[str, Any]

    @classmethod
    def of(cls, event: Event) -> Self:
        return cls.model_validate({**vars(event), "type": "metrics" if event.type == "metrics" else "message"})


class CheckpointMetrics(Answer):
    step: int
    train_loss: float | None
    """Loss of the step at which the checkpoint was made."""


class FineTuningCheckpointAnswer(Answer):
    """A complete checkpoint."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    """Name of the checkpoint: its job's id and its own."""
    step_number: int
    metrics: CheckpointMetrics

    @classmethod
    def of(cls, checkpoint: StoredCheckpoint, job_id: str, train_loss: float | None) -> Self:
        name = checkpoint_id(checkpoint)
        return cls(
            id=name,
            created_at=int(checkpoint.created_at),
            fine_tuning_job_id=job_id,
            fine_tuned_model_checkpoint=f"{job_id}:{name}",
            step_number=checkpoint.step,
            metrics=CheckpointMetrics(step=checkpoint.step, train_loss=train_loss),
        )
