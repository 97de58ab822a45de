"""The JSON of deployments."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field

from swiftkv_platform.control_plane.deployments.deployment import Deployment, DeploymentStatus
from swiftkv_platform.control_plane.http.answers import Answer
from swiftkv_platform.control_plane.http.changes import MergePatch, merge_patch_of
from swiftkv_platform.specs.deployment import DeploymentSpec, ResolvedDeployment


@merge_patch_of(DeploymentSpec)
class DeploymentChange(MergePatch):
    """Changes of a deployment, as a JSON merge patch (RFC 7396); fields that are left out keep their value."""


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


class _DeploymentHead(Answer):
    """First fields of a deployment's answer."""

    id: str
    object: Literal["deployment"] = "deployment"
    created_at: int
    version: int
    """Increases with every change; also in `ETag`, for `If-Match`."""


class DeploymentAnswer(ResolvedDeployment, _DeploymentHead):
    """A served model."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    # Callers only see deployments of their own tenant.
    tenant: str | None = Field(default=None, exclude=True)
    status: DeploymentStatus
    message: str
    replicas: int
    """Replicas running now."""
    load_seconds: dict[str, float]
    """Cold start: seconds by phase of the running replica that took longest to serve the model. `fetch`: from the
    object store or the machine's cache; `load`: into the engine; `check`: its first token. Empty until a replica
    runs."""
    url: str
    """Base URL; requests go to `{url}/generate`."""

    @classmethod
    def of(cls, deployment: Deployment, serve_url: str) -> Self:
        spec, kept = deployment.spec, {"created_at": deployment.created_at, "version": deployment.version}
        url = serve_url.rstrip("/") + spec.route_prefix.rstrip("/")
        return cls(**spec.model_dump(), **vars(deployment.state), **kept, url=url)
