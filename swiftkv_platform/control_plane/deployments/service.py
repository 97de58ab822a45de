"""Operations on deployments that routes offer, and the reconciler that applies them to the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, Tenants
from swiftkv_platform.control_plane.base import Caller, Clock, new_id
from swiftkv_platform.control_plane.deployments.deployment import (
    Deployment,
    DeploymentState,
    DeploymentStatus,
    RouteRules,
    ServeCluster,
)
from swiftkv_platform.control_plane.deployments.limits import DeploymentLimits
from swiftkv_platform.control_plane.deployments.rows import DeploymentRepository
from swiftkv_platform.control_plane.deployments.shares import Granted, Shares, released
from swiftkv_platform.control_plane.loops.leadership import UNDISPUTED, Lease
from swiftkv_platform.control_plane.merge_patches import Expected, contradicted, merged
from swiftkv_platform.control_plane.models.model import Model
from swiftkv_platform.control_plane.models.registry import RegistryService, changed
from swiftkv_platform.control_plane.ray.places import Bundle, Node, fit
from swiftkv_platform.errors import InvalidInputError, StaleVersionError, did_you_mean
from swiftkv_platform.logs import get_logger
from swiftkv_platform.sources import OPEN, Access
from swiftkv_platform.specs.deployment import DeploymentSpec, ResolvedDeployment
from swiftkv_platform.specs.engine import EngineConfig

ONE_TENANT = RouteRules()
UNLIMITED = DeploymentLimits()


@dataclass
class DeploymentService:
    """Creates, changes and deletes deployments for callers."""

    deployments: DeploymentRepository
    registry: RegistryService
    _: KW_ONLY
    clock: Clock
    routes: RouteRules = ONE_TENANT
    """Rules on route prefixes."""
    limits: DeploymentLimits = UNLIMITED
    access: Callable[[str], Access] = lambda _: OPEN
    """Sources that a tenant may read, including base models of adapters."""

    def create(self, caller: Caller, wanted: DeploymentSpec) -> Deployment:
        """Store a deployment; the reconciler starts it.

        Args:
            wanted: `model` is resolved by `RegistryService.resolve`; an alias is followed from then on.

        Raises `InvalidInputError` for an unknown model, `QuotaExceededError` if the tenant has too many deployments,
        `ConflictError` for a route prefix that is taken or interferes with another deployment's, and as
        `RouteRules.placed` and `DeploymentLimits.check`.
        """
        spec = _valid(
            {
                **self._resolved(wanted.model_dump(), caller),
                "id": new_id("dep"),
                "route_prefix": self.routes.placed(wanted.route_prefix, caller.tenant),
                "tenant": caller.tenant,
            }
        )

        def admit(held: Demand) -> None:
            self.limits.check(spec, caller.tenant, held)

        deployment = Deployment(spec, caller.tenant, int(self.clock()))
        policy = self.limits.policies.policy(caller.tenant)
        return self.deployments.create_deployment(deployment, policy=policy, admit=admit)

    def update(
        self, deployment_id: str, caller: Caller, changes: Mapping[str, Any], *, expected: Expected | None = None
    ) -> Deployment:
        """Change a deployment's wanted `model`, `engine`, number of replicas or other fields.

        The reconciler applies the change to the cluster, where another model or engine is loaded beside the one that
        serves, and swapped in. Concurrent changes of different fields both take effect.

        Args:
            changes: a JSON merge patch; within `engine`, `candidate` and `shadow` too, only given fields change.
            expected: versions of the deployment that may be changed. None: the present one, or a later one that differs
                in other fields.

        Raises `NotFoundError`, `InvalidInputError` for an unknown model or options that would be refused,
        `PreconditionFailedError` for a deployment at another version than `expected`, `StaleVersionError` if a field is
        changed to another value at the same time, `ConflictError` for a deployment that is being deleted, and as
        `DeploymentLimits.check`.
        """
        seen = self.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        patch = self._resolved(changes, caller)

        def change(present: Deployment, held: Demand) -> tuple[ResolvedDeployment, DeploymentState]:
            if expected is None:
                _check_uncontradicted(patch, seen, present)
            else:
                expected.check(f"deployment {deployment_id}", present.version)
            spec = _valid(merged(present.spec.model_dump(), patch))
            self.limits.check(spec, caller.tenant, held, before=present.spec)
            return changed(present, spec)

        return self.deployments.change_deployment(deployment_id, change, tenant=caller.tenant)

    def _resolved(self, changes: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
        """Return the changes with ids and artifact addresses of the models that they name."""
        patch = dict(changes)
        if "model" in changes:
            found, alias = self.registry.resolve(changes["model"], caller.tenant)
            self._check_base(found, caller, "model")
            patch |= {"model": found.id, "artifact_uri": found.artifact_uri, "alias": alias}
        candidate = changes.get("candidate")
        if candidate is not None and "model" in candidate:
            patch["candidate"] = self._with_artifact(candidate, caller)
        return patch

    def _with_artifact(self, candidate: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        try:
            found, _ = self.registry.resolve(candidate["model"], caller.tenant)
        except InvalidInputError as error:
            message = f"candidate: {error.message}"
            raise InvalidInputError(message, field="candidate.model", value=candidate["model"]) from error
        self._check_base(found, caller, "candidate.model")
        return {**candidate, "model": found.id, "artifact_uri": found.artifact_uri}

    def _check_base(self, model: Model, caller: Caller, field: str) -> None:
        """Raise `InvalidInputError` for an adapter whose base model the tenant may not, or no longer, read."""
        if ADAPTER_LINEAGE in model.lineage:
            self.access(caller.tenant).model(str(model.lineage["teacher"]), f"{field}.base")

    def delete(self, deployment_id: str, caller: Caller) -> Deployment:
        """Mark a deployment for deletion; repeating is harmless. Raises `NotFoundError` once it is gone."""
        deployment = self.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        deleting = DeploymentState(DeploymentStatus.DELETING)
        self.deployments.set_deployment_state(deployment_id, deleting)
        return replace(deployment, state=deleting)


def _check_uncontradicted(patch: Mapping[str, Any], seen: Deployment, present: Deployment) -> None:
    if present.version == seen.version:
        return
    path = contradicted(patch, seen.spec.model_dump(), present.spec.model_dump())
    if path is not None:
        field = ".".join(path)
        raise StaleVersionError(
            f"{field} was changed at the same time, and deployment {present.spec.id} is at version {present.version} "
            "now; read it, and send the change again if it still applies",
            field=field,
            value=present.version,
        )


def _valid(document: Mapping[str, Any]) -> ResolvedDeployment:
    """Return the document as a spec. Raises `InvalidInputError` for fields that do not fit together."""
    check_engine_options(document.get("engine", {}))
    candidate, shadow = document.get("candidate"), document.get("shadow")
    if candidate is not None and "model" not in candidate:
        message = "candidate.model is missing, and there is no candidate to change; name its model"
        raise InvalidInputError(message, field="candidate.model")
    if shadow is not None and "against" not in shadow:
        message = "shadow.against is missing, and there is no shadow to change; give 'teacher' or 'candidate'"
        raise InvalidInputError(message, field="shadow.against")
    try:
        return ResolvedDeployment.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        context = first.get("ctx", {})
        field = context.get("field", ".".join(map(str, first["loc"])))
        raise InvalidInputError(first["msg"], field=field, value=context.get("value", first["input"])) from error


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidInputError` for the first unknown option, or the first invalid value."""
    try:
        EngineConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        options_known = sorted(EngineConfig.model_fields)
        nearest = did_you_mean(str(first["loc"][-1]), options_known)
        known = f"unknown option{nearest}; accepted here: {', '.join(options_known)}"
        place = ".".join(["engine", *map(str, first["loc"])])
        why = known if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidInputError(f"{place}: {why}", field=place, value=first["input"]) from error


