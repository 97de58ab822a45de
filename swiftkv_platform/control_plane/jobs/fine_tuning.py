"""`/v1/fine_tuning/jobs`: the jobs of `/jobs` in the format of OpenAI's fine-tuning API.

Settings for which OpenAI has no field are in `swiftkv`, a job spec of which any part may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from swiftkv_platform.contract.events import Level
from swiftkv_platform.control_plane.access.callers import FetchingCaller, ReadingCaller, WritingCaller
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.components import Components, ComponentsDep
from swiftkv_platform.control_plane.jobs.job import Event, JobStatus
from swiftkv_platform.control_plane.jobs.repository import JobFilter
from swiftkv_platform.control_plane.jobs.responses import JobError, JobResponse, make_checkpoint_id
from swiftkv_platform.control_plane.jobs.routes import (
    JobSubmission,
    Presenter,
    Service,
    list_checkpoint_page,
    parse_metadata_filter,
)
from swiftkv_platform.control_plane.responses import (
    ListResponse,
    NewestFirst,
    ResponseModel,
    make_list_response,
    make_page_query,
)
from swiftkv_platform.errors import InvalidInputError, SwiftKVError, rename_fields_in_text
from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import Label, LabelValue, Name, NumEpochs, SignedSeed, Size, Word
from swiftkv_platform.specs.job import JobName
from swiftkv_platform.storage.attempt_store import StoredCheckpoint
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.problems import ERROR_RESPONSES
from swiftkv_platform.web.safe_json import format_path

_DEFAULT_JOB_NAME = "fine-tuning"
"""Name of a job whose request names none."""


def _refuse_other(accepted: Any, why: str) -> BeforeValidator:
    """Return a validator that refuses all values but `accepted`, and says why."""

    def validate(value: Any) -> Any:
        if value != accepted:
            raise ValueError(f"must be {'left out' if accepted is None else repr(accepted)}: {why}")
        return value

    return BeforeValidator(validate)


class PartialSpec(JobSpec):
    """A job spec of which any part may be missing."""

    name: JobName = _DEFAULT_JOB_NAME

    @model_validator(mode="after")
    def _validate_sections(self) -> Self:
        """Check nothing: the rules over several sections hold for the whole spec (`make_job_spec`)."""
        return self


class Hyperparameters(FiniteBaseModel):
    """Hyperparameters as OpenAI names them; `auto` leaves a choice to the job spec's defaults."""

    n_epochs: Literal["auto"] | NumEpochs = "auto"
    """`training.num_epochs`."""
    batch_size: Literal["auto"] | Size = "auto"
    """`training.batch_size`: packed sequences of a step, over all workers."""
    learning_rate_multiplier: Annotated[
        Literal["auto"], _refuse_other("auto", "multipliers are not supported; set swiftkv.optimizer.learning_rate")
    ] = "auto"
    """The learning rate is `swiftkv.optimizer.learning_rate`, absolute."""


class SupervisedMethod(FiniteBaseModel):
    hyperparameters: Hyperparameters | None = None


class Method(FiniteBaseModel):
    """Method of a job: a student that its teacher supervises."""

    type: Literal["supervised", "swiftkv"]
    supervised: SupervisedMethod | None = None
    swiftkv: PartialSpec | None = None
    """Same as the request's `swiftkv`; give only one of them."""


class WandbIntegration(FiniteBaseModel):
    project: Word
    entity: Word | None = None
    tags: Annotated[tuple[Word, ...], Field(max_length=64)] = ()


class Integration(FiniteBaseModel):
    """A receiver of metrics."""

    type: Literal["wandb"]
    wandb: WandbIntegration


