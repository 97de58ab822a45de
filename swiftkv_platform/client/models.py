"""Objects that the control plane and `/generate` return, with JSON fields as attributes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

FINISHED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


class Resource(BaseModel):
    """An object of the API, e.g. a model, deployment or estimate. `docs/reference` lists its fields.

    Nested objects are dictionaries unless a subclass declares them. A field that an older server does not return is
    None. `model_dump()` returns the JSON.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return (self.__pydantic_extra__ or {}).get(name)


class Job(Resource):
    """A distillation job.

    A client has one object per id; later responses about the job update it.
    """

    id: str
    status: str
    status_reason: Resource | None = None
    """`code`, `message` and `field`."""
    phase: str | None = None
    """Phase of a running job: `write`, `prepare`, `calibrate`, `train`, `evaluate` or `publish`."""
    phase_progress: Resource | None = None
    """Progress of the phase: `part`, `done`, `total`. Training steps are in `progress`."""
    created_at: int
    """Unix seconds."""
    progress: Resource | None = None
    """`step`, `total_steps`, `tokens`, `percent`, `seconds_remaining`."""
    spec: dict[str, Any] = {}
    distilled_model: str | None = None
    """Id of the model (`mdl_...`) to deploy."""
    error: Resource | None = None
    """`code`, `message`, `param` (dotted path of the invalid field) and `cure` (how to fix it)."""

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded, failed or been canceled."""
        return self.status in FINISHED


class JobEvent(Resource):
    """An event of a job."""

    id: str
    created_at: int
    """Unix seconds, by the writing machine's clock."""
    level: str = "info"
    type: str
    message: str = ""
    data: dict[str, Any] = {}

    @property
    def time(self) -> float:
        """`created_at`, under the name that attempt events use."""
        return float(self.created_at)


class Generation(Resource):
    """A response of `/generate`, or a chunk of its stream with the new text."""

    choices: list[Resource] = []
    """`index`, `text`, `token_ids`, `finish_reason`."""
    usage: Resource | None = None
    timings: Resource | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return str(self.choices[0].text) if self.choices else ""
