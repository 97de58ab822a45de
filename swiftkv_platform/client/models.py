"""Objects that the control plane and `/generate` return, with the answer's JSON fields as attributes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

FINISHED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


class Resource(BaseModel):
    """An object of the API, such as a model, a deployment or an estimate. `docs/reference` lists its fields.

    Nested JSON objects are dictionaries, unless a subclass declares them. A field that the answer lacks, since
    its server is older, is None. `model_dump()` returns the answer's JSON.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return (self.__pydantic_extra__ or {}).get(name)


class Job(Resource):
    """A distillation job.

    Live: a client has one object per id, and every later answer about that job updates it.
    """

    id: str
    status: str
    status_reason: Resource | None = None
    """`code`, `message` and `field`."""
    phase: str | None = None
    """Phase of a job on the cluster: `write`, `prepare`, `calibrate`, `train`, `evaluate` or `publish`."""
    phase_progress: Resource | None = None
    """Progress of that phase: `part`, `done`, `total`; for steps of `train` see `progress`."""
    created_at: int
    """Unix seconds, as all times here."""
    progress: Resource | None = None
    """`step`, `total_steps`, `tokens`, `percent`, `seconds_remaining`."""
    spec: dict[str, Any] = {}
    distilled_model: str | None = None
    """Id of the model (`mdl_...`) to deploy."""
    error: Resource | None = None
    """`code`, `message`, `param` (dotted path of the field at fault) and `cure`."""

    @property
    def finished(self) -> bool:
        """Whether the job has reached a final status."""
        return self.status in FINISHED


class JobEvent(Resource):
    """Something that happened to a job."""

    id: str
    created_at: int
    """Unix seconds, by the clock of the machine that wrote the event."""
    level: str = "info"
    type: str
    message: str = ""
    data: dict[str, Any] = {}

    @property
    def time(self) -> float:
        """`created_at`, as events that a local run reads name it."""
        return float(self.created_at)


class Generation(Resource):
    """An answer of `/generate`, or one event of a stream, whose texts are the new parts."""

    choices: list[Resource] = []
    """`index`, `text`, `token_ids`, `finish_reason`."""
    usage: Resource | None = None
    timings: Resource | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return str(self.choices[0].text) if self.choices else ""