class CreateFineTuningJob(FiniteBaseModel):
    """Request for a fine-tuning job, in OpenAI's format."""

    model: Annotated[Name, Field(min_length=1)]
    """The teacher: `model.name_or_path` of a job spec."""
    training_file: Annotated[Name, Field(min_length=1)]
    """Id of an uploaded file (`file-...`), or another data source's `name_or_path`."""
    validation_file: Annotated[
        None, _refuse_other(None, "swiftkv.data.validation_fraction sets the share of training rows that is held out")
    ] = None
    """Not supported: rows are held out of the training file (`swiftkv.data.validation_fraction`)."""
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    integrations: Annotated[tuple[Integration, ...], Field(max_length=1)] | None = None
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=32)] | None = None
    seed: SignedSeed | None = None
    suffix: Annotated[JobName, Field(max_length=64)] | None = None
    """Name of the job and of its model."""
    swiftkv: PartialSpec | None = None
    """Fields of a job spec that OpenAI's API lacks."""

    @model_validator(mode="after")
    def _refuse_repeated_fields(self) -> Self:
        if self.method is None:
            return self
        if self.swiftkv is not None and self.method.swiftkv is not None:
            raise ValueError("give swiftkv or method.swiftkv, not both")
        if self.hyperparameters is not None and self.method.supervised is not None:
            raise ValueError("give hyperparameters or method.supervised, not both")
        return self


_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _JobRequest:
    """A job spec, and the fields of the request that set it."""

    spec: dict[str, Any]
    extension: str
    """Path of SwiftKV's extension in the request."""
    fields: Mapping[_Path, tuple[str, Any]]
    """(field's name, its value) by the path in the spec that an OpenAI field sets."""
    num_added_sources: int
    """1 if `training_file` is a source before those of the extension; else 0."""

    @classmethod
    def from_body(cls, asked: CreateFineTuningJob) -> Self:
        """Raises `InvalidInputError` if a field of OpenAI's and one of `swiftkv` contradict each other."""
        extension, partial = _find_extension(asked)
        spec = {} if partial is None else partial.model_dump(mode="json", exclude_unset=True)
        fields = _map_openai_fields(asked)
        for path, (name, value) in fields.items():
            _set_field(spec, path, name, value, extension)
        sources = spec.setdefault("data", {}).setdefault("sources", [])
        number = next((i for i, source in enumerate(sources) if source.get("name_or_path") == asked.training_file), -1)
        if number < 0:
            sources.insert(0, {"name_or_path": asked.training_file})
        fields[("data", "sources", max(number, 0), "name_or_path")] = ("training_file", asked.training_file)
        spec.setdefault("name", _DEFAULT_JOB_NAME)
        return cls(spec, extension, fields, num_added_sources=int(number < 0))

    def validate(self) -> JobSpec:
        """Return the job spec. Raises `RequestValidationError`, which names the request's fields."""
        try:
            return JobSpec.model_validate(self.spec)
        except ValidationError as error:
            raise RequestValidationError([self._restore_fields(item) for item in error.errors()]) from error

    @contextmanager
    def rename_errors(self) -> Iterator[None]:
        """Make errors about the spec in the context name the request's fields."""
        try:
            yield
        except SwiftKVError as error:
            error.rename_fields(self._rename_field)
            raise

    def _restore_fields(self, item: Any) -> dict[str, Any]:
        """Convert a validation error of the spec to one of the request."""
        field = item.get("ctx", {}).get("field")
        if field is None or item["loc"]:
            return {**item, "loc": ("body", *self._find_field(tuple(item["loc"])))}
        # A rule over several sections names the field to change itself.
        message = rename_fields_in_text(item["msg"], field, self._rename_field)
        return {**item, "loc": ("body",), "msg": message, "ctx": {**item["ctx"], "field": self._rename_field(field)}}

    def _rename_field(self, field: str) -> str:
        """Convert a path of the spec, as errors write it, to the request's; return other words unchanged."""
        path = _split_path(field)
        return format_path(self._find_field(path)) or field if path[0] in _SPEC_FIELDS else field

    def _find_field(self, path: _Path) -> _Path:
        """Return the path in the request of a path in the spec."""
        for start, (name, _) in self.fields.items():
            if path[: len(start)] == start:
                return (*_split_path(name), *path[len(start) :])
        if self.num_added_sources and path[:2] == ("data", "sources") and len(path) > 2:
            path = ("data", "sources", int(path[2]) - self.num_added_sources, *path[3:])
        return (*_split_path(self.extension), *path)


_SPEC_FIELDS = frozenset(field.alias or name for name, field in JobSpec.model_fields.items())


