"""The JSON that callers see of models and deployments. Knows no route and no database."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.api.schemas import Answer
from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.orchestration.job import Model
from swiftkv_platform.orchestration.ports import Deployment, DeploymentSpec, DeploymentStatus


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


Share = Annotated[float, Field(ge=0.0, le=1.0)]


class CandidateRequest(FiniteModel):
    """A second model in every replica. It takes the memory of a model and a KV cache more."""

    model: Annotated[str, Field(min_length=1)]
    """`mdl_` id; answers that it gives carry it."""
    share: Share = 0.0
    """Share of the requests that it answers."""


class ShadowRequest(FiniteModel):
    """Another model's judgement of answers, as metrics of the replicas: KL and top-1 agreement."""

    against: Literal["teacher", "candidate"]
    """`teacher`: the served student's own, which takes the memory of the weights once more."""
    share: Share = 0.0
    """Share of the answers that are judged."""


class DeploymentRequest(FiniteModel):
    """Request for a deployment: the model to serve, and how many replicas of it."""

    model: Annotated[str, Field(min_length=1)]
    """`mdl_` id, the `job_` id of a job that succeeded, or an alias: what is promoted to it later is swapped in."""
    route_prefix: Annotated[str, Field(pattern=r"^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?$", max_length=200)] = "/"
    """HTTP path below which it answers; one deployment can hold it. Where there are API keys it lies below
    `/t/{tenant}`: `/chat` becomes `/t/acme/chat`, as the answer shows."""
    min_replicas: Annotated[int, Field(ge=0)] = 1
    """0: no replica while there are no requests; the first request then waits for one."""
    max_replicas: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0.0)] | None = None
    """Requests a replica should work on at once; more replicas are started above it. Null: by the engine's load,
    prompt tokens that wait and KV cache in use."""
    upscale_delay_s: Annotated[float, Field(ge=0.0)] = DeploymentSpec.upscale_delay_s
    """Seconds for which the load must ask for more replicas before they are started."""
    downscale_delay_s: Annotated[float, Field(ge=0.0)] = DeploymentSpec.downscale_delay_s
    """Seconds for which the load must ask for fewer before they are drained."""
    engine: dict[str, Any] = {}
    """Engine options."""
    candidate: CandidateRequest | None = None
    shadow: ShadowRequest | None = None

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise PydanticCustomError(
                "max_replicas",
                "max_replicas {value} is below min_replicas {least}",
                {"field": "max_replicas", "value": self.max_replicas, "least": self.min_replicas},
            )
        return self


class CandidateChange(CandidateRequest):
    """Changes of a candidate, or all fields of a new one."""

    # As below: the default is never used.
    model: Annotated[str, Field(min_length=1)] = ""
    """`mdl_` id."""


class ShadowChange(ShadowRequest):
    """Changes of a shadow, or all fields of a new one."""

    against: Literal["teacher", "candidate"] = "teacher"
    """A new one needs it."""


class DeploymentChange(FiniteModel):
    """Changes of a deployment, as a JSON merge patch (RFC 7396); what is left out stays."""

    # The defaults are never used: only what a body sets is changed.
    model: Annotated[str, Field(min_length=1)] = ""
    """`mdl_` id, `job_` id or alias: loaded beside the model that serves, and swapped in without a failed request."""
    min_replicas: Annotated[int, Field(ge=0)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0.0)] | None = None
    upscale_delay_s: Annotated[float, Field(ge=0.0)] = 0.0
    downscale_delay_s: Annotated[float, Field(ge=0.0)] = 0.0
    engine: dict[str, Any] | None = None
    """Engine options to change, null for one that takes its default again; swapped in as a model is. Other cores or
    another device replace the replicas. Null: all take their defaults."""
    candidate: CandidateChange | None = None
    """Loaded as a model is; of one that is there already another `share` counts at once. Null: none any more."""
    shadow: ShadowChange | None = None

    def changes(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class ReplicaMetricsAnswer(Answer):
    """Measurements of one replica since it was started."""

    replica: str
    values: dict[str, float]
    """Values by the names of its own `/metrics` without the prefix `swiftkv:`, such as `generation_tokens_total`,
    `tokens_exited_total`, `kv_cache_usage_perc`, `num_requests_waiting`, `time_to_first_token_seconds_sum` and
    `_count`. Totals only grow; rates are differences between two answers."""


class DeploymentMetricsAnswer(Answer):
    """The metrics of the replicas that answered."""

    object: Literal["deployment.metrics"] = "deployment.metrics"
    time: float
    """Unix seconds at which they were read."""
    replicas: list[ReplicaMetricsAnswer]


class DeploymentAnswer(Answer):
    """A served model."""

    id: str
    object: Literal["deployment"] = "deployment"
    created_at: int
    version: int
    """Rises with every change; `ETag` has it too, for `If-Match`."""
    model: str
    artifact_uri: str
    route_prefix: str
    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float | None
    upscale_delay_s: float
    downscale_delay_s: float
    engine: dict[str, Any]
    candidate: dict[str, Any] | None
    shadow: dict[str, Any] | None
    status: DeploymentStatus
    message: str
    alias: str | None
    """Alias that the deployment follows, if it was made of one."""
    replicas: int
    """Running now."""
    url: str
    """Address below which `/generate` answers."""

    @classmethod
    def of(cls, deployment: Deployment, serve_url: str) -> Self:
        spec, state = deployment.spec, deployment.state
        return cls(
            id=spec.id,
            created_at=deployment.created_at,
            version=deployment.version,
            model=spec.model,
            artifact_uri=spec.artifact_uri,
            route_prefix=spec.route_prefix,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            target_ongoing_requests=spec.target_ongoing_requests,
            upscale_delay_s=spec.upscale_delay_s,
            downscale_delay_s=spec.downscale_delay_s,
            engine=dict(spec.engine),
            candidate=spec.candidate and dict(spec.candidate),
            shadow=spec.shadow and dict(spec.shadow),
            status=state.status,
            message=state.message,
            alias=spec.alias,
            replicas=state.replicas,
            url=serve_url.rstrip("/") + spec.route_prefix.rstrip("/"),
        )
