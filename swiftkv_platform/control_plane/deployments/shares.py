"""Replicas that each deployment may have: tenants share the resources open to deployments, so that no tenant shuts out
another's deployment, nor deployments all jobs. A function of the wanted deployments and the nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import Tenants
from swiftkv_platform.control_plane.deployments.deployment import Deployment, replica_needs
from swiftkv_platform.control_plane.ray.places import Bundle, fit, open_to_deployments, plain, take
from swiftkv_platform.specs.deployment import ResolvedDeployment

_OPTIONS = {"CPU": "engine.num_threads", "GPU": "engine.tensor_parallel_size"}

_NOTHING = Demand()


@dataclass(frozen=True)
class Granted:
    """Most replicas of a deployment that Serve may start, and why that is fewer than it asks for."""

    replicas: int = 0
    why: str = ""

    def of(self, spec: ResolvedDeployment) -> ResolvedDeployment:
        """Return the deployment with its bounds reduced to the granted replicas; the same if it gets all."""
        if self.replicas >= spec.max_replicas:
            return spec
        bounds = {name: min(getattr(spec, name), self.replicas) for name in ("min_replicas", "max_replicas")}
        return spec.model_copy(update=bounds)


class Shares:
    """Division of the nodes' resources, of which `share` is open to deployments."""

    def __init__(self, nodes: Sequence[Bundle], share: float, policies: Tenants) -> None:
        self._nodes = nodes
        self._policies = policies
        self._total = {name: sum(node.get(name, 0.0) for node in nodes) for name in _OPTIONS}
        self._open = {name: open_to_deployments(most, share) for name, most in self._total.items()}

    def granted(
        self,
        deployments: Sequence[Deployment],
        *,
        present: Mapping[str, ResolvedDeployment] = {},
        draining: Mapping[str, Demand] = {},
    ) -> Mapping[str, Granted]:
        """Grant places replica by replica. Returns the grants by deployment id.

        The next replica goes to the tenant with the smallest dominant share relative to its weight; on a tie, to the
        one with the oldest deployment. Within a tenant, deployments take turns: one replica of each, oldest first, then
        up to `min_replicas`, then up to `max_replicas`.

        Args:
            deployments: those that are wanted, oldest first.
            present: those that have been applied, by id; they keep their replicas whatever drains.
            draining: demand that draining replicas still hold, by tenant; its new replicas do not get that as well.
        """
        free, left = [plain(node) for node in self._nodes], dict(self._open)
        whole = Demand(0, self._open["GPU"], self._open["CPU"])
        replicas = {item.spec.id: 0 for item in deployments}
        full: set[str] = set()
        held, turns = dict[str, Demand](), dict[str, Iterator[ResolvedDeployment]]()
        for tenant in dict.fromkeys(item.tenant for item in deployments):
            held[tenant] = Demand()
            turns[tenant] = _in_turn([item.spec for item in deployments if item.tenant == tenant], full)
        while turns:
            tenant = min(turns, key=lambda name: held[name].share(whole) / self._policies.policy(name).weight)
            spec = next(turns[tenant], None)
            if spec is None:
                del turns[tenant]
                continue
            was, needs = present.get(spec.id), replica_needs(spec)
            is_new = was is None or replica_needs(was) != needs or replicas[spec.id] >= was.max_replicas
            kept = draining.get(tenant, _NOTHING) if is_new else _NOTHING
            open_now = {"CPU": left["CPU"] - kept.cpus, "GPU": left["GPU"] - kept.gpus}
            if fit([open_now], [needs]) and take(free, [needs]):
                take([left], [needs])
                replicas[spec.id] += 1
                held[tenant] += Demand(0, needs["GPU"], needs["CPU"])
            else:
                full.add(spec.id)
        return {item.spec.id: self._said(item.spec, replicas[item.spec.id]) for item in deployments}

    def _said(self, spec: ResolvedDeployment, replicas: int) -> Granted:
        if replicas >= spec.max_replicas:
            return Granted(replicas)
        needs = {name: amount for name, amount in replica_needs(spec).items() if amount}
        options = (f"{_OPTIONS[name]} {spec.engine.get(_OPTIONS[name].removeprefix('engine.'), 1)}" for name in needs)
        opened = _words(f"{self._open[name]:g} of {self._total[name]:g} {name}" for name in needs)
        each = _words(f"{amount:g} {name}" for name, amount in needs.items())
        alone = f"a replica needs {each} ({_words(options)})"
        if not fit(self._nodes, [needs]):
            largest = {name: max((node.get(name, 0.0) for node in self._nodes), default=0.0) for name in needs}
            most = _words(f"{amount:g} {name}" for name, amount in largest.items())
            return Granted(0, f"{alone}, and no node has as much: the largest have {most}; use less")
        if not fit([self._open], [needs]):
            return Granted(0, f"{alone}, and {opened} are open to deployments; use less")
        bound = "min_replicas" if replicas < spec.min_replicas else "max_replicas"
        placed = f"{replicas} of {bound} {getattr(spec, bound)} can be placed, with {each} each"
        return Granted(
            replicas, f"{placed}: tenants share the {opened} open to deployments, including what is still draining"
        )


def released(
    before: Iterable[ResolvedDeployment], after: Iterable[ResolvedDeployment]
) -> Iterator[tuple[ResolvedDeployment, Demand]]:
    """Yield deployments that lose replicas when `after` replaces `before`, and what these replicas hold."""
    now = {spec.id: spec for spec in after}
    for spec in before:
        then, held = now.get(spec.id), Demand.of_deployment(spec)
        left = (
            held
            if then is None or replica_needs(then) != replica_needs(spec)
            else held.beyond(Demand.of_deployment(then))
        )
        if left != _NOTHING:
            yield spec, left


def _words(parts: Iterable[str]) -> str:
    return " and ".join(parts)


def _in_turn(specs: Sequence[ResolvedDeployment], full: set[str]) -> Iterator[ResolvedDeployment]:
    """Yield a tenant's deployments, once for each replica, skipping those that are full by then."""
    fewest = {spec.id: max(spec.min_replicas, 1) for spec in specs}
    for bounds in ({}, fewest), (fewest, {spec.id: spec.max_replicas for spec in specs}):
        number, rest = 1, specs
        while rest := [spec for spec in rest if number <= bounds[1][spec.id] and spec.id not in full]:
            yield from (spec for spec in rest if number > bounds[0].get(spec.id, 0))
            number += 1
