"""The deployment spec: the model to serve, and the replicas that serve it. Frozen; no I/O.

Each field is defined here once, with bounds and description. Bodies and responses of `POST` and `PATCH /deployments`,
the stored form, the options of `swiftkv deploy` and the arguments of replicas derive from these classes. Engine options
are those of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, get_args

from pydantic import ConfigDict, Field, model_validator

from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.specs.base import (
    CaptureBytes,
    DelaySeconds,
    MaxReplicas,
    MinReplicas,
    NumOngoingRequests,
    RetentionDays,
    Share,
    make_field_error,
)


@dataclass(frozen=True)
class PatchRule:
    """Metadata of a field: what `PATCH /deployments` may change, and with which effect."""

    effect: str = ""
    """Appended to the field's description in the body of `PATCH`."""
    allowed: bool = True


MAX_TEMPLATE_LENGTH = 1 << 16
"""Max characters of a chat template."""
ToolCallParser = Literal["hermes", "smollm2", "llama3", "mistral", "mistral_v11"]
"""Tool-call formats, named by model family."""
ModelName = Annotated[str, Field(min_length=1)]


class CandidateSpec(FiniteBaseModel):
    """A second model in every replica, with its own weights and KV cache."""

    model: ModelName
    """`mdl_` id of the candidate; `model` in responses that the candidate generates."""
    share: Share = 0.0
    """Share of requests that the candidate serves, chosen at random; a request may also name either model."""


RedactedKind = Literal["email", "phone", "credit_card", "ip_address", "secret"]
"""Kinds of passages in captured texts. `secret`: API keys, bearer tokens, passwords and PEM blocks."""


class CaptureSpec(FiniteBaseModel):
    """Storage of a share of the requests with their answers, to train and compare models on."""

    share: Share
    """Share of requests to capture, chosen at random; 0 stops capturing and keeps what was captured. Requests with
    `store: false` are never captured."""
    retention_days: RetentionDays = 30
    """Days after which captured requests are deleted."""
    max_bytes: CaptureBytes = 1 << 30
    """Max stored bytes, compressed; the oldest requests are deleted first. Counts as storage of the tenant."""
    redact: Annotated[tuple[RedactedKind, ...], Field(max_length=16)] = get_args(RedactedKind)
    """Kinds of passages to replace by `[email]` and so on before storage; `[]`: none. Finds usual forms only."""


