"""Brings the serving cluster to the deployments that are wanted. Knows ports alone, and nothing of what serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swiftkv_platform.orchestration.deployment import Deployment, DeploymentState, DeploymentStatus
from swiftkv_platform.orchestration.leadership import UNDISPUTED, Lease
from swiftkv_platform.orchestration.ports import Catalog, ServeCluster
from swiftkv_platform.specs.deployment import ResolvedDeployment

_FORGOTTEN = DeploymentState(DeploymentStatus.PENDING, "the serving cluster has lost it; it is being applied again")


class DeploymentReconciler:
    """Applies the set of wanted deployments whenever it, or what is served, has changed.

    Args:
        lease: the right to change anything; without one there is no other control plane.
    """

    def __init__(self, catalog: Catalog, cluster: ServeCluster, lease: Lease = UNDISPUTED) -> None:
        self._catalog = catalog
        self._cluster = cluster
        self._lease = lease
        self._applied: Sequence[ResolvedDeployment] | None = None
        """Deployments that this process last applied; None before it has applied any."""

    def tick(self) -> None:
        """Raises `ClusterUnavailableError`, `DatabaseUnavailableError` and `LeaseLostError`; the next tick makes up for
        it."""
        deployments = self._catalog.all_deployments()
        if not deployments and not self._applied:
            return
        wanted = [item.spec for item in deployments if item.state.status is not DeploymentStatus.DELETING]
        states = self._cluster.status()
        stale: Sequence[ResolvedDeployment] = ()
        if wanted != self._applied or _differ(wanted, states):
            # What the cluster has said is no word on what it is only now told to serve.
            stale = [spec for spec in wanted if spec not in (self._applied or ())]
            self._applied = None
            self._lease.check()  # another control plane may have applied something newer
            self._cluster.apply(wanted)
            self._applied = wanted
        for deployment in deployments:
            if deployment.spec not in stale or deployment.state.status is DeploymentStatus.DELETING:
                self._store_state(deployment, states.get(deployment.spec.id))

    def _store_state(self, deployment: Deployment, state: DeploymentState | None) -> None:
        self._lease.check()
        deleting = deployment.state.status is DeploymentStatus.DELETING
        if state is None and deleting:
            self._catalog.remove_deployment(deployment.spec.id)
        elif state is None and deployment.state.status is not DeploymentStatus.PENDING:
            self._catalog.set_deployment_state(deployment.spec.id, _FORGOTTEN)
        elif state is not None and state != deployment.state and not deleting:
            self._catalog.set_deployment_state(deployment.spec.id, state, of=deployment.spec)


def _differ(wanted: Sequence[ResolvedDeployment], states: Mapping[str, DeploymentState]) -> bool:
    """Whether something wanted is not served, or something else is and is not on its way out."""
    served = {name for name, state in states.items() if state.status is not DeploymentStatus.DELETING}
    return {spec.id for spec in wanted} != served
