"""A distilled model, as the control plane keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swiftkv_platform.control_plane.deployments.deployment import Deployment, DeploymentState
from swiftkv_platform.specs.deployment import ResolvedDeployment


@dataclass(frozen=True)
class Model:
    """A distilled model: an artifact that can be deployed, and its origin."""

    id: str
    tenant: str
    name: str
    job_id: str
    attempt: int
    created_at: int
    artifact_uri: str
    manifest_digest: str
    """SHA-256 of its manifest, which in turn names each file's."""
    size: int
    """Bytes."""
    lineage: Mapping[str, Any]
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Promotion:
    """One change of what an alias stands for."""

    id: str
    tenant: str
    alias: str
    action: Literal["promote", "rollback"]
    model: str
    """Model that the alias stands for from then on."""
    previous: str | None
    """Model that it stood for before."""
    reason: str
    by: str
    """Name of the key that asked."""
    created_at: int
    version: int
    """Version of the alias from then on: its place in the alias's history, from 1."""


Change = Callable[[Deployment, Model], tuple[ResolvedDeployment, DeploymentState]]
"""Function that gives the new state of a deployment whose alias stands for another model now."""
