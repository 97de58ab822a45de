"""The JSON that callers see of models and deployments. Knows no route and no database."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.api.schemas import Answer
from swiftkv_platform.orchestration.job import Model
from swiftkv_platform.orchestration.ports import Deployment, DeploymentStatus


class ModelAnswer(Answer):
    """A distilled model and where it came from."""

    id: str
    object: Literal["model"] = "model"
    name: str
    created_at: int
    job_id: str
    attempt: int
    artifact_uri: str
    manifest_digest: str
    size: int
    """Bytes."""
    lineage: dict[str, Any]
    metrics: dict[str, Any]

    @classmethod
    def of(cls, model: Model) -> Self:
        return cls(
            id=model.id,
            name=model.name,
            created_at=model.created_at,
            job_id=model.job_id,
            attempt=model.attempt,
            artifact_uri=model.artifact_uri,
            manifest_digest=model.manifest_digest,
            size=model.size,
            lineage=dict(model.lineage),
            metrics=dict(model.metrics),
        )


class DeploymentRequest(BaseModel):
    """What to serve, and how much of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1)]
    """`mdl_` id."""
    route_prefix: Annotated[str, Field(pattern=r"^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?$", max_length=200)] = "/"
    """HTTP path below which it answers; one deployment can hold it."""
    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0.0)] = 8.0
    """Requests a replica should work on at once; more replicas are started above it."""
    engine: dict[str, Any] = {}
    """Engine options."""

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise PydanticCustomError(
                "max_replicas",
                "max_replicas {value} is below min_replicas {least}",
                {"field": "max_replicas", "value": self.max_replicas, "least": self.min_replicas},
            )
        return self


class DeploymentAnswer(Answer):
    """A served model."""

    id: str
    object: Literal["deployment"] = "deployment"
    created_at: int
    model: str
    artifact_uri: str
    route_prefix: str
    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float
    engine: dict[str, Any]
    status: DeploymentStatus
    message: str
    replicas: int
    """Running now."""
    url: str
    """Where `/generate` answers."""

    @classmethod
    def of(cls, deployment: Deployment, serve_url: str) -> Self:
        spec, state = deployment.spec, deployment.state
        return cls(
            id=spec.id,
            created_at=deployment.created_at,
            model=spec.model,
            artifact_uri=spec.artifact_uri,
            route_prefix=spec.route_prefix,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            target_ongoing_requests=spec.target_ongoing_requests,
            engine=dict(spec.engine),
            status=state.status,
            message=state.message,
            replicas=state.replicas,
            url=serve_url.rstrip("/") + spec.route_prefix.rstrip("/"),
        )
