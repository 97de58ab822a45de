"""Deployments, as the control plane stores them. Knows no cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from swiftkv_platform.contract.autoscaling import replica_resources
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, Tenants
from swiftkv_platform.errors import ForbiddenError, InvalidInputError
from swiftkv_platform.specs.deployment import ResolvedDeployment


class DeploymentStatus(StrEnum):
    PENDING = "pending"
    """Stored, not yet handed to the cluster."""
    DEPLOYING = "deploying"
    RUNNING = "running"
    SWAPPING = "swapping"
    """The previous version answers while the wanted one is loaded beside it."""
    REFUSED = "refused"
    """The previous version answers; the wanted one was refused."""
    UNHEALTHY = "unhealthy"
    """The deployment ran, and some replica no longer does."""
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


@dataclass(frozen=True)
class Deployment:
    """A served model."""

    spec: ResolvedDeployment
    tenant: str
    created_at: int
    state: DeploymentState = DeploymentState(DeploymentStatus.PENDING)
    version: int = 1
    """Increases with every change of `spec`, and only then."""


def replica_needs(spec: ResolvedDeployment) -> dict[str, float]:
    """Return what a replica needs on one node, by Ray's names."""
    resources = replica_resources(spec.engine)
    return {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}


Admit = Callable[[Demand], None]
DeploymentChange = Callable[[Deployment, Demand], tuple[ResolvedDeployment, DeploymentState]]
"""(deployment, demand of its tenant's jobs and other deployments) -> its new spec and state."""


LONGEST_PREFIX = 200
"""Most characters of a prefix, its tenant's part included."""
REPLICA_PATHS = frozenset({"generate", "v1", "tokenize", "detokenize", "health", "metrics", "openapi.json", "docs"})
"""First segments of the paths that a replica answers below its prefix."""
_TENANTS = "t"
_SERVES_OWN = "-"
"""First segment of paths that Serve's proxies answer themselves, such as `/-/healthz`."""


@dataclass(frozen=True)
class RouteRules:
    """Rules on the route prefixes that callers ask for."""

    below_tenant: bool = False
    """Whether a tenant is confined to paths below `/t/{tenant}` and the prefixes that `policies` grant it."""
    policies: Tenants = NO_LIMITS

    def placed(self, route_prefix: str, tenant: str) -> str:
        """Return the prefix that `tenant` gets for `route_prefix`: the same, or the same below its own.

        Raises `ForbiddenError` for a prefix below another tenant's, and `InvalidInputError` for a reserved or too long
        path.
        """
        _check_segments(route_prefix)
        if not self.below_tenant or route_prefix in self.policies.policy(tenant).route_prefixes:
            return route_prefix
        home = f"/{_TENANTS}/{tenant}"
        if route_prefix == home or route_prefix.startswith(f"{home}/"):
            return route_prefix
        if route_prefix.startswith(f"/{_TENANTS}/"):
            raise ForbiddenError(
                f"route_prefix is {route_prefix!r}; tenant {tenant!r} has the routes below {home}, such as "
                f"{home}/chat; '/chat' is placed there automatically",
                field="route_prefix",
                value=route_prefix,
            )
        placed = home + route_prefix.rstrip("/")
        if len(placed) > LONGEST_PREFIX:
            raise InvalidInputError(
                f"route_prefix would be {placed!r}, {len(placed)} characters; at most {LONGEST_PREFIX} are accepted",
                field="route_prefix",
                value=route_prefix,
            )
        return placed


def outer_routes(route_prefix: str) -> list[str]:
    """Return the prefixes whose deployments would lose requests to this one, since it continues them with a path that
    replicas answer: /a/v1/b -> [/a]."""
    segments = route_prefix.split("/")
    return ["/".join(segments[:end]) or "/" for end in range(1, len(segments)) if segments[end] in REPLICA_PATHS]


def inner_routes(route_prefix: str) -> list[str]:
    """Return the beginnings of prefixes that would take requests from this one: /a -> [/a/docs/, /a/generate/, ...].
    A prefix that is followed by "/" counts as its own beginning."""
    return [f"{route_prefix.rstrip('/')}/{path}/" for path in sorted(REPLICA_PATHS)]


def _check_segments(route_prefix: str) -> None:
    segments = route_prefix.split("/")[1:]
    if "." in segments or ".." in segments or segments[0] == _SERVES_OWN:
        raise InvalidInputError(
            f"route_prefix is {route_prefix!r}; the segments '.' and '..', and '-' as the first one, are reserved; use "
            "another name",
            field="route_prefix",
            value=route_prefix,
        )


class ServeCluster(Protocol):
    """The cluster on which deployments run. Every method raises `ClusterUnavailableError` when it does not answer."""

    def apply(self, deployments: Sequence[ResolvedDeployment], *, keep: Collection[str] = ()) -> None:
        """Make exactly these the served applications. Returns before they are ready.

        Args:
            keep: ids of applications that stay as they are, if they are served.

        Raises:
            UnreadableRowError: an application to keep is served, but the cluster does not return its config; nothing is
                changed.
        """
        ...

    def status(self) -> Mapping[str, DeploymentState]:
        """States by deployment id; an application that is gone is absent."""
        ...
