"""The arguments of the Ray Serve application: what a deployment is. Frozen; reads nothing and imports no Ray."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.deployment import ReplicasSpec, ResolvedCandidate, ServedSpec
from swiftkv_platform.specs.limits import Reserved

HUB_PREFIX = "hf:"
"""Marks an `artifact_uri` as the id of a model on the Hugging Face hub."""


class BaseAccess(FiniteModel):
    """Sources that an adapter's base model may come from: those of its tenant, as `sources.Access` has them."""

    roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes; null opens every path and address."""
    hub_organizations: tuple[str, ...] | None = None
    """Organisations of the hub; null opens the hub."""


class Served(ServedSpec[EngineConfig, ResolvedCandidate]):
    """The served models: Serve's `user_config`. A change of it alone is swapped in by the replicas that run.

    `model` and `candidate.model` may be any names; answers carry them.
    """

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`. With `verify` off also a plain Hugging Face
    directory, or a hub id behind `hf:`."""
    verify: bool = True
    """Serve only what its manifest describes, byte for byte."""
    base_access: BaseAccess = BaseAccess()
    """Rules for the base models of adapters. They count where a model is loaded, and load nothing themselves."""
    revision: str = ""
    """Names this state of the deployment; `/health` repeats it. Without meaning here."""

    @model_validator(mode="after")
    def _verifiable(self) -> Self:
        if self.verify and self.artifact_uri.startswith(HUB_PREFIX):
            raise ValueError(f"a hub model has no manifest; artifact_uri {self.artifact_uri!r} needs verify: false")
        return self

    def loads_the_same_as(self, other: Served) -> bool:
        """Whether the two differ in nothing but shares, ignored fields, origins and names of the control plane."""
        return self._loaded() == other._loaded()

    def _loaded(self) -> Served:
        candidate = self.candidate and self.candidate.model_copy(update={"share": 0.0})
        shadow = self.shadow and self.shadow.model_copy(update={"share": 0.0})
        others = {"revision": "", "ignored_fields": None, "cors_origins": None, "base_access": BaseAccess()}
        return self.model_copy(update={**others, "candidate": candidate, "shadow": shadow})


class ReplicaArgs(FiniteModel):
    """Arguments of a replica that stay the same for as long as it lives."""

    id: Annotated[str, Field(min_length=1)]
    """`dep_` id."""
    api_keys_file: str | None = None
    """File of hashed API keys on the replicas' machines; None answers every client that can reach them."""
    oidc_file: str | None = None
    """YAML file of issuers whose tokens with the scope `generate` are answered; with neither file, every request is."""
    tenant: str | None = None
    """Tenant whose keys and tokens are answered, where there is a file of either; None: all that they hold."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that requests may be for where there is no file of keys or issuers, beside addresses and local
    names: a web page could lead a browser here under a name of its own."""
    max_body_bytes: Annotated[int, Field(ge=1)] | None = None
    """A larger body of a request is refused; None: what the model's context needs, at most 16 MiB."""
    log_text: bool = False
    """Write prompts and answers into the request log. They are the callers' own."""


class ServeArgs(ReplicasSpec, ReplicaArgs):
    """A deployment. Serve replaces the replicas when any of these changes; what can change while they live goes into
    the Serve config's `deployments` entry for `Replica`, as `user_config` (`Served`) and `autoscaling_config`."""

    model: str | None = None
    """Value for `Served`, like the following three, of a deployment that has no `user_config`."""
    artifact_uri: str | None = None
    engine: EngineConfig = EngineConfig()
    verify: bool = True
    num_cpus: Reserved | None = None
    """Cores that Ray reserves for a replica; None: `engine.num_threads`, or 1, for each of its ranks."""
    num_gpus: Reserved | None = None
    """GPUs; None: one for each rank where `engine.device` is `cuda`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.model is None) != (self.artifact_uri is None):
            raise ValueError("model and artifact_uri are given together, or neither and the deployment's user_config")
        self.served()
        return self

    def served(self) -> Served | None:
        """Return the served model that these arguments name; None where `user_config` names it."""
        if self.model is None or self.artifact_uri is None:
            return None
        return Served(model=self.model, artifact_uri=self.artifact_uri, engine=self.engine, verify=self.verify)
