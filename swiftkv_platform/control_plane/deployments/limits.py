"""Limits of a deployment: the operator's on each, and the tenant's quotas on all its deployments and jobs together."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, Tenants
from swiftkv_platform.errors import ForbiddenError, InvalidInputError, OverQuotaError, QuotaExceededError
from swiftkv_platform.specs.deployment import ResolvedDeployment

_NOTHING = Demand()


@dataclass(frozen=True)
class DeploymentLimits:
    """Limits of what a deployment may ask for."""

    max_replicas: int | None = None
    """Most replicas of one deployment; None sets no limit."""
    policies: Tenants = NO_LIMITS
    grants_templates: bool = False
    """Whether a chat template requires a grant to the tenant."""

    def check(
        self, spec: ResolvedDeployment, tenant: str, held: Demand, *, before: ResolvedDeployment | None = None
    ) -> None:
        """Refuse a deployment that asks for more than `before`, if that exceeds a limit.

        Args:
            held: demand of the tenant's jobs and its other deployments.

        Raises `InvalidInputError` above the operator's limit, `ForbiddenError` for a chat template without the grant,
        `OverQuotaError` if the deployment alone exceeds its tenant's quota, and `QuotaExceededError` if it does
        together with `held`.
        """
        self._check_template(spec, tenant, before)
        had = _NOTHING if before is None else Demand.of_deployment(before)
        wanted = Demand.of_deployment(spec)
        more = wanted.beyond(had)
        if self.max_replicas is not None and more.replicas and spec.max_replicas > self.max_replicas:
            raise InvalidInputError(
                f"max_replicas is {spec.max_replicas}; the operator allows {self.max_replicas} per deployment "
                "(SWIFTKV_MAX_DEPLOYMENT_REPLICAS)",
                field="max_replicas",
                value=spec.max_replicas,
            )
        policy = self.policies.policy(tenant)
        alone = wanted.exceeded_limit(policy, adding=more)
        if alone is not None:
            name, asked, most = alone
            raise OverQuotaError(
                f"the deployment asks for {asked:g}, and the quota {name} of tenant {tenant!r} is {most:g}: it could "
                "never run; use fewer max_replicas or smaller ones",
                field=name,
                value=asked,
            )
        together = (held + wanted).exceeded_limit(policy, adding=more)
        if together is not None:
            name, asked, most = together
            raise QuotaExceededError(
                f"with this the jobs and deployments of tenant {tenant!r} would hold {asked:g}, and its quota {name} "
                f"is {most:g}; try again when others have ended, or with fewer max_replicas",
                field=name,
                value=asked,
            )

    def _check_template(self, spec: ResolvedDeployment, tenant: str, before: ResolvedDeployment | None) -> None:
        had = None if before is None else before.chat_template
        if not self.grants_templates or spec.chat_template in (None, had):
            return
        if not self.policies.policy(tenant).chat_templates:
            raise ForbiddenError(
                f"chat_template is given, but tenant {tenant!r} may not set one: the operator grants it with "
                "chat_templates: true in the tenants file; leave it out to use the model's own",
                field="chat_template",
            )
