"""A served model, as the control plane keeps it. Knows no cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import ResolvedDeployment


class DeploymentStatus(StrEnum):
    PENDING = "pending"
    """Stored, not yet handed to the cluster."""
    DEPLOYING = "deploying"
    RUNNING = "running"
    SWAPPING = "swapping"
    """The version before answers; the one that is wanted is being loaded beside it."""
    REFUSED = "refused"
    """The version before answers; the one that is wanted was refused."""
    UNHEALTHY = "unhealthy"
    """The deployment ran, and some replica does not any more."""
    FAILED = "failed"
    """The deployment could not be started."""
    DELETING = "deleting"


@dataclass(frozen=True)
class DeploymentState:
    """The serving cluster's view of a deployment."""

    status: DeploymentStatus
    message: str = ""
    replicas: int = 0
    """Running now."""
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
    """Rises with every change of `spec`, and with nothing else."""


@dataclass(frozen=True)
class Holdings:
    """Jobs and deployments that a tenant has on the clusters, or may come to have, beside one deployment."""

    jobs: Sequence[JobSpec]
    """Specs of the jobs whose attempts may be on the cluster."""
    deployments: Sequence[ResolvedDeployment]


Admit = Callable[[Holdings], None]
DeploymentChange = Callable[[Deployment, Holdings], tuple[ResolvedDeployment, DeploymentState]]
"""Function of a deployment, and of what else its tenant holds, that gives its new spec and state."""
