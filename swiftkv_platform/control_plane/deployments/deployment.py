"""Deployments, as the control plane stores them. Knows no cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swiftkv_platform.contract.autoscaling import compute_replica_resources
from swiftkv_platform.control_plane.access.tenants import Demand
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.deployment import ResolvedDeployment


class DeploymentStatus(StrEnum):
    PENDING = "pending"
    """Stored, not yet handed to the cluster."""
    DEPLOYING = "deploying"
    RUNNING = "running"
    SWAPPING = "swapping"
    """The previous version answers while the wanted one is loaded."""
    REFUSED = "refused"
    """The previous version answers; the wanted one was refused."""
    UNHEALTHY = "unhealthy"
    """Some replica that ran does not run any more."""
    FAILED = "failed"
    """The deployment could not be started."""
    DELETING = "deleting"


@dataclass(frozen=True)
class DeploymentState:
    """The serving cluster's view of a deployment."""

    status: DeploymentStatus
    message: str = ""
    replicas: int = 0
    """Replicas running now."""
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`fetch`, `load`, `check`) of the replica that took longest to serve the model."""
    unknown_since: int | None = None
    """Unix seconds since which the cluster has not reported the other fields; None while it reports them."""


@dataclass(frozen=True)
class Deployment:
    """A served model."""

    spec: ResolvedDeployment
    tenant: str
    created_at: int
    state: DeploymentState = DeploymentState(DeploymentStatus.PENDING)
    version: int = 1
    """Increases with every change of `spec`, and only then."""


def replace_model(spec: ResolvedDeployment, model: str, artifact_uri: str) -> ResolvedDeployment:
    """Return the spec of a deployment whose alias points to another model. Raises `InvalidInputError` for a model that
    one of its adapters is, or is named like."""
    if any(model in (each.model, each.name) for each in spec.adapters or ()):
        raise InvalidInputError.for_field(
            "model",
            model,
            f", which deployment {spec.id}, which follows alias {spec.alias!r}, serves as an adapter; remove it from "
            "the deployment's adapters first",
        )
    return spec.model_copy(update={"model": model, "artifact_uri": artifact_uri})


def apply_change(deployment: Deployment, spec: ResolvedDeployment) -> tuple[ResolvedDeployment, DeploymentState]:
    """Return (spec, state) of a deployment after a change that the cluster has not applied yet."""
    if spec == deployment.spec:
        return spec, deployment.state
    status = deployment.state.status
    if status in (DeploymentStatus.RUNNING, DeploymentStatus.REFUSED, DeploymentStatus.UNHEALTHY):
        status = DeploymentStatus.SWAPPING
    elif status is DeploymentStatus.FAILED:
        status = DeploymentStatus.DEPLOYING
    return spec, DeploymentState(status, "applying the change", deployment.state.replicas)


def make_replica_bundle(spec: ResolvedDeployment) -> dict[str, float]:
    """Return the resources that a replica requires on one node, by Ray's resource names."""
    resources = compute_replica_resources(spec.engine)
    return {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}


Admit = Callable[[Demand], None]
ComputeDeploymentChange = Callable[[Deployment, Demand], tuple[ResolvedDeployment, DeploymentState]]
"""Function: (deployment, demand of its tenant's jobs and other deployments) -> (new spec, new state)."""


REPLICA_PATHS = frozenset({"generate", "v1", "tokenize", "detokenize", "health", "metrics", "openapi.json", "docs"})
"""First segments of the paths that a replica answers below its prefix."""


def find_outer_routes(route_prefix: str) -> list[str]:
    """Return the prefixes whose deployments would lose requests to this one, since it continues them with a path that
    replicas answer: /a/v1/b -> [/a]."""
    segments = route_prefix.split("/")
    return ["/".join(segments[:end]) or "/" for end in range(1, len(segments)) if segments[end] in REPLICA_PATHS]


def find_inner_routes(route_prefix: str) -> list[str]:
    """Return the beginnings of prefixes that would take requests from this one: /a -> [/a/docs/, /a/generate/, ...].
    A prefix that is followed by "/" counts as its own beginning."""
    return [f"{route_prefix.rstrip('/')}/{path}/" for path in sorted(REPLICA_PATHS)]
