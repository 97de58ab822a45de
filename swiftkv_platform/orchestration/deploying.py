"""Callers' operations on deployments. Knows rules and ports; the reconciler does what takes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swiftkv_platform.errors import InvalidInputError, StaleVersionError
from swiftkv_platform.orchestration.deployment_limits import DeploymentLimits
from swiftkv_platform.orchestration.engine_options import check_engine_options
from swiftkv_platform.orchestration.fair_queue import Demand
from swiftkv_platform.orchestration.job import new_id
from swiftkv_platform.orchestration.merge_patch import contradicted, merged
from swiftkv_platform.orchestration.ports import (
    Catalog,
    Clock,
    Deployment,
    DeploymentSpec,
    DeploymentState,
    DeploymentStatus,
    Holdings,
)
from swiftkv_platform.orchestration.registry import RegistryService, changed
from swiftkv_platform.orchestration.routes import RouteRules
from swiftkv_platform.orchestration.service import Caller
from swiftkv_platform.orchestration.versions import Expected

ONE_TENANT = RouteRules()
UNLIMITED = DeploymentLimits()


class DeploymentService:
    """Putting models into service and taking them out.

    Args:
        routes: where deployments may answer.
        limits: what they may ask for.
    """

    def __init__(
        self,
        catalog: Catalog,
        registry: RegistryService,
        *,
        clock: Clock,
        routes: RouteRules = ONE_TENANT,
        limits: DeploymentLimits = UNLIMITED,
    ) -> None:
        self._catalog = catalog
        self._registry = registry
        self._clock = clock
        self._routes = routes
        self._limits = limits

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

        Raises `InvalidInputError` for an unknown model, `ConflictError` for a route prefix that is taken or in the way
        of another deployment's, and as `RouteRules.placed` and `DeploymentLimits.check`.
        """
        found, alias = self._registry.resolve(model, caller.tenant)
        spec = DeploymentSpec(
            id=new_id("dep"),
            model=found.id,
            artifact_uri=found.artifact_uri,
            alias=alias,
            route_prefix=self._routes.placed(route_prefix, caller.tenant),
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=target_ongoing_requests,
            upscale_delay_s=upscale_delay_s,
            downscale_delay_s=downscale_delay_s,
            engine=engine,
            candidate=None if candidate is None else self._with_artifact(candidate, caller),
            shadow=shadow,
            tenant=caller.tenant,
        )
        _check(spec)

        def admit(held: Holdings) -> None:
            self._limits.check(spec, caller.tenant, _demand(held))

        return self._catalog.create_deployment(Deployment(spec, caller.tenant, int(self._clock())), admit=admit)

    def update(
        self, deployment_id: str, caller: Caller, changes: Mapping[str, Any], *, expected: Expected | None = None
    ) -> Deployment:
        """Want something else of a deployment: another `model`, `engine` or number of replicas.

        The reconciler hands it to the cluster, where another model or engine is loaded beside the one that serves, and
        swapped in. Changes that are made at the same time both take effect where they are of different fields.

        Args:
            changes: a JSON merge patch: of `engine`, `candidate` and `shadow` too only what is given changes.
            expected: versions of the deployment that may be changed; None: the one it is at when this is called, and
                any that differs from that in other fields.

        Raises `NotFoundError`, `InvalidInputError` for an unknown model or options that would be refused,
        `PreconditionFailedError` for a deployment at another version than `expected`, `StaleVersionError` where a field
        is changed to something else at the same time, `ConflictError` for a deployment that is being deleted, and as
        `DeploymentLimits.check`.
        """
        seen = self._catalog.get_deployment(deployment_id, tenant=caller.tenant)
        patch = self._resolved(changes, caller)

        def change(present: Deployment, held: Holdings) -> tuple[DeploymentSpec, DeploymentState]:
            if expected is None:
                _check_uncontradicted(patch, seen, present)
            else:
                expected.check(f"deployment {deployment_id}", present.version)
            spec = _patched(present.spec, patch)
            _check(spec)
            self._limits.check(spec, caller.tenant, _demand(held), before=present.spec)
            return changed(present, spec)

        return self._catalog.change_deployment(deployment_id, change, tenant=caller.tenant)

    def _resolved(self, changes: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """The changes with the artifacts of the models that they name."""
        patch = dict(changes)
        if "model" in changes:
            found, alias = self._registry.resolve(changes["model"], caller.tenant)
            patch |= {"model": found.id, "artifact_uri": found.artifact_uri, "alias": alias}
        candidate = changes.get("candidate")
        if candidate is not None and "model" in candidate:
            patch["candidate"] = self._with_artifact(candidate, caller)
        return patch

    def _with_artifact(self, candidate: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
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


def _demand(held: Holdings) -> Demand:
    jobs = (Demand.of(spec) for spec in held.jobs)
    return sum((Demand.of_deployment(spec) for spec in held.deployments), sum(jobs, Demand()))


def _patched(spec: DeploymentSpec, patch: Mapping[str, Any]) -> DeploymentSpec:
    fields = {name: merged(getattr(spec, name), value) for name, value in patch.items()}
    if fields.get("engine", spec.engine) is None:
        fields["engine"] = {}
    for name in ("candidate", "shadow"):
        if fields.get(name) is not None:
            fields[name] = {"share": 0.0, **fields[name]}
    return replace(spec, **fields)


def _check_uncontradicted(patch: Mapping[str, Any], seen: Deployment, present: Deployment) -> None:
    if present.version == seen.version:
        return
    path = contradicted(patch, vars(seen.spec), vars(present.spec))
    if path is not None:
        field = ".".join(path)
        raise StaleVersionError(
            f"{field} was changed at the same time, and deployment {present.spec.id} is at version {present.version} "
            "now; look at it, and send the change again if it still holds",
            field=field,
            value=present.version,
        )


def _check(spec: DeploymentSpec) -> None:
    """Raises `InvalidInputError` for what does not fit together."""
    check_engine_options(spec.engine)
    if spec.max_replicas < spec.min_replicas:
        raise InvalidInputError(
            f"max_replicas would be {spec.max_replicas}, below min_replicas {spec.min_replicas}",
            field="max_replicas",
            value=spec.max_replicas,
        )
    if spec.candidate is not None and "model" not in spec.candidate:
        raise InvalidInputError(
            "candidate.model is missing, and there is no candidate to change; name its model", field="candidate.model"
        )
    if spec.shadow is not None and "against" not in spec.shadow:
        raise InvalidInputError(
            "shadow.against is missing, and there is no shadow to change; give 'teacher' or 'candidate'",
            field="shadow.against",
        )
    if spec.candidate is None and spec.shadow is not None and spec.shadow["against"] == "candidate":
        raise InvalidInputError(
            "shadow.against is 'candidate', and the deployment has none; give a candidate, or 'teacher'",
            field="shadow.against",
            value="candidate",
        )
    if spec.shadow is not None and spec.engine.get("backend") == "vllm":
        raise InvalidInputError(
            "shadow compares distributions, which backend native alone gives, and engine.backend is 'vllm'; leave one "
            "of them out",
            field="shadow",
            value=dict(spec.shadow),
        )
