"""A distilled model, as the control plane keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
