"""The deployment spec: the model to serve, and the replicas that serve it. Frozen; no I/O.

Each field stands here once, with its bounds and its description. The bodies of `POST` and `PATCH /deployments`, their
answers, the stored form, the options of `swiftkv deploy` and the arguments of replicas derive from these classes.
Engine options are those of `EngineConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.limits import Delay, MaxReplicas, MinReplicas, OngoingRequests, Range


@dataclass(frozen=True)
class Change:
    """Rule for changing a field of a deployment that exists; metadata of the field."""

    effect: str = ""
    """Sentence that a change's description adds to the field's."""
    allowed: bool = True


MAX_TEMPLATE_LENGTH = 1 << 16
"""Characters of a chat template."""
ToolCallParser = Literal["hermes", "smollm2", "llama3", "mistral", "mistral_v11"]
"""Families by the way they write calls of tools."""
ModelName = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Range(0.0, 1.0)]


class CandidateSpec(FiniteModel):
    """A second model in every replica. It takes the memory of a model and a KV cache more."""

    model: ModelName
    """`mdl_` id; answers that it gives carry it."""
    share: Share = 0.0
    """Share of the requests that it answers, drawn for each; they may name either model."""


class ShadowSpec(FiniteModel):
    """Another model's judgement of answers, as metrics of the replicas: KL and top-1 agreement."""

    against: Literal["teacher", "candidate"]
    """`teacher`: the served student's own, which takes the memory of the weights once more."""
    share: Share = 0.0
    """Share of the answers that are judged, drawn for each."""


FieldName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z_][A-Za-z0-9_]*)$", max_length=64)]

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]_-]+)$", max_length=200)]

Engine = TypeVar("Engine")
Candidate = TypeVar("Candidate", bound=CandidateSpec)


class ServedSpec(FiniteModel, Generic[Engine, Candidate]):
    """The models of a deployment. Replicas that run swap a change of these in."""

    model: Annotated[ModelName, Change("Loaded beside the model that serves, and swapped in without a failed request.")]
    """`mdl_` id, the `job_` id of a job that succeeded, a name that one model alone has, or an alias: what is promoted
    to it later is swapped in. Answers give the `mdl_` id."""
    engine: Annotated[
        Engine,
        Change(
            "Only what is given changes, null for an option that takes its default again; swapped in as a model is. "
            "Other cores or another device replace the replicas. Null: all take their defaults."
        ),
    ] = Field(default={}, validate_default=True)
    """Engine options."""
    candidate: Annotated[
        Candidate | None,
        Change(
            "Loaded as a model is; of one that is there already another `share` counts at once. Null: none any more."
        ),
    ] = None
    """Second model, for some of the requests."""
    shadow: Annotated[ShadowSpec | None, Change("Null: none any more.")] = None
    """Model that judges some of the answers."""
    ignored_fields: Annotated[
        tuple[FieldName, ...] | None,
        Field(max_length=64),
        Change("Counts at once, and loads nothing. Null: none any more."),
    ] = None
    """Fields of requests to OpenAI's routes, refused or unknown ones, to accept without effect; `*` stands for all
    unknown ones."""

    cors_origins: Annotated[
        tuple[Origin, ...] | None,
        Field(max_length=64),
        Change("Counts at once, and loads nothing. Null: none any more."),
    ] = None
    """Origins, such as `https://chat.example.org`, whose pages may ask from a browser (CORS); `*` stands for all. Null:
    none."""

    chat_template: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_LENGTH)] | None,
        Change("Swapped in as a model is. Null: the model's own again."),
    ] = None
    """Jinja template that lays out conversations in place of the model's own, the candidate's too. Where there are API
    keys, the operator grants it (`chat_templates` of the tenant)."""
    tool_call_parser: Annotated[ToolCallParser | None, Change("Swapped in as a model is.")] = None
    """Family whose way to write calls of tools the model has; null: by its chat template."""

    @model_validator(mode="after")
    def _has_what_judges(self) -> Self:
        if self.candidate is None and self.shadow is not None and self.shadow.against == "candidate":
            raise PydanticCustomError(
                "shadow",
                "shadow.against is 'candidate', and the deployment has none; give a candidate, or 'teacher'",
                {"field": "shadow.against", "value": "candidate"},
            )
        return self

    @model_validator(mode="after")
    def _has_distributions_to_judge(self) -> Self:
        engine: Any = self.engine
        backend = engine.get("backend") if isinstance(engine, dict) else engine.backend
        if self.shadow is not None and backend == "vllm":
            raise PydanticCustomError(
                "shadow",
                "shadow compares distributions, which backend native alone gives, and engine.backend is 'vllm'; leave "
                "one of them out",
                {"field": "shadow", "value": self.shadow.model_dump()},
            )
        return self


class ScalingSpec(FiniteModel):
    """Bounds of a deployment's number of replicas. The names are those of Ray Serve's `autoscaling_config`."""

    min_replicas: MinReplicas = 1
    """0: no replica while there are no requests; the first request then waits for one."""
    max_replicas: MaxReplicas = 1
    """Most replicas that the load may ask for."""
    target_ongoing_requests: OngoingRequests | None = None
    """Requests a replica should work on at once, those that wait included; more replicas are started above it. Null: by
    the engine's load, prompt tokens that wait and KV cache in use."""
    upscale_delay_s: Delay = 10.0
    """Seconds for which the load must ask for more replicas before they are started."""
    downscale_delay_s: Delay = 300.0
    """Seconds for which the load must ask for fewer before they are drained."""

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise PydanticCustomError(
                "max_replicas",
                "max_replicas {value} is below min_replicas {least}",
                {"field": "max_replicas", "value": self.max_replicas, "least": self.min_replicas},
            )
        return self


class ReplicasSpec(ScalingSpec):
    """Address of a deployment, and the number of its replicas."""

    route_prefix: Annotated[
        str, Field(pattern=r"^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?$", max_length=200), Change(allowed=False)
    ] = "/"
    """HTTP path below which it answers; one deployment can hold it. Where there are API keys it lies below
    `/t/{tenant}`: `/chat` becomes `/t/acme/chat`, as the answer shows."""


class DeploymentSpec(ReplicasSpec, ServedSpec[dict[str, Any], CandidateSpec]):
    """Request for a deployment: the model to serve, and how many replicas of it."""


class ResolvedCandidate(CandidateSpec):
    """A candidate with its artifact."""

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`."""


class ResolvedDeployment(ReplicasSpec, ServedSpec[dict[str, Any], ResolvedCandidate]):
    """A deployment spec whose names have been looked up: the form that is stored, and handed to the serving cluster."""

    # A row that a newer version of this program has written is served on.
    model_config = ConfigDict(extra="ignore")

    id: str
    """`dep_` id."""
    artifact_uri: str
    """Address of the model's artifact."""
    alias: str | None = None
    """Alias that the deployment follows, if it was made of one; each later promotion to it is swapped in."""
    tenant: str | None = None
    """Tenant whose keys it answers, where replicas ask for keys; None: every tenant's."""
