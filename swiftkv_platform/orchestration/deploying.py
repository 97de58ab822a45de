"""Callers' operations on deployments. Knows rules and ports; the reconciler does what takes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.job import new_id
from swiftkv_platform.orchestration.ports import (
    Catalog,
    Clock,
    Deployment,
    DeploymentSpec,
    DeploymentState,
    DeploymentStatus,
)
from swiftkv_platform.orchestration.registry import RegistryService, changed
from swiftkv_platform.orchestration.service import Caller


class DeploymentService:
    """Putting models into service and taking them out."""

    def __init__(self, catalog: Catalog, registry: RegistryService, *, clock: Clock) -> None:
        self._catalog = catalog
        self._registry = registry
        self._clock = clock

    def create(
        self,
        caller: Caller,
        *,
        model: str,
        route_prefix: str,
        min_replicas: int,
        max_replicas: int,
        target_ongoing_requests: float | None = None,
        engine: Mapping[str, Any],
        candidate: Mapping[str, Any] | None = None,
        shadow: Mapping[str, Any] | None = None,
        upscale_delay_s: float = DeploymentSpec.upscale_delay_s,
        downscale_delay_s: float = DeploymentSpec.downscale_delay_s,
    ) -> Deployment:
        """Store a deployment; the reconciler brings it up.

        Args:
            model: a `mdl_` id, the `job_` id of a job that succeeded, or an alias, which the deployment then follows.

        Raises `InvalidInputError` for an unknown model and `ConflictError` for a route prefix that is taken.
        """
        found, alias = self._registry.resolve(model, caller.tenant)
        spec = DeploymentSpec(
            id=new_id("dep"),
            model=found.id,
            artifact_uri=found.artifact_uri,
            alias=alias,
            route_prefix=route_prefix,
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=target_ongoing_requests,
            upscale_delay_s=upscale_delay_s,
            downscale_delay_s=downscale_delay_s,
            engine=engine,
            candidate=self._with_artifact(candidate, caller),
            shadow=shadow,
            tenant=caller.tenant,
        )
        _check_shadow(spec)
        return self._catalog.create_deployment(Deployment(spec, caller.tenant, int(self._clock())))

    def update(self, deployment_id: str, caller: Caller, changes: Mapping[str, Any]) -> Deployment:
        """Want something else of a deployment: another `model`, `engine` or number of replicas.

        The reconciler hands it to the cluster, where another model or engine is loaded beside the one that serves, and
        swapped in. `engine` replaces all options.

        Raises `NotFoundError`, `InvalidInputError` for an unknown model or replicas out of order, and `ConflictError`
        for a deployment that is being deleted.
        """
        deployment = self._catalog.get_deployment(deployment_id, tenant=caller.tenant)
        spec = replace(deployment.spec, **changes)
        if "model" in changes:
            found, alias = self._registry.resolve(spec.model, caller.tenant)
            spec = replace(spec, model=found.id, artifact_uri=found.artifact_uri, alias=alias)
        if "candidate" in changes:
            spec = replace(spec, candidate=self._with_artifact(spec.candidate, caller))
        _check_shadow(spec)
        if spec.max_replicas < spec.min_replicas:
            raise InvalidInputError(
                f"max_replicas would be {spec.max_replicas}, below min_replicas {spec.min_replicas}",
                field="max_replicas",
                value=spec.max_replicas,
            )
        if spec == deployment.spec:
            return deployment
        spec, state = changed(deployment, spec)
        return self._catalog.update_deployment(spec, state, tenant=caller.tenant)

    def _with_artifact(self, candidate: Mapping[str, Any] | None, caller: Caller) -> Mapping[str, Any] | None:
        if candidate is None:
            return None
        try:
            found, _ = self._registry.resolve(candidate["model"], caller.tenant)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"candidate: {error.message}", field="candidate.model", value=candidate["model"]
            ) from error
        return {**candidate, "model": found.id, "artifact_uri": found.artifact_uri}

    def delete(self, deployment_id: str, caller: Caller) -> Deployment:
        """Mark a deployment for its end; asking again is the same. Raises `NotFoundError` once it is gone."""
        deployment = self._catalog.get_deployment(deployment_id, tenant=caller.tenant)
        deleting = DeploymentState(DeploymentStatus.DELETING)
        self._catalog.set_deployment_state(deployment_id, deleting)
        return replace(deployment, state=deleting)


def _check_shadow(spec: DeploymentSpec) -> None:
    if spec.candidate is None and spec.shadow is not None and spec.shadow["against"] == "candidate":
        raise InvalidInputError(
            "shadow.against is 'candidate', and the deployment has none; give a candidate, or 'teacher'",
            field="shadow.against",
            value="candidate",
        )