def _split_path(path: str) -> _Path:
    """Split a path, such as "data.sources[0].split" -> ("data", "sources", 0, "split")."""
    return tuple(int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", path))


def _find_extension(asked: CreateFineTuningJob) -> tuple[str, PartialSpec | None]:
    """Return (path of SwiftKV's extension in the request, the extension); (path, None) without an extension."""
    if asked.method is not None and asked.method.swiftkv is not None:
        return "method.swiftkv", asked.method.swiftkv
    return "swiftkv", asked.swiftkv


def _map_openai_fields(asked: CreateFineTuningJob) -> dict[_Path, tuple[str, Any]]:
    """Map each path of the spec that an OpenAI field sets to (field's name, its value)."""
    place, hyperparameters = "hyperparameters", asked.hyperparameters
    if asked.method is not None and asked.method.supervised is not None:
        place, hyperparameters = "method.supervised.hyperparameters", asked.method.supervised.hyperparameters
    found: dict[_Path, tuple[str, Any]] = {("model", "name_or_path"): ("model", asked.model)}
    if hyperparameters is not None:
        found[("training", "num_epochs")] = (f"{place}.n_epochs", hyperparameters.n_epochs)
        found[("training", "batch_size")] = (f"{place}.batch_size", hyperparameters.batch_size)
    for integration in asked.integrations or ():
        found |= {
            ("tracking", "wandb", name): (f"integrations[0].wandb.{name}", value)
            for name, value in integration.wandb.model_dump(mode="json", exclude_unset=True).items()
        }
    found[("metadata",)] = ("metadata", asked.metadata)
    found[("training", "seed")] = ("seed", asked.seed)
    found[("name",)] = ("suffix", asked.suffix)
    return {path: (name, value) for path, (name, value) in found.items() if value not in (None, "auto")}


def _set_field(document: dict[Any, Any], path: _Path, name: str, value: Any, place: str) -> None:
    inner = document
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    present = inner.setdefault(path[-1], value)
    if present != value:
        there = f"{place}.{format_path(path)}"
        message = f"{name} is {value!r} and {there} is {present!r}; set only one of them, or both to the same value"
        raise InvalidInputError(message, field=there, value=present)


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


class MethodResponse(ResponseModel):
    type: Literal["supervised"] = "supervised"
    supervised: SupervisedMethod


class WandbResponse(ResponseModel):
    project: str
    entity: str | None
    name: str
    tags: list[str]


class IntegrationResponse(ResponseModel):
    type: Literal["wandb"] = "wandb"
    wandb: WandbResponse


class FineTuningJobResponse(ResponseModel):
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
    hyperparameters: Hyperparameters
    method: MethodResponse
    integrations: list[IntegrationResponse]
    metadata: dict[str, str]
    seed: int
    trained_tokens: int | None
    """Null until the job has ended."""
    error: JobError | None
    swiftkv: JobResponse
    """The same job as returned by `GET /jobs/{id}`."""

    @classmethod
    def from_job(cls, job: JobResponse) -> Self:
        spec = job.spec
        hyperparameters = Hyperparameters(
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
            method=MethodResponse(supervised=SupervisedMethod(hyperparameters=hyperparameters)),
            integrations=_list_integrations(job),
            metadata=job.metadata,
            seed=spec.training.seed,
            trained_tokens=job.progress.tokens if job.status.is_terminal else None,
            error=job.error,
            swiftkv=job,
        )


def _list_integrations(job: JobResponse) -> list[IntegrationResponse]:
    wandb = job.spec.tracking.wandb
    if wandb.mode == "disabled":
        return []
    answer = WandbResponse(project=wandb.project, entity=wandb.entity, name=job.name, tags=list(wandb.tags))
    return [IntegrationResponse(wandb=answer)]


class FineTuningEventResponse(ResponseModel):
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
    def from_event(cls, event: Event) -> Self:
        return cls.model_validate({**vars(event), "type": "metrics" if event.type == "metrics" else "message"})


class CheckpointMetrics(ResponseModel):
    step: int
    train_loss: float | None
    """Loss of the step at which the checkpoint was made."""


class FineTuningCheckpointResponse(ResponseModel):
    """A complete checkpoint."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    """Name of the checkpoint: `{job id}:{checkpoint id}`."""
    step_number: int
    metrics: CheckpointMetrics

    @classmethod
    def from_checkpoint(cls, checkpoint: StoredCheckpoint, job_id: str, train_loss: float | None) -> Self:
        name = make_checkpoint_id(checkpoint)
        return cls(
            id=name,
            created_at=int(checkpoint.created_at),
            fine_tuning_job_id=job_id,
            fine_tuned_model_checkpoint=f"{job_id}:{name}",
            step_number=checkpoint.step,
            metrics=CheckpointMetrics(step=checkpoint.step, train_loss=train_loss),
        )


router = APIRouter(
    prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"], responses=ERROR_RESPONSES, route_class=BodyRoute
)


@router.post("")
def create_fine_tuning_job(
    body: CreateFineTuningJob, submission: JobSubmission, presenter: Presenter
) -> FineTuningJobResponse:
    """Submit a job. `swiftkv` holds settings for which OpenAI has no field: any part of a job spec."""
    asked = _JobRequest.from_body(body)
    spec = asked.validate()
    with asked.rename_errors():
        job = submission.submit(spec)
    return FineTuningJobResponse.from_job(presenter.render(job))


@router.get("")
def list_fine_tuning_jobs(
    request: Request, parts: ComponentsDep, caller: ReadingCaller, presenter: Presenter, page: NewestFirst
) -> ListResponse[FineTuningJobResponse]:
    """List jobs, newest first, also those submitted by other routes. `metadata[{key}]={value}` filters by metadata."""
    where = JobFilter(metadata=parse_metadata_filter(request, "metadata[", "]"))
    found = parts.jobs.list(page, tenant=caller.tenant, where=where)
    return make_list_response(
        found, lambda job: FineTuningJobResponse.from_job(presenter.render(job)), order=page.order
    )


@router.get("/{job_id}")
def get_fine_tuning_job(
    job_id: str, parts: ComponentsDep, caller: ReadingCaller, presenter: Presenter
) -> FineTuningJobResponse:
    """Return a job."""
    return FineTuningJobResponse.from_job(presenter.render(parts.jobs.get(job_id, tenant=caller.tenant)))


@router.post("/{job_id}/cancel")
def cancel_fine_tuning_job(
    job_id: str, service: Service, caller: WritingCaller, presenter: Presenter
) -> FineTuningJobResponse:
    """Cancel a job; repeating the request is harmless."""
    return FineTuningJobResponse.from_job(presenter.render(service.cancel(job_id, caller)))


@router.post("/{job_id}/pause")
def pause_fine_tuning_job(
    job_id: str, service: Service, caller: WritingCaller, presenter: Presenter
) -> FineTuningJobResponse:
    """Ask a job to checkpoint and free the cluster; repeating the request is harmless."""
    return FineTuningJobResponse.from_job(presenter.render(service.pause(job_id, caller)))


@router.post("/{job_id}/resume")
def resume_fine_tuning_job(
    job_id: str, service: Service, caller: WritingCaller, presenter: Presenter
) -> FineTuningJobResponse:
    """Queue a paused job again; it continues from its last checkpoint."""
    return FineTuningJobResponse.from_job(presenter.render(service.resume(job_id, caller)))


@router.get("/{job_id}/events")
def list_fine_tuning_events(
    job_id: str, parts: ComponentsDep, caller: ReadingCaller, page: NewestFirst
) -> ListResponse[FineTuningEventResponse]:
    """List a job's events, newest first."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    return make_list_response(parts.jobs.list_events(job_id, page), FineTuningEventResponse.from_event)


@router.get("/{job_id}/checkpoints")
def list_fine_tuning_checkpoints(
    job_id: str,
    parts: ComponentsDep,
    caller: FetchingCaller,
    page: Annotated[PageQuery, Depends(make_page_query(10, "desc"))],
) -> ListResponse[FineTuningCheckpointResponse]:
    """List the complete checkpoints of all attempts, the last step first."""
    parts.jobs.get(job_id, tenant=caller.tenant)
    found = list_checkpoint_page(parts.attempts, job_id, page)
    return make_list_response(found, lambda each: _make_checkpoint_response(parts, job_id, each))


def _make_checkpoint_response(
    parts: Components, job_id: str, checkpoint: StoredCheckpoint
) -> FineTuningCheckpointResponse:
    before = str(checkpoint.step - 1) if checkpoint.step else None
    points = parts.jobs.list_points(job_id, PageQuery(after=before, limit=1, order="asc")).items
    loss = points[0].values.get("loss") if points and points[0].step == checkpoint.step else None
    return FineTuningCheckpointResponse.from_checkpoint(checkpoint, job_id, loss)
