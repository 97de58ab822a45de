"""Arguments of the Ray Serve application, which define a deployment. Frozen; reads nothing and imports no Ray."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.base import Reserved
from swiftkv_platform.specs.deployment import ReplicasSpec, ResolvedCandidate, ServedSpec

HUB_PREFIX = "hf:"
"""Marks an `artifact_uri` as the id of a model on the Hugging Face hub."""


class BaseAccess(FiniteModel):
    """Sources that an adapter's base model may come from: those of its tenant, see `sources.Access`."""

    roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes; null allows every path and address."""
    hub_organizations: tuple[str, ...] | None = None
    """Organisations of the hub; null allows the whole hub."""


class Served(ServedSpec[EngineConfig, ResolvedCandidate]):
    """The served models: Serve's `user_config`. If only this changes, running replicas swap the new version in.

    `model` and `candidate.model` may be any names; responses contain them.
    """

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`. With `verify` off also a plain Hugging Face
    directory, or `hf:` and a hub id."""
    verify: bool = True
    """Serve only files that match the manifest byte for byte."""
    base_access: BaseAccess = BaseAccess()
    """Rules for the base models of adapters, applied when a model is loaded. A change does not reload models."""
    revision: str = ""
    """Opaque name of this state of the deployment, which `/health` repeats."""

    @model_validator(mode="after")
    def _verifiable(self) -> Self:
        if self.verify and self.artifact_uri.startswith(HUB_PREFIX):
            raise ValueError(f"a hub model has no manifest, so artifact_uri {self.artifact_uri!r} needs verify: false")
        return self

    def loads_the_same_as(self, other: Served) -> bool:
        """Whether both load the same models: they differ at most in shares, ignored fields, origins, base model rules
        and revision."""
        return self._loaded() == other._loaded()

    def _loaded(self) -> Served:
        candidate = self.candidate and self.candidate.model_copy(update={"share": 0.0})
        others = {"revision": "", "ignored_fields": None, "cors_origins": None, "base_access": BaseAccess()}
        return self.model_copy(update={**others, "candidate": candidate})


class ReplicaArgs(FiniteModel):
    """Arguments of a replica that do not change during its life."""

    id: Annotated[str, Field(min_length=1)]
    """`dep_` id."""
    api_keys_file: str | None = None
    """File of hashed API keys on the replicas' machines."""
    oidc_file: str | None = None
    """YAML file of issuers whose tokens with the scope `generate` are accepted. With neither file, every client that
    can reach a replica is answered."""
    tenant: str | None = None
    """Only tenant whose keys and tokens are accepted; None: all tenants of the files."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted values of `Host`, in addition to addresses and local names, if there is no file of keys or issuers.
    Guards against DNS rebinding by web pages."""
    max_body_bytes: Annotated[int, Field(ge=1)] | None = None
    """Most bytes of a request body; None: what the model's context needs, at most 16 MiB."""
    log_text: bool = False
    """Write prompts and answers to the request log. They may be confidential."""


class ServeArgs(ReplicasSpec, ReplicaArgs):
    """A deployment. If any of these changes, Serve replaces the replicas. Options that running replicas can change are
    in the Serve config's `deployments` entry for `Replica`: `user_config` (`Served`) and `autoscaling_config`."""

    model: str | None = None
    """Field of `Served`, like the following three, for a deployment without `user_config`."""
    artifact_uri: str | None = None
    engine: EngineConfig = EngineConfig()
    verify: bool = True
    num_cpus: Reserved | None = None
    """Cores that Ray reserves for a replica; None: `engine.num_threads`, or 1, for each of its ranks."""
    num_gpus: Reserved | None = None
    """GPUs that Ray reserves for a replica; None: one for each rank if `engine.device` is `cuda`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.model is None) != (self.artifact_uri is None):
            raise ValueError("give model and artifact_uri together, or neither and the deployment's user_config")
        self.served()
        return self

    def served(self) -> Served | None:
        """Return the served model named by these arguments; None if `user_config` names it."""
        if self.model is None or self.artifact_uri is None:
            return None
        return Served(model=self.model, artifact_uri=self.artifact_uri, engine=self.engine, verify=self.verify)