class AdapterSpec(FiniteBaseModel):
    """A student that shares the base of a deployment's model."""

    model: ModelName
    """`mdl_` id, `job_` id, unique name or alias of a model that is an adapter. Responses contain the `mdl_` id."""
    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Additional name by which requests can select this adapter in `model`."""


MAX_ADAPTERS = 256
"""Max adapters of a deployment."""

FieldName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z_][A-Za-z0-9_]*)$", max_length=64)]

Origin = Annotated[str, Field(pattern=r"^(\*|https?://[A-Za-z0-9.:\[\]_-]+)$", max_length=200)]

Engine = TypeVar("Engine")
Candidate = TypeVar("Candidate", bound=CandidateSpec)
Capture = TypeVar("Capture", bound=CaptureSpec)
Adapter = TypeVar("Adapter", bound=AdapterSpec | str)


class ServedSpec(FiniteBaseModel, Generic[Engine, Candidate, Adapter, Capture]):
    """Models and options that running replicas can change without downtime."""

    model: Annotated[ModelName, PatchRule("Loaded next to the running model, then swapped in; no request fails.")]
    """`mdl_` id, `job_` id of a succeeded job, unique name, or alias. With an alias, models promoted to it later are
    swapped in. Responses contain the `mdl_` id."""
    engine: Annotated[
        Engine,
        PatchRule(
            "Changes only the given options. Null for an option resets it; null for `engine` resets all options. "
            "Reloads the model without downtime; a change of device or number of cores replaces the replicas."
        ),
    ] = Field(default={}, validate_default=True)
    """Engine options."""
    candidate: Annotated[
        Candidate | None,
        PatchRule("Loaded without downtime; a new `share` takes effect at once. Null removes the candidate."),
    ] = None
    """Second model, for a share of the requests."""
    capture: Annotated[
        Capture | None,
        PatchRule("Takes effect at once, without a reload. Null: stops capturing and deletes what was captured."),
    ] = None
    """Captured traffic: a share of the requests is stored with the answers. Null: none."""
    adapters: Annotated[
        tuple[Adapter, ...] | None,
        Field(max_length=MAX_ADAPTERS),
        PatchRule(
            "Replaces the list. Adapters are loaded and unloaded while the model serves. The model itself is reloaded "
            "only when the first list is set, or when the list is set to null."
        ),
    ] = None
    """Further students of the same base model, named by `model` in requests: ids, or objects with `model` and `name`.
    They share the base's weights and one KV cache, and need the native engine. Those that exceed
    `engine.max_adapter_bytes` are loaded on demand."""
    ignored_fields: Annotated[
        tuple[FieldName, ...] | None,
        Field(max_length=64),
        PatchRule("Takes effect at once, without a reload. Null: removes all."),
    ] = None
    """Unknown or unsupported request fields of OpenAI's routes to ignore instead of refusing; `*`: all unknown
    fields."""

    cors_origins: Annotated[
        tuple[Origin, ...] | None,
        Field(max_length=64),
        PatchRule("Takes effect at once, without a reload. Null: removes all."),
    ] = None
    """Origins whose web pages may send requests (CORS), such as `https://chat.example.org`; `*`: all; null: none."""

    chat_template: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_LENGTH)] | None,
        PatchRule("Reloads the model without downtime. Null: the model's own."),
    ] = None
    """Jinja chat template, instead of those of the model and the candidate. With API keys, the operator must allow it
    (`chat_templates` of the tenant)."""
    tool_call_parser: Annotated[ToolCallParser | None, PatchRule("Reloads the model without downtime.")] = None
    """Tool-call format, by model family; null: detected from the chat template."""

    @model_validator(mode="after")
    def _validate_adapters(self) -> Self:
        if self.adapters is None:
            return self
        options = self.engine if isinstance(self.engine, dict) else vars(self.engine)
        for name, accepted, why in _ADAPTER_OPTIONS:
            if options.get(name, accepted[0]) not in accepted:
                message = f"adapters are given, but engine.{name} is {options[name]!r}: {why}"
                raise make_field_error("adapters", len(self.adapters), message)
        adapters = [AdapterSpec(model=each) if isinstance(each, str) else each for each in self.adapters]
        names = [self.model, *(each.model for each in adapters)]
        names += [each.name for each in adapters if each.name is not None]
        if (repeated := next((name for name in names if names.count(name) > 1), None)) is not None:
            message = f"adapters name {repeated!r} twice; give each adapter once, with a name of its own"
            raise make_field_error("adapters", repeated, message)
        return self


_ADAPTER_OPTIONS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("backend", ("auto", "native"), "vLLM serves one student per process; use native, or a deployment per student"),
    ("tensor_parallel_size", (1, None), "they share one device; use 1, or a deployment per student"),
    ("swiftkv", (True, None), "adapters are students; leave it out"),
)
"""Engine options with adapters: name, accepted values, reason."""


class ScalingSpec(FiniteBaseModel):
    """Autoscaling of replicas; names as in Ray Serve's `autoscaling_config`."""

    min_replicas: MinReplicas = 1
    """0: no replicas without requests; the first request then waits for a replica to start."""
    max_replicas: MaxReplicas = 1
    """Max replicas under load."""
    target_ongoing_requests: NumOngoingRequests | None = None
    """Target number of concurrent requests per replica, queued ones included. Null: scale by the engine's load (waiting
    prompt tokens and KV cache usage)."""
    upscale_delay_s: DelaySeconds = 10.0
    """Seconds that the load must be high before replicas are started."""
    downscale_delay_s: DelaySeconds = 300.0
    """Seconds that the load must be low before replicas are drained."""

    @model_validator(mode="after")
    def _validate_replica_bounds(self) -> Self:
        if self.max_replicas < self.min_replicas:
            message = f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}"
            raise make_field_error("max_replicas", self.max_replicas, message)
        return self


class ReplicasSpec(ScalingSpec):
    """HTTP path and autoscaling of a deployment."""

    route_prefix: Annotated[
        str, Field(pattern=r"^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?$", max_length=200), PatchRule(allowed=False)
    ] = "/"
    """HTTP path prefix, unique among deployments. With API keys, it is below `/t/{tenant}`: `/chat` becomes
    `/t/acme/chat`."""


_RequestedModels = ServedSpec[dict[str, Any], CandidateSpec, AdapterSpec | ModelName, CaptureSpec]


class DeploymentSpec(ReplicasSpec, _RequestedModels):
    """Request for a deployment: model, options and replicas."""


class ResolvedCandidate(CandidateSpec):
    """A candidate with its artifact."""

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`."""


class ResolvedCapture(CaptureSpec):
    """Captured traffic with its address."""

    uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix of the deployment's captured traffic."""


class ResolvedAdapter(AdapterSpec):
    """An adapter with its artifact."""

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`."""


_ResolvedModels = ServedSpec[dict[str, Any], ResolvedCandidate, ResolvedAdapter, ResolvedCapture]


class ResolvedDeployment(ReplicasSpec, _ResolvedModels):
    """A deployment spec with resolved model names, as stored and passed to the serving cluster."""

    # Ignore unknown fields, so that rows of newer versions are still served.
    model_config = ConfigDict(extra="ignore")

    id: str
    """`dep_` id."""
    artifact_uri: str
    """Address of the model's artifact."""
    alias: str | None = None
    """Alias that the deployment follows: later promotions are swapped in."""
    tenant: str | None = None
    """Tenant whose API keys replicas accept; None: all tenants."""
