"""Arguments of the Ray Serve application, which define a deployment. Knows no Ray, does no I/O."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.specs.base import Reserved
from swiftkv_platform.specs.deployment import (
    ReplicasSpec,
    ResolvedAdapter,
    ResolvedCandidate,
    ResolvedCapture,
    ServedSpec,
)

HUB_PREFIX = "hf:"
"""Prefix of an `artifact_uri` that is a model id of the Hugging Face hub."""


class BaseModelAccess(FiniteBaseModel):
    """Allowed sources of an adapter's base model for the deployment's tenant; see `sources.Access`."""

    roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes; null allows all."""
    hub_organizations: tuple[str, ...] | None = None
    """Organizations of the hub; null allows all."""


_REQUEST_SETTINGS = ("capture", "ignored_fields", "cors_origins")
"""Fields that hold for any model: settings of single requests."""


class ServedConfig(ServedSpec[EngineConfig, ResolvedCandidate, ResolvedAdapter, ResolvedCapture]):
    """The served models: Serve's `user_config`. Running replicas swap to a changed one without a restart.

    `model` and `candidate.model` are any names; responses contain them.
    """

    artifact_uri: Annotated[str, Field(min_length=1)]
    """Directory or `s3://` prefix with the artifact's `manifest.json`. With `verify: false` also a plain Hugging Face
    directory, or `hf:` and a hub id."""
    verify: bool = True
    """Check all files against the manifest's digests."""
    base_access: BaseModelAccess = BaseModelAccess()
    """Rules for the base models of adapters, checked when a model is loaded. A change does not reload models."""
    revision: str = ""
    """Opaque id of this configuration, which `/health` returns."""

    @model_validator(mode="after")
    def _check_verify(self) -> Self:
        if self.verify and self.artifact_uri.startswith(HUB_PREFIX):
            raise ValueError(
                f"artifact_uri {self.artifact_uri!r} is a hub model without a manifest; it needs verify: false"
            )
        return self

    def loads_same_models(self, other: ServedConfig) -> bool:
        """Whether both have the same models: they may differ in adapters, shares, captured traffic, ignored fields,
        CORS origins, `base_access` and `revision`."""
        return self._select_loaded_fields() == other._select_loaded_fields()

    def _select_loaded_fields(self) -> ServedConfig:
        candidate = self.candidate and self.candidate.model_copy(update={"share": 0.0})
        others = {"revision": "", "base_access": BaseModelAccess(), **dict.fromkeys(_REQUEST_SETTINGS)}
        adapters = None if self.adapters is None else ()
        return self.model_copy(update={**others, "candidate": candidate, "adapters": adapters})

    def replace_request_settings(self, other: ServedConfig) -> ServedConfig:
        """Return this configuration with the settings of single requests of another one."""
        return self.model_copy(update={name: getattr(other, name) for name in _REQUEST_SETTINGS})


class ReplicaArgs(FiniteBaseModel):
    """Arguments of a replica that require a restart to change."""

    id: Annotated[str, Field(min_length=1)]
    """`dep_` id."""
    api_keys_file: str | None = None
    """File of hashed API keys, on the replica's machine."""
    oidc_file: str | None = None
    """YAML file of issuers of accepted tokens, which need the scope `generate`. Without both files, every client is
    admitted."""
    tenant: str | None = None
    """The only admitted tenant; None: all tenants of the files."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted values of `Host` besides addresses and local names, without a file of keys or issuers. Guards against
    DNS rebinding by web pages."""
    max_body_bytes: Annotated[int, Field(ge=1)] | None = None
    """Max bytes of a request body; None: by the model's context, at most 16 MiB."""
    log_text: bool = False
    """Log prompts and completions, which may be confidential."""


class ServeArgs(ReplicasSpec, ReplicaArgs):
    """A deployment; changes replace the replicas. Options that running replicas can change are in the Serve config's
    `deployments` entry for `Replica`: `user_config` (`ServedConfig`) and `autoscaling_config`."""

    model: str | None = None
    """This and the next three are fields of `ServedConfig`, for a deployment without `user_config`."""
    artifact_uri: str | None = None
    engine: EngineConfig = EngineConfig()
    verify: bool = True
    num_cpus: Reserved | None = None
    """Cores that Ray reserves per replica; None: `engine.num_threads`, or 1, per rank."""
    num_gpus: Reserved | None = None
    """GPUs that Ray reserves per replica; None: one per rank if `engine.device` is `cuda`."""

    @model_validator(mode="after")
    def _check_model_fields(self) -> Self:
        if (self.model is None) != (self.artifact_uri is None):
            raise ValueError("give model and artifact_uri together, or the deployment's user_config")
        self.make_served_config()
        return self

    def make_served_config(self) -> ServedConfig | None:
        """Return the served model of these arguments; None if `user_config` has it."""
        if self.model is None or self.artifact_uri is None:
            return None
        return ServedConfig(model=self.model, artifact_uri=self.artifact_uri, engine=self.engine, verify=self.verify)
