"""A distilled model, as the control plane keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.attempt_id import AttemptId

IMPORTED = "models"
"""Prefix of all imported models in the object store."""


@dataclass(frozen=True)
class Model:
    """A distilled model: an artifact that can be deployed, and its origin."""

    id: str
    tenant: str
    name: str
    job_id: str | None
    """None of an imported model."""
    attempt: int
    """0 of an imported model."""
    created_at: int
    artifact_uri: str
    manifest_digest: str
    """SHA-256 of its manifest, which in turn names each file's."""
    size: int
    """Bytes."""
    lineage: Mapping[str, Any]
    metrics: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """Prefix of its objects."""
        if self.job_id is None:
            return imported_prefix(self.id)
        return AttemptId(self.job_id, self.attempt).artifact_prefix


def imported_prefix(model_id: str) -> str:
    """Return the prefix of an imported model's objects."""
    return f"{IMPORTED}/{model_id}"
