"""The operator's grants to each tenant: quotas and weights, from a YAML file, and the cluster resources that count
against them. Has no SQL, since the command line plans jobs without SQLAlchemy.

default: {max_queued_jobs: 100, max_running_jobs: 4}
tenants:
  research: {weight: 2, max_gpus: 32}     # the rest as in `default`
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from swiftkv_platform.contract.autoscaling import compute_replica_resources
from swiftkv_platform.frozen import FiniteBaseModel
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
from swiftkv_platform.security.operator_files import ReloadedFile
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Access, SourceRules
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.specs.documents import load_yaml
from swiftkv_platform.specs.job import WebhookSpec


class TenantPolicy(FiniteBaseModel):
    """Quotas and permissions of one tenant; None means no limit. Stored objects are limited by default."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Weight of the tenant's share of the cluster among tenants with waiting jobs or deployments."""
    max_queued_jobs: Annotated[int, Field(ge=0)] | None = None
    """Max queued and paused jobs; more are refused until one has started or ended."""
    max_unfinished_jobs: Annotated[int, Field(ge=0)] | None = UNFINISHED_JOBS.default
    """Max unfinished jobs; more are refused."""
    max_stored_jobs: Annotated[int, Field(ge=0)] | None = STORED_JOBS.default
    """Max stored jobs, including ended ones; more are refused until some are deleted."""
    max_running_jobs: Annotated[int, Field(ge=1)] | None = None
    """Max jobs on the cluster at a time; further jobs wait."""
    max_gpus: Annotated[float, Field(ge=0.0)] | None = None
    """Max GPUs of the tenant's jobs and deployments at a time; a job or deployment that needs more alone is refused."""
    max_cpus: Annotated[float, Field(ge=0.0)] | None = None
    """Max CPU cores of the tenant's jobs and deployments at a time; one that needs more alone is refused."""
    max_replicas: Annotated[int, Field(ge=0)] | None = None
    """Max sum of `max_replicas` over the tenant's deployments; a deployment above the sum is refused."""
    max_file_bytes: Annotated[int, Field(ge=1)] | None = None
    """Max bytes of an uploaded file, if less than the operator's `SWIFTKV_MAX_FILE_BYTES`."""
    max_file_rows: Annotated[int, Field(ge=1)] | None = None
    """Max rows of an uploaded file, if less than the operator's `SWIFTKV_MAX_FILE_ROWS`."""
    max_stored_bytes: Annotated[int, Field(ge=0)] | None = STORED_BYTES.default
    """Max bytes of all its uploaded files and models, and of what its deployments may capture; more files, imports,
    jobs and captured traffic are refused until some are deleted."""
    max_files: Annotated[int, Field(ge=0)] | None = FILES.default
    """Max uploaded files; more are refused until some are deleted."""
    max_imported_models: Annotated[int, Field(ge=0)] | None = IMPORTED_MODELS.default
    """Max imported models; more are refused until some are deleted. Models of jobs are limited by `max_stored_jobs`."""
    max_deployments: Annotated[int, Field(ge=0)] | None = DEPLOYMENTS.default
    """Max deployments, including deployments in deletion; further deployments are refused."""
    max_aliases: Annotated[int, Field(ge=0)] | None = ALIASES.default
    """Max aliases of models; more are refused."""
    max_alias_changes: Annotated[int, Field(ge=1)] | None = ALIAS_CHANGES.default
    """Max promotions and rollbacks in the history of each alias; a further change removes the oldest."""
    max_pending_deliveries: Annotated[int, Field(ge=0)] | None = PENDING_DELIVERIES.default
    """Max pending webhook deliveries; further deliveries count as failed."""
    cost_cap: Annotated[float, Field(gt=0.0)] | None = None
    """Max cost of a job before the job is paused, even if the job's spec allows more."""
    route_prefixes: tuple[str, ...] = ()
    """Route prefixes outside `/t/{tenant}`, e.g. `/`, that the tenant's deployments may have if API keys exist."""
    chat_templates: bool = False
    """Whether its deployments may use custom chat templates if there are API keys. Replicas run templates sandboxed,
    but without a time limit."""
    hub_organizations: tuple[str, ...] | None = None
    """Hub organizations whose models and data its specs may name, and names of repositories without an organization.
    The platform reads the hub with one token for all tenants."""
    wandb_entities: tuple[str, ...] | None = None
    """W&B entities that its jobs may write to with the operator's key, in addition to the key's default entity.
    None: all entities without API keys, else only the default."""
    webhook: WebhookSpec | None = None
    """Webhook for status changes of all jobs of the tenant, in addition to the jobs' own webhooks."""


