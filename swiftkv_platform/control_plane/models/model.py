"""Distilled models and promotions, as the control plane stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.limits import MODEL_BYTES, MODEL_DEPTH, MODEL_VALUES

IMPORTED_MODELS_PREFIX = "models"
"""Prefix of all imported models in the object store."""


@dataclass(frozen=True)
class Model:
    """A distilled model: an artifact that can be deployed, and its origin."""

    id: str
    tenant: str
    name: str
    job_id: str | None
    """None for an imported model."""
    attempt: int
    """0 for an imported model."""
    created_at: int
    artifact_uri: str
    manifest_digest: str
    """SHA-256 of the model's manifest, which has the SHA-256 of each file."""
    size: int
    """Bytes."""
    lineage: Mapping[str, Any]
    metrics: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """Prefix of the model's objects."""
        if self.job_id is None:
            return get_import_prefix(self.id)
        return AttemptId(self.job_id, self.attempt).artifact_prefix


def get_import_prefix(model_id: str) -> str:
    """Return the prefix of an imported model's objects."""
    return f"{IMPORTED_MODELS_PREFIX}/{model_id}"


def find_exceeded_document_limit(model: Model) -> str | None:
    """Return the limit that a model's lineage and metrics exceed; None if they can be stored in a row, which every
    list reads. Counts each value with its dotted name, as comparisons show it."""
    pending: list[tuple[Any, int, int]] = [(model.lineage, 0, 0), (model.metrics, 0, 0)]
    values = size = 0
    while pending:
        value, depth, name = pending.pop()
        values += 1
        size += name + (len(value.encode(errors="backslashreplace")) if isinstance(value, str) else 8)
        if isinstance(value, Mapping):
            pending += [
                (item, depth + 1, name + len(str(key).encode(errors="backslashreplace")) + 1)
                for key, item in value.items()
            ]
        elif isinstance(value, list | tuple):
            pending += [(item, depth + 1, 0) for item in value]
        if depth > MODEL_DEPTH.default:
            return f"its lineage and report have more than {MODEL_DEPTH.default} nested objects"
        if values > MODEL_VALUES.default:
            return f"its lineage and report have more than {MODEL_VALUES.default} values"
        if size > MODEL_BYTES.default:
            return f"its lineage and report have more than {MODEL_BYTES.default} bytes"
    return None


@dataclass(frozen=True)
class Promotion:
    """One change of an alias: a promotion or a rollback."""

    id: str
    tenant: str
    alias: str
    action: Literal["promote", "rollback"]
    model: str
    """Model that the alias points to from then on."""
    previous: str | None
    """Model that the alias pointed to before."""
    reason: str
    by: str
    """Name of the caller's key."""
    created_at: int
    version: int
    """Version of the alias from then on: the position in its history, from 1."""