_FORGOTTEN = DeploymentState(DeploymentStatus.PENDING, "the serving cluster has lost it; it is being redeployed")
_PATIENCE_S = 600.0
"""Seconds for which lost nodes still count: most come back, and deployments on the others go on meanwhile."""

_DRAIN_S = 150.0
"""Seconds after which stopped replicas are gone; they finish the requests they have begun for up to 120 s."""


@dataclass
class DeploymentReconciler:
    """Applies the wanted deployments, as far as the cluster has room, whenever they or the served applications have
    changed."""

    deployments: DeploymentRepository
    cluster: ServeCluster
    lease: Lease = UNDISPUTED
    """Lease to hold for any change; the default is for the only control plane."""
    _: KW_ONLY
    nodes: Callable[[], Sequence[Node] | None] = lambda: None
    """Nodes that replicas run on; None if they are unknown, and then all wanted replicas are applied."""
    share: float = 1.0
    """Share of these nodes that is open to deployments."""
    policies: Tenants = NO_LIMITS
    clock: Clock = time.time
    unreadable: Sequence[str] = field(default=(), init=False)
    """Ids of deployments whose rows cannot be read; they stay served as they are."""
    _applied: Sequence[ResolvedDeployment] | None = field(default=None, init=False)
    """Deployments that this process last applied; None before it has applied any."""
    _served: Sequence[ResolvedDeployment] = field(default=(), init=False)
    """Deployments that were last applied, whatever has failed since."""
    _draining: list[tuple[float, ResolvedDeployment, Demand]] = field(default_factory=list, init=False)
    """(Unix seconds of its end, spec, demand) of replicas that still hold resources after a later `apply`."""
    _believed: Sequence[Bundle] | None = field(default=None, init=False)
    """Nodes that count; None before any were reported."""
    _believed_at: float = field(default=0.0, init=False)
    """Unix seconds at which they were last reported."""

    def tick(self) -> None:
        """Run one round. Raises `ClusterUnavailableError`, `DatabaseUnavailableError` and `LeaseLostError`; the next
        round catches up."""
        found = self.deployments.all_deployments()
        deployments, kept = found.items, found.left_out
        if kept and list(kept) != list(self.unreadable):
            get_logger(loop="deployments").error("deployments that cannot be read are served on as they are", ids=kept)
        self.unreadable = kept
        if not deployments and not self._applied:
            return
        states = self.cluster.status()
        self._drained(states)
        granted = self._granted([item for item in deployments if item.state.status is not DeploymentStatus.DELETING])
        wanted = [
            granted[item.spec.id].of(item.spec)
            for item in deployments
            if item.spec.id in granted and granted[item.spec.id].replicas
        ]
        stale: Collection[str] = ()
        if wanted != self._applied or _differ(wanted, states, kept):
            # The states of these are older than the spec that is applied only now.
            applied = {spec.id: spec for spec in self._applied or ()}
            stale = {spec.id for spec in wanted if spec != applied.get(spec.id) and spec.id in states}
            self._applied = None
            self.lease.check()  # another control plane may have applied something newer
            self.cluster.apply(wanted, keep=kept)
            self._drain(wanted)
            self._applied = wanted
        for deployment in deployments:
            place, state = granted.get(deployment.spec.id), states.get(deployment.spec.id)
            if place is not None and not place.replicas:
                state = DeploymentState(DeploymentStatus.PENDING, place.why)
            elif place is not None and place.why and state is not None:
                state = replace(state, message="; ".join(filter(None, (state.message, place.why))))
            if deployment.spec.id not in stale:
                self._store_state(deployment, state)

    def _granted(self, wanted: Sequence[Deployment]) -> Mapping[str, Granted]:
        """Return the replicas that each deployment may start, by id."""
        nodes = self._nodes()
        if nodes is None:
            return {item.spec.id: Granted(item.spec.max_replicas) for item in wanted}
        draining: dict[str, Demand] = {}
        for _, spec, demand in self._draining:
            if spec.tenant is not None:
                draining[spec.tenant] = draining.get(spec.tenant, Demand()) + demand
        shares = Shares(nodes, self.share, self.policies)
        return shares.granted(wanted, present={spec.id: spec for spec in self._served}, draining=draining)

    def _drain(self, applied: Sequence[ResolvedDeployment]) -> None:
        """Record what was applied, and what replicas of the previous set hold while they drain."""
        until = self.clock() + _DRAIN_S
        self._draining += [(until, spec, demand) for spec, demand in released(self._served, applied)]
        self._served = applied

    def _drained(self, states: Collection[str]) -> None:
        """Forget drained replicas whose time is over or whose application is gone. `states`: ids of present
        applications."""
        now = self.clock()
        self._draining = [item for item in self._draining if item[0] > now and item[1].id in states]

    def _nodes(self) -> Sequence[Bundle] | None:
        told, now = self.nodes(), self.clock()
        nodes = None if told is None else [node.total for node in told]
        if nodes is not None and (fit(nodes, self._believed or ()) or now > self._believed_at + _PATIENCE_S):
            self._believed, self._believed_at = nodes, now
        return self._believed

    def _store_state(self, deployment: Deployment, state: DeploymentState | None) -> None:
        self.lease.check()
        deleting = deployment.state.status is DeploymentStatus.DELETING
        if state is None and deleting:
            self.deployments.remove_deployment(deployment.spec.id)
        elif state is None and deployment.state.status is not DeploymentStatus.PENDING:
            self.deployments.set_deployment_state(deployment.spec.id, _FORGOTTEN)
        elif state is not None and state != deployment.state and not deleting:
            self.deployments.set_deployment_state(deployment.spec.id, state, of=deployment.spec)


def _differ(wanted: Sequence[ResolvedDeployment], states: Mapping[str, DeploymentState], kept: Collection[str]) -> bool:
    """Whether a wanted deployment is not served, or another is that is neither to be kept nor being deleted."""
    served = {name for name, state in states.items() if state.status is not DeploymentStatus.DELETING}
    return {spec.id for spec in wanted} != served - set(kept)
