"""The operator's grants to each tenant: quotas and weights, from a YAML file. Knows neither jobs nor callers.

default: {max_queued_jobs: 100, max_running_jobs: 4}
tenants:
  research: {weight: 2, max_gpus: 32}     # the rest as in `default`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.limits import (
    ALIAS_CHANGES,
    ALIASES,
    DEPLOYMENTS,
    FILES,
    IMPORTED_MODELS,
    PENDING_DELIVERIES,
    STORED_BYTES,
    STORED_JOBS,
    UNFINISHED_JOBS,
)
from swiftkv_platform.security.operator_files import OperatorFile
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Access, SourceRules
from swiftkv_platform.specs.documents import load_yaml
from swiftkv_platform.specs.publish import WebhookSpec


class TenantPolicy(FiniteModel):
    """Grants of one tenant; None is no limit. What a tenant stores is limited by default."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of the cluster relative to other tenants that wait, or have deployments."""
    max_queued_jobs: Annotated[int, Field(ge=0)] | None = None
    """Jobs that wait or are paused; another one is refused until one of them has started or ended."""
    max_unfinished_jobs: Annotated[int, Field(ge=0)] | None = UNFINISHED_JOBS.default
    """Jobs that have not ended; another one is refused."""
    max_stored_jobs: Annotated[int, Field(ge=0)] | None = STORED_JOBS.default
    """Jobs that are kept, including those that have ended; another one is refused until some are deleted."""
    max_running_jobs: Annotated[int, Field(ge=1)] | None = None
    """Jobs on the cluster at a time; the others wait."""
    max_gpus: Annotated[float, Field(ge=0.0)] | None = None
    """GPUs that its jobs and deployments hold at a time; a single one that asks for more is refused."""
    max_cpus: Annotated[float, Field(ge=0.0)] | None = None
    """CPU cores that its jobs and deployments hold at a time; a single one that asks for more is refused."""
    max_replicas: Annotated[int, Field(ge=0)] | None = None
    """Sum of its deployments' `max_replicas`; a deployment beyond that is refused."""
    max_file_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of one uploaded file, where that is less than the operator's `SWIFTKV_MAX_FILE_BYTES`."""
    max_file_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of one uploaded file, where that is less than the operator's `SWIFTKV_MAX_FILE_ROWS`."""
    max_stored_bytes: Annotated[int, Field(ge=0)] | None = STORED_BYTES.default
    """Bytes of all its uploaded files and models; another file, import or job is refused until some are deleted."""
    max_files: Annotated[int, Field(ge=0)] | None = FILES.default
    """Uploaded files; another one is refused until some are deleted."""
    max_imported_models: Annotated[int, Field(ge=0)] | None = IMPORTED_MODELS.default
    """Imported models; another one is refused until some are deleted. Jobs' models are limited with the jobs."""
    max_deployments: Annotated[int, Field(ge=0)] | None = DEPLOYMENTS.default
    """Deployments, including those that are being deleted; another one is refused."""
    max_aliases: Annotated[int, Field(ge=0)] | None = ALIASES.default
    """Aliases of models; another one is refused."""
    max_alias_changes: Annotated[int, Field(ge=1)] | None = ALIAS_CHANGES.default
    """Promotions and rollbacks in the history of each alias; a further one removes the oldest."""
    max_pending_deliveries: Annotated[int, Field(ge=0)] | None = PENDING_DELIVERIES.default
    """Webhook deliveries that wait to be sent; further ones count as failed."""
    cost_cap: Annotated[float, Field(gt=0.0)] | None = None
    """Most that one job may cost before it is paused, whatever its spec says."""
    route_prefixes: tuple[str, ...] = ()
    """Route prefixes outside `/t/{tenant}`, such as `/`, that its deployments may have if there are API keys."""
    chat_templates: bool = False
    """Whether its deployments may have their own chat templates if there are API keys. Templates run in replicas,
    sandboxed, but without a time limit."""
    hub_organizations: tuple[str, ...] | None = None
    """Organisations of the hub whose models and data its specs may name, and repositories without an organisation by
    their name. The platform reads the hub with one token for all tenants."""
    wandb_entities: tuple[str, ...] | None = None
    """Entities of W&B that its jobs may write to with the operator's key, besides the key's default entity. None: all
    without API keys, else no other."""
    webhook: WebhookSpec | None = None
    """Webhook for all its jobs' changes of status, in addition to the webhooks that a job names."""


class _TenantsFile(FiniteModel):
    default: TenantPolicy = TenantPolicy()
    tenants: dict[str, TenantPolicy] = {}


class TenantPolicies:
    """The policies of the last good version of a file; without a file all tenants have the default policy.

    Raises `InvalidInputError` for a file that cannot be used from the start.
    """

    def __init__(self, path: Path | None = None) -> None:
        hint = f"accepted are `default`, `tenants` and, for each tenant, {', '.join(TenantPolicy.model_fields)}"
        self._file = None if path is None else OperatorFile(path, _parse_policies, field="tenants_file", hint=hint)

    def get(self, tenant: str) -> TenantPolicy:
        """Return the tenant's policy; fields that it leaves out are those of `default`."""
        if self._file is None:
            return DEFAULT_POLICY
        content = self._file.content
        default, own = content.default, content.tenants.get(tenant)
        if own is None:
            return default
        return default.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})

    @property
    def is_usable(self) -> bool:
        """Whether the newest version of the file is valid and in use."""
        return self._file is None or self._file.is_usable


DEFAULT_POLICY = TenantPolicy()


def _parse_policies(content: bytes) -> _TenantsFile:
    try:
        document: Any = load_yaml(content.decode())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return _TenantsFile.model_validate(document if document is not None else {})


def make_source_rules(settings: Settings) -> SourceRules:
    return SourceRules(settings.resolved_source_roots, code_tasks=settings.allow_code_tasks)


def get_source_access(settings: Settings, policies: TenantPolicies, tenant: str | None) -> Access:
    """Return the sources that a tenant may read; without a tenant, only the hub if the rules restrict roots."""
    rules = make_source_rules(settings)
    if tenant is None:
        return Access(roots=None if rules.roots is None else ())
    return rules.build_access(tenant, policies.get(tenant).hub_organizations)
