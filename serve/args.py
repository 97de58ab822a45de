"""The arguments of the Ray Serve application: what a deployment is. Frozen; reads nothing and imports no Ray."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swiftkv_platform.engine import EngineConfig

HUB_PREFIX = "hf:"
"""Marks an `artifact_uri` as the id of a model on the Hugging Face hub."""


class ReplicaArgs(BaseModel):
    """What a replica serves. A change of these replaces the replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    id: Annotated[str, Field(min_length=1)]
    """`dep_` id."""
    model: Annotated[str, Field(min_length=1)]
    """`mdl_` id, or any name; answers carry it."""
    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`. With `verify` off also a plain Hugging Face
    directory, or a hub id behind `hf:`."""
    engine: EngineConfig = EngineConfig()
    verify: bool = True
    """Serve only what its manifest describes, byte for byte."""

    @model_validator(mode="after")
    def _verifiable(self) -> Self:
        if self.verify and self.artifact_uri.startswith(HUB_PREFIX):
            raise ValueError(f"a hub model has no manifest; artifact_uri {self.artifact_uri!r} needs verify: false")
        return self


class ServeArgs(ReplicaArgs):
    """A deployment: the control plane's own fields, and `verify`."""

    route_prefix: Annotated[str, Field(pattern=r"^/")] = "/"
    """HTTP path below which the application answers."""
    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0.0)] = 8.0
    """Requests a replica should work on at once, those that wait included; more replicas are started above it."""

    @model_validator(mode="after")
    def _replicas_in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        return self
