"""The deployment spec: the model to serve, and the replicas that serve it. Frozen; no I/O.

Each field is defined here once, with bounds and description. The bodies of `POST` and `PATCH /deployments`, their
answers, the stored form, the options of `swiftkv deploy` and the arguments of replicas derive from these classes.
Engine options are those of `EngineConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.base import Delay, MaxReplicas, MinReplicas, OngoingRequests, Range, make_field_error


@dataclass(frozen=True)
class Change:
    """Rule for changing a field of a deployment that exists; metadata of the field."""

    effect: str = ""
    """Sentence appended to the field's description in the request to change it."""
    allowed: bool = True


MAX_TEMPLATE_LENGTH = 1 << 16
"""Characters of a chat template."""
ToolCallParser = Literal["hermes", "smollm2", "llama3", "mistral", "mistral_v11"]
"""Model families by their format of tool calls."""
ModelName = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Range(0.0, 1.0)]


class CandidateSpec(FiniteModel):
    """A second model in every replica. It needs the memory of another model and KV cache."""

    model: ModelName
    """`mdl_` id, which the candidate's answers carry."""
    share: Share = 0.0
    """Share of the requests that it answers, drawn for each; a request may also name either model."""


FieldName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z_][A-Za-z0-9_]*)$", max_length=64)]

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]_-]+)$", max_length=200)]

Engine = TypeVar("Engine")
Candidate = TypeVar("Candidate", bound=CandidateSpec)


class ServedSpec(FiniteModel, Generic[Engine, Candidate]):
    """Models of a deployment. Running replicas swap in changes of these fields."""

    model: Annotated[ModelName, Change("Loaded beside the serving model, and swapped in without a failed request.")]
    """`mdl_` id, the `job_` id of a job that succeeded, a name that only one model has, or an alias: models promoted to
    it later are swapped in. Answers carry the `mdl_` id."""
    engine: Annotated[
        Engine,
        Change(
            "Only the given options change; null resets an option to its default. Swapped in like a model. "
            "Another device or number of cores replaces the replicas. Null: resets all options."
        ),
    ] = Field(default={}, validate_default=True)
    """Engine options."""
    candidate: Annotated[
        Candidate | None,
        Change("Loaded like a model; a new `share` of a loaded one takes effect at once. Null: removes it."),
    ] = None
    """Second model, for some of the requests."""
    ignored_fields: Annotated[
        tuple[FieldName, ...] | None,
        Field(max_length=64),
        Change("Takes effect at once, without loading. Null: removes all."),
    ] = None
    """Fields of requests to OpenAI's routes, refused or unknown ones, to accept and ignore; `*` means all unknown
    ones."""

    cors_origins: Annotated[
        tuple[Origin, ...] | None,
        Field(max_length=64),
        Change("Takes effect at once, without loading. Null: removes all."),
    ] = None
    """Origins, such as `https://chat.example.org`, whose pages may send requests from a browser (CORS); `*` means all.
    Null: none."""

    chat_template: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_LENGTH)] | None,
        Change("Swapped in like a model. Null: back to the model's own."),
    ] = None
    """Jinja template for conversations, used instead of the model's and the candidate's own. With API keys, the
    operator has to grant it (`chat_templates` of the tenant)."""
    tool_call_parser: Annotated[ToolCallParser | None, Change("Swapped in like a model.")] = None
    """Model family whose format of tool calls is parsed; null: detected from the chat template."""


class ScalingSpec(FiniteModel):
    """Bounds of a deployment's number of replicas, named as in Ray Serve's `autoscaling_config`."""

    min_replicas: MinReplicas = 1
    """0: no replica while there are no requests; the first request then waits for one to start."""
    max_replicas: MaxReplicas = 1
    """Most replicas to start under load."""
    target_ongoing_requests: OngoingRequests | None = None
    """Requests that a replica should handle at once, waiting ones included; with more, replicas are added. Null: scale
    by the engine's load, that is waiting prompt tokens and KV cache in use."""
    upscale_delay_s: Delay = 10.0
    """Seconds for which the load must require more replicas before they are started."""
    downscale_delay_s: Delay = 300.0
    """Seconds for which the load must require fewer before replicas are drained."""

    @model_validator(mode="after")
    def _validate_replica_bounds(self) -> Self:
        if self.max_replicas < self.min_replicas:
            message = f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}"
            raise make_field_error("max_replicas", self.max_replicas, message)
        return self


class ReplicasSpec(ScalingSpec):
    """HTTP path of a deployment, and the number of its replicas."""

    route_prefix: Annotated[
        str, Field(pattern=r"^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?$", max_length=200), Change(allowed=False)
    ] = "/"
    """HTTP path prefix, unique among deployments. With API keys it is below `/t/{tenant}`: `/chat` becomes
    `/t/acme/chat`, as the answer shows."""


class DeploymentSpec(ReplicasSpec, ServedSpec[dict[str, Any], CandidateSpec]):
    """Request for a deployment: the model to serve and the number of its replicas."""


class ResolvedCandidate(CandidateSpec):
    """A candidate with its artifact."""

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`."""


class ResolvedDeployment(ReplicasSpec, ServedSpec[dict[str, Any], ResolvedCandidate]):
    """A deployment spec with resolved names, as stored and as passed to the serving cluster."""

    # Rows that a newer version has written are still served.
    model_config = ConfigDict(extra="ignore")

    id: str
    """`dep_` id."""
    artifact_uri: str
    """Address of the model's artifact."""
    alias: str | None = None
    """Alias that the deployment follows, if it was created with one; later promotions to it are swapped in."""
    tenant: str | None = None
    """Tenant whose API keys it accepts, if replicas check keys; None: every tenant's."""
