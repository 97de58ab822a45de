"""Conversion of OpenAI's request for a fine-tuning job to a job spec. Knows no route and no database.

Settings for which OpenAI has no field are in `swiftkv`, a job spec of which any part may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, model_validator

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import Label, LabelValue, Name, Word
from swiftkv_platform.specs.job import JobName
from swiftkv_platform.specs.limits import Epochs, SignedSeed, Size

_NAME = "fine-tuning"
"""Name of a job whose request names none."""


class PartialSpec(JobSpec):
    """A job spec of which any part may be missing."""

    name: JobName = _NAME


class Hyperparameters(FiniteModel):
    """Hyperparameters as OpenAI names them; `auto` leaves a choice to the job spec's defaults."""

    n_epochs: Literal["auto"] | Epochs = "auto"
    """`training.num_epochs`."""
    batch_size: Literal["auto"] | Size = "auto"
    """`training.batch_size`: packed sequences of a step, over all workers."""
    learning_rate_multiplier: Literal["auto"] = "auto"
    """The learning rate is `swiftkv.optimizer.learning_rate`, absolute."""


class SupervisedMethod(FiniteModel):
    hyperparameters: Hyperparameters | None = None


class Method(FiniteModel):
    """Method of a job: a student that its teacher supervises."""

    type: Literal["supervised", "swiftkv"]
    supervised: SupervisedMethod | None = None
    swiftkv: PartialSpec | None = None
    """Same as the request's `swiftkv`; give only one of them."""


class WandbIntegration(FiniteModel):
    project: Word
    entity: Word | None = None
    tags: Annotated[tuple[Word, ...], Field(max_length=64)] = ()


class Integration(FiniteModel):
    """A receiver of metrics."""

    type: Literal["wandb"]
    wandb: WandbIntegration


class CreateFineTuningJob(FiniteModel):
    """Request for a fine-tuning job, in OpenAI's format."""

    model: Annotated[Name, Field(min_length=1)]
    """The teacher: `model.name_or_path` of a job spec."""
    training_file: Annotated[Name, Field(min_length=1)]
    """Id of an uploaded file (`file-...`), or another data source's `name_or_path`."""
    validation_file: None = None
    """Not supported: rows are held out of the training file (`swiftkv.data.validation_fraction`)."""
    hyperparameters: Hyperparameters | None = None
    method: Method | None = None
    integrations: Annotated[tuple[Integration, ...], Field(max_length=1)] | None = None
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=32)] | None = None
    seed: SignedSeed | None = None
    suffix: Annotated[JobName, Field(max_length=64)] | None = None
    """Name of the job and of its model."""
    swiftkv: PartialSpec | None = None
    """All other fields of a job spec."""

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        if self.method is None:
            return self
        if self.swiftkv is not None and self.method.swiftkv is not None:
            raise ValueError("give swiftkv or method.swiftkv, not both")
        if self.hyperparameters is not None and self.method.supervised is not None:
            raise ValueError("give hyperparameters or method.supervised, not both")
        return self


def job_spec(asked: CreateFineTuningJob) -> JobSpec:
    """Return the job spec of a request. Raises `InvalidInputError` if a field of OpenAI's and one of `swiftkv`
    contradict each other, and `RequestValidationError` if the result is no valid job spec."""
    place, partial = _extension(asked)
    document = {} if partial is None else partial.model_dump(mode="json", exclude_unset=True)
    fields = _openai_fields(asked)
    for path, (name, value) in fields.items():
        _put(document, path, name, value, ".".join(place))
    _put_training_file(document, asked.training_file)
    document.setdefault("name", _NAME)
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise RequestValidationError([_as_asked(item, fields, place) for item in error.errors()]) from error


_Path = tuple[str, ...]


def _extension(asked: CreateFineTuningJob) -> tuple[_Path, PartialSpec | None]:
    """Return SwiftKV's own part of a request, and its path."""
    if asked.method is not None and asked.method.swiftkv is not None:
        return ("method", "swiftkv"), asked.method.swiftkv
    return ("swiftkv",), asked.swiftkv


def _openai_fields(asked: CreateFineTuningJob) -> dict[_Path, tuple[str, Any]]:
    """Return the parts of a spec that OpenAI's fields set: by path, the field's name and its value."""
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


def _put(document: dict[str, Any], path: _Path, name: str, value: Any, place: str) -> None:
    inner = document
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    present = inner.setdefault(path[-1], value)
    if present != value:
        there = f"{place}.{'.'.join(path)}"
        message = f"{name} is {value!r} and {there} is {present!r}; give one of them, or the same in both"
        raise InvalidInputError(message, field=there, value=present)


def _put_training_file(document: dict[str, Any], name: str) -> None:
    """Add the training file as the first source, unless `swiftkv` already names it."""
    data = document.setdefault("data", {})
    sources = data.get("sources", [])
    if all(source.get("name_or_path") != name for source in sources):
        data["sources"] = [{"name_or_path": name}, *sources]


def _as_asked(item: Any, fields: Mapping[_Path, tuple[str, Any]], place: _Path) -> dict[str, Any]:
    """Convert a validation error of the spec to one of the request."""
    location = tuple(item["loc"])
    asked = fields.get(location)
    told = {**item, "loc": ("body", *(place + location if asked is None else asked[0].split(".")))}
    # A rule over several fields names the one to change itself.
    changed = fields.get(tuple(str(item.get("ctx", {}).get("field", "")).split(".")))
    return told if changed is None else {**told, "ctx": {**item["ctx"], "field": changed[0]}}
