"""Reconciler of deployments: applies wanted deployments to the cluster, as far as its resources suffice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.deployments.repository import (
    Deployment,
    DeploymentState,
    DeploymentStatus,
    make_replica_bundle,
)
from swiftkv_platform.control_plane.loops import Leadership
from swiftkv_platform.control_plane.ray import (
    Bundle,
    RayJobs,
    can_place,
    compute_max_deployment_resources,
    normalize_resources,
    reserve,
)
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import ResolvedDeployment

_OPTIONS = {"CPU": "engine.num_threads", "GPU": "engine.tensor_parallel_size"}

_NO_DEMAND = Demand()


@dataclass(frozen=True)
class ReplicaGrant:
    """Max replicas of a deployment that Ray Serve may start, and why that is fewer than the spec's `max_replicas`."""

    replicas: int = 0
    why: str = ""

    def limit_replicas(self, spec: ResolvedDeployment) -> ResolvedDeployment:
        """Return the deployment with min and max replicas reduced to the granted replicas."""
        if self.replicas >= spec.max_replicas:
            return spec
        bounds = {name: min(getattr(spec, name), self.replicas) for name in ("min_replicas", "max_replicas")}
        return spec.model_copy(update=bounds)


class ReplicaScheduler:
    """Divides the part of the nodes' resources that deployments may use (`share`) between tenants."""

    def __init__(self, nodes: Sequence[Bundle], share: float, policies: TenantPolicies) -> None:
        self._nodes = nodes
        self._policies = policies
        self._total = {name: sum(node.get(name, 0.0) for node in nodes) for name in _OPTIONS}
        self._open = {name: compute_max_deployment_resources(most, share) for name, most in self._total.items()}

    def grant_replicas(
        self,
        deployments: Sequence[Deployment],
        *,
        present: Mapping[str, ResolvedDeployment],
        draining: Mapping[str, Demand],
    ) -> Mapping[str, ReplicaGrant]:
        """Grant resources replica by replica. Returns the grants by deployment id.

        The next replica goes to the tenant with the smallest dominant share relative to its weight; on a tie, to the
        one with the oldest deployment. Within a tenant, deployments take turns: one replica of each, oldest first, then
        up to `min_replicas`, then up to `max_replicas`.

        Args:
            deployments: those that are wanted, oldest first.
            present: those that have been applied, by id; they keep their replicas whatever drains.
            draining: demand that draining replicas still hold, by tenant; its new replicas do not get that as well.
        """
        free, left = [normalize_resources(node) for node in self._nodes], dict(self._open)
        whole = Demand(0, self._open["GPU"], self._open["CPU"])
        replicas = {item.spec.id: 0 for item in deployments}
        full: set[str] = set()
        held, turns = dict[str, Demand](), dict[str, Iterator[ResolvedDeployment]]()
        for tenant in dict.fromkeys(item.tenant for item in deployments):
            held[tenant] = Demand()
            turns[tenant] = _interleave_replicas([item.spec for item in deployments if item.tenant == tenant], full)
        while turns:
            tenant = min(turns, key=lambda name: held[name].dominant_share(whole) / self._policies.get(name).weight)
            spec = next(turns[tenant], None)
            if spec is None:
                del turns[tenant]
                continue
            was, needs = present.get(spec.id), make_replica_bundle(spec)
            is_new = was is None or make_replica_bundle(was) != needs or replicas[spec.id] >= was.max_replicas
            kept = draining.get(tenant, _NO_DEMAND) if is_new else _NO_DEMAND
            open_now = {"CPU": left["CPU"] - kept.cpus, "GPU": left["GPU"] - kept.gpus}
            if can_place([open_now], [needs]) and reserve(free, [needs]):
                reserve([left], [needs])
                replicas[spec.id] += 1
                held[tenant] += Demand(0, needs["GPU"], needs["CPU"])
            else:
                full.add(spec.id)
        return {item.spec.id: self._explain_grant(item.spec, replicas[item.spec.id]) for item in deployments}

    def _explain_grant(self, spec: ResolvedDeployment, replicas: int) -> ReplicaGrant:
        if replicas >= spec.max_replicas:
            return ReplicaGrant(replicas)
        needs = {name: amount for name, amount in make_replica_bundle(spec).items() if amount}
        options = (f"{_OPTIONS[name]} {spec.engine.get(_OPTIONS[name].removeprefix('engine.'), 1)}" for name in needs)
        opened = _join_words(f"{self._open[name]:g} of {self._total[name]:g} {name}" for name in needs)
        each = _join_words(f"{amount:g} {name}" for name, amount in needs.items())
        alone = f"a replica needs {each} ({_join_words(options)})"
        if not can_place(self._nodes, [needs]):
            largest = {name: max((node.get(name, 0.0) for node in self._nodes), default=0.0) for name in needs}
            most = _join_words(f"{amount:g} {name}" for name, amount in largest.items())
            return ReplicaGrant(0, f"{alone}, and the largest nodes have {most}; request less per replica")
        if not can_place([self._open], [needs]):
            return ReplicaGrant(0, f"{alone}, and only {opened} are available to deployments; request less per replica")
        bound = "min_replicas" if replicas < spec.min_replicas else "max_replicas"
        placed = f"only {replicas} of {getattr(spec, bound)} replicas ({bound}) fit ({each} each)"
        shared = f"the deployments of all tenants, with draining replicas, share the {opened} that deployments may use"
        return ReplicaGrant(replicas, f"{placed}: {shared}")