class _TenantsFile(FiniteBaseModel):
    default: TenantPolicy = TenantPolicy()
    tenants: dict[str, TenantPolicy] = {}


class TenantPolicies:
    """The policies of all tenants, from the last valid version of a file; without a file, the default policy.

    Raises `InvalidInputError` if the first version of the file is invalid.
    """

    def __init__(self, path: Path | None = None) -> None:
        hint = f"accepted keys are `default`, `tenants` and, per tenant, {', '.join(TenantPolicy.model_fields)}"
        self._file = None if path is None else ReloadedFile(path, _parse_policies, field="tenants_file", hint=hint)

    def get(self, tenant: str) -> TenantPolicy:
        """Return the tenant's policy; fields that it does not set come from the policy `default`."""
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
    return SourceRules(
        settings.resolved_source_roots,
        code_tasks=settings.allow_code_tasks,
        teacher_origins=settings.resolved_teacher_origins,
    )


def get_source_access(settings: Settings, policies: TenantPolicies, tenant: str | None) -> Access:
    """Return the sources that a tenant may read; without a tenant, only the hub if the rules restrict roots."""
    rules = make_source_rules(settings)
    if tenant is None:
        return Access(roots=None if rules.roots is None else ())
    return rules.build_access(tenant, policies.get(tenant).hub_organizations)


_LIMITS = {"max_running_jobs": "jobs", "max_gpus": "gpus", "max_cpus": "cpus", "max_replicas": "replicas"}
"""The field of `Demand` that each limit of a tenant's policy bounds."""


@dataclass(frozen=True)
class Demand:
    """Cluster resources of jobs and deployments, at their max size."""

    jobs: int = 0
    gpus: float = 0.0
    cpus: float = 0.0
    replicas: int = 0

    @classmethod
    def for_job(cls, spec: JobSpec) -> Demand:
        resources, workers = spec.resources, spec.max_total_workers
        # A worker's thread takes a core, however small a share it reserves.
        return cls(1, workers * resources.gpus_per_worker, workers * max(resources.cpus_per_worker, 1))

    @classmethod
    def for_deployment(cls, spec: ResolvedDeployment) -> Demand:
        resources, replicas = compute_replica_resources(spec.engine), spec.max_replicas
        return cls(0, replicas * resources["num_gpus"], replicas * resources["num_cpus"], replicas)

    def __add__(self, other: Demand) -> Demand:
        return Demand(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def subtract_clamped(self, other: Demand) -> Demand:
        """Subtract `other` per field; negative results become 0."""
        return Demand(*(max(ours - theirs, 0) for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def find_exceeded_limit(
        self, policy: TenantPolicy, *, adding: Demand | None = None
    ) -> tuple[str, float, float] | None:
        """Return (limit's name, demand, limit) of the first exceeded limit; None without one. With `adding`, only
        limits on resources that `adding` has count."""
        for limit, part in _LIMITS.items():
            requested, most = getattr(self, part), getattr(policy, limit)
            if most is not None and requested > most and (adding is None or getattr(adding, part) > 0):
                return limit, requested, most
        return None

    def dominant_share(self, total: Demand) -> float:
        """Compute the dominant share (dominant resource fairness): the largest fraction of `total` among jobs, GPUs
        and CPUs."""
        parts = ((self.jobs, total.jobs), (self.gpus, total.gpus), (self.cpus, total.cpus))
        return max((part / whole for part, whole in parts if whole), default=0.0)