def find_released_demand(
    previous: Iterable[ResolvedDeployment], current: Iterable[ResolvedDeployment]
) -> Iterator[tuple[ResolvedDeployment, Demand]]:
    """Yield (deployment, demand of the replicas that it loses) when the deployments `current` replace `previous`."""
    now = {spec.id: spec for spec in current}
    for spec in previous:
        then, held = now.get(spec.id), Demand.for_deployment(spec)
        left = (
            held
            if then is None or make_replica_bundle(then) != make_replica_bundle(spec)
            else held.subtract_clamped(Demand.for_deployment(then))
        )
        if left != _NO_DEMAND:
            yield spec, left


def _join_words(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def _interleave_replicas(specs: Sequence[ResolvedDeployment], full: set[str]) -> Iterator[ResolvedDeployment]:
    """Yield a tenant's deployments, once for each replica, skipping deployments in `full`."""
    fewest = {spec.id: max(spec.min_replicas, 1) for spec in specs}
    for bounds in ({}, fewest), (fewest, {spec.id: spec.max_replicas for spec in specs}):
        number, rest = 1, specs
        while rest := [spec for spec in rest if number <= bounds[1][spec.id] and spec.id not in full]:
            yield from (spec for spec in rest if number > bounds[0].get(spec.id, 0))
            number += 1


_LOST_STATE = DeploymentState(DeploymentStatus.PENDING, "missing on the serving cluster; redeploying")
_LOST_NODE_GRACE_S = 600.0
"""Seconds for which lost nodes still count as capacity, since most of them return."""

_UNREPORTED_STATUSES = (DeploymentStatus.PENDING, DeploymentStatus.DELETING)
"""Statuses that the control plane sets itself."""
_UNKNOWN_AFTER_S = 15.0
"""Seconds without a report of the cluster after which the states of deployments are unknown."""

_DRAIN_TIMEOUT_S = 150.0
"""Seconds after which stopped replicas have ended; they finish running requests for up to 120 s."""


class DeploymentReconciler:
    """Applies the wanted deployments, as far as the cluster has room, whenever they or the served applications have
    changed. `lease`: to hold for any change."""

    def __init__(self, parts: Components, settings: Settings, lease: Leadership) -> None:
        self._parts = parts
        self._lease = lease
        own = settings.serve_dashboard_url
        self._cluster = parts.cluster if own is None else RayJobs(own)
        """Cluster on whose nodes replicas run."""
        self._share = settings.resolved_deployments_share
        self.unreadable: Sequence[str] = ()
        """Ids of deployments whose rows cannot be read; they stay served as they are."""
        self._applied: Sequence[ResolvedDeployment] | None = None
        """Deployments that this process last applied; None before it has applied any."""
        self._served: Sequence[ResolvedDeployment] = ()
        """Deployments that were last applied, even if applying has failed since."""
        self._draining: list[tuple[float, ResolvedDeployment, Demand]] = []
        """(Unix seconds of its end, spec, demand) of replicas that still hold resources after a later `apply`."""
        self._nodes: Sequence[Bundle] | None = None
        """Nodes that count; None before any were reported."""
        self._nodes_at = 0.0
        """Unix seconds at which they were last reported."""
        self._unreported_since: float | None = None
        """Unix seconds since which rounds have failed because the cluster is unavailable."""

    def tick(self) -> None:
        """Run one round. Raises `ClusterUnavailableError`, `DatabaseUnavailableError` and `LeaseLostError`; the next
        round catches up."""
        found = self._parts.deployments.list_all_deployments()
        deployments, kept = found.items, found.unreadable_ids
        if kept and list(kept) != list(self.unreadable):
            get_logger(loop="deployments").error("unreadable deployments keep serving unchanged", ids=kept)
        self.unreadable = kept
        if not deployments and not self._applied:
            return
        began = self._parts.clock()
        try:
            self._reconcile(deployments, kept)
        except ClusterUnavailableError:
            self._mark_unknown(deployments, began)
            raise
        self._unreported_since = None

    def _reconcile(self, deployments: Sequence[Deployment], kept: Sequence[str]) -> None:
        """Apply the wanted deployments, and store the states that the cluster reports. `kept`: ids that stay as they
        are."""
        states = self._parts.serving.list_states()
        self._forget_drained(states)
        grants = self._grant_replicas(
            [item for item in deployments if item.state.status is not DeploymentStatus.DELETING]
        )
        wanted = [
            grants[item.spec.id].limit_replicas(item.spec)
            for item in deployments
            if item.spec.id in grants and grants[item.spec.id].replicas
        ]
        stale: Collection[str] = ()
        if wanted != self._applied or _needs_apply(wanted, states, kept):
            # The states of these are older than the spec that is applied only now.
            applied = {spec.id: spec for spec in self._applied or ()}
            stale = {spec.id for spec in wanted if spec != applied.get(spec.id) and spec.id in states}
            self._applied = None
            self._lease.check_leading()  # another control plane may have applied something newer
            self._parts.serving.apply(wanted, keep=kept)
            self._record_draining(wanted)
            self._applied = wanted
        for deployment in deployments:
            grant, state = grants.get(deployment.spec.id), states.get(deployment.spec.id)
            if grant is not None and not grant.replicas:
                state = DeploymentState(DeploymentStatus.PENDING, grant.why)
            elif grant is not None and grant.why and state is not None:
                state = replace(state, message="; ".join(filter(None, (state.message, grant.why))))
            if deployment.spec.id not in stale:
                self._store_state(deployment, state)

    def _mark_unknown(self, deployments: Sequence[Deployment], began: float) -> None:
        """Store since when the cluster has reported no states, once that has lasted a while. `began`: Unix seconds at
        which the failed round began; it may have waited for long."""
        self._unreported_since = self._unreported_since or began
        if self._parts.clock() < self._unreported_since + _UNKNOWN_AFTER_S:
            return
        self._lease.check_leading()
        for deployment in deployments:
            spec, state = deployment.spec, deployment.state
            if state.unknown_since is None and state.status not in _UNREPORTED_STATUSES:
                unknown = replace(state, unknown_since=int(self._unreported_since))
                self._parts.deployments.set_deployment_state(spec.id, unknown, of=spec)

    def _grant_replicas(self, wanted: Sequence[Deployment]) -> Mapping[str, ReplicaGrant]:
        """Return the replicas that each deployment may start, by id."""
        nodes = self._list_known_nodes()
        if nodes is None:
            return {item.spec.id: ReplicaGrant(item.spec.max_replicas) for item in wanted}
        draining: dict[str, Demand] = {}
        for _, spec, demand in self._draining:
            if spec.tenant is not None:
                draining[spec.tenant] = draining.get(spec.tenant, Demand()) + demand
        shares = ReplicaScheduler(nodes, self._share, self._parts.policies)
        return shares.grant_replicas(wanted, present={spec.id: spec for spec in self._served}, draining=draining)

    def _record_draining(self, applied: Sequence[ResolvedDeployment]) -> None:
        """Record what was applied, and what replicas of the previous set hold while they drain."""
        until = self._parts.clock() + _DRAIN_TIMEOUT_S
        self._draining += [(until, spec, demand) for spec, demand in find_released_demand(self._served, applied)]
        self._served = applied

    def _forget_drained(self, states: Collection[str]) -> None:
        """Forget drained replicas whose time is over or whose application is gone. `states`: ids of present
        applications."""
        now = self._parts.clock()
        self._draining = [item for item in self._draining if item[0] > now and item[1].id in states]

    def _list_known_nodes(self) -> Sequence[Bundle] | None:
        told, now = self._cluster.list_nodes(), self._parts.clock()
        nodes = None if told is None else [node.total for node in told]
        if nodes is not None and (can_place(nodes, self._nodes or ()) or now > self._nodes_at + _LOST_NODE_GRACE_S):
            self._nodes, self._nodes_at = nodes, now
        return self._nodes

    def _store_state(self, deployment: Deployment, state: DeploymentState | None) -> None:
        self._lease.check_leading()
        deleting = deployment.state.status is DeploymentStatus.DELETING
        if state is None and deleting:
            self._parts.deployments.remove_deployment(deployment.spec.id)
        elif state is None and deployment.state.status is not DeploymentStatus.PENDING:
            self._parts.deployments.set_deployment_state(deployment.spec.id, _LOST_STATE)
        elif state is not None and state != deployment.state and not deleting:
            self._parts.deployments.set_deployment_state(deployment.spec.id, state, of=deployment.spec)


def _needs_apply(
    wanted: Sequence[ResolvedDeployment], states: Mapping[str, DeploymentState], kept: Collection[str]
) -> bool:
    """Whether a wanted deployment is not served, or another is that is neither to be kept nor being deleted."""
    served = {name for name, state in states.items() if state.status is not DeploymentStatus.DELETING}
    return {spec.id for spec in wanted} != served - set(kept)
